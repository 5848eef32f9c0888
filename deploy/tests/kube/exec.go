package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-streaming/pkg/streaming"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	utilexec "k8s.io/utils/exec"
)

var errNotSupported = errors.New("the test's nodes support exec only")

// execStreams runs `kubectl exec` by runc; terminals, attach and port-forward are not supported.
type execStreams struct{ runtime *runcRuntime }

func (s execStreams) Exec(ctx context.Context, id string, argv []string, in io.Reader, out, err io.WriteCloser, tty bool, _ <-chan remotecommand.TerminalSize) error {
	if tty {
		return errNotSupported
	}
	cmd := s.runtime.command(append([]string{"exec", id}, argv...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, out, err
	failed := cmd.Run()
	var exit *exec.ExitError
	if errors.As(failed, &exit) {
		return &utilexec.ExitErrorWrapper{ExitError: exit}
	}
	return failed
}

func (s execStreams) Attach(context.Context, string, io.Reader, io.WriteCloser, io.WriteCloser, bool, <-chan remotecommand.TerminalSize) error {
	return errNotSupported
}

func (s execStreams) PortForward(context.Context, string, int32, io.ReadWriteCloser) error {
	return errNotSupported
}

// serveExec starts the server to which the kubelet forwards the streams of `kubectl exec`.
func serveExec(runtime *runcRuntime) (streaming.Server, error) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	config := streaming.DefaultConfig
	config.Addr = free.Addr().String()
	if err := free.Close(); err != nil {
		return nil, err
	}
	server, err := streaming.NewServer(config, execStreams{runtime})
	if err != nil {
		return nil, err
	}
	go func() { check(fmt.Errorf("exec server: %w", server.Start(true))) }()
	return server, nil
}

func (r *runcRuntime) Exec(_ context.Context, request *runtimeapi.ExecRequest) (*runtimeapi.ExecResponse, error) {
	return r.streams.GetExec(request)
}
