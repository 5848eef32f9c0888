package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	apitest "k8s.io/cri-api/pkg/apis/testing"
	"k8s.io/cri-streaming/pkg/streaming"
)

const bridge, gateway = "bk0", "10.88.0.1"

// imageFiles says what a container of an image sees: the root file system is an overlay over Rootfs.
type imageFiles struct {
	Rootfs string   `json:"rootfs"`
	Env    []string `json:"env"`
	// Mounts are host paths that are bound read-only at the same place, over the pod's volumes.
	Mounts []string `json:"mounts"`
	// Readable are directories of the root file system that every user may enter, whatever the host's mode.
	Readable []string `json:"readable"`
}

type container struct {
	config  *runtimeapi.ContainerConfig
	sandbox string
	logPath string
	cmd     *exec.Cmd
	done    chan struct{}
}

// runcRuntime gives each pod a network namespace with an address and runs its containers with runc. The bookkeeping of
// the container runtime interface (lists, states, attempts) is that of FakeRuntimeService.
type runcRuntime struct {
	*apitest.FakeRuntimeService
	runc, state, prefix string
	images              map[string]imageFiles
	streams             streaming.Server

	mu         sync.Mutex
	pods       int
	addresses  map[string]int // sandbox -> last byte of its address
	containers map[string]*container
}

func newRuncRuntime(runc, state, prefix string, images map[string]imageFiles) *runcRuntime {
	fake := apitest.NewFakeRuntimeService()
	fake.FakeStatus = &runtimeapi.RuntimeStatus{Conditions: []*runtimeapi.RuntimeCondition{
		{Type: runtimeapi.RuntimeReady, Status: true}, {Type: runtimeapi.NetworkReady, Status: true}}}
	return &runcRuntime{FakeRuntimeService: fake, runc: runc, state: state, prefix: prefix, images: images, pods: 1,
		addresses: map[string]int{}, containers: map[string]*container{}}
}

func run(args ...string) error {
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %v: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

func (r *runcRuntime) namespace(n int) string {
	return fmt.Sprintf("bk-%s-%d", strings.ReplaceAll(r.prefix, ".", "-"), n)
}

func (r *runcRuntime) RunPodSandbox(ctx context.Context, c *runtimeapi.PodSandboxConfig, handler string) (string, error) {
	id, err := r.FakeRuntimeService.RunPodSandbox(ctx, c, handler)
	if err != nil {
		return "", err
	}
	r.mu.Lock()
	r.pods++
	n := r.pods
	r.addresses[id] = n
	r.mu.Unlock()
	ns, ip := r.namespace(n), fmt.Sprintf("%s.%d", r.prefix, n)
	veth := fmt.Sprintf("bk%s-%d", r.prefix[strings.LastIndex(r.prefix, ".")+1:], n)
	for _, line := range []string{
		"ip netns add " + ns,
		"ip link add " + veth + " type veth peer name eth0 netns " + ns,
		"ip link set " + veth + " master " + bridge + " up",
		"ip -n " + ns + " link set lo up",
		"ip -n " + ns + " addr add " + ip + "/16 dev eth0",
		"ip -n " + ns + " link set eth0 up",
		"ip -n " + ns + " route add default via " + gateway,
	} {
		if err := run(strings.Fields(line)...); err != nil {
			return "", err
		}
	}
	r.Lock()
	sandbox := r.Sandboxes[id]
	sandbox.Network.Ip, sandbox.Network.AdditionalIps = ip, nil
	r.Unlock()
	return id, nil
}

func (r *runcRuntime) StopPodSandbox(ctx context.Context, id string) error {
	r.mu.Lock()
	n, ok := r.addresses[id]
	delete(r.addresses, id)
	r.mu.Unlock()
	if ok {
		_ = run("ip", "netns", "del", r.namespace(n))
	}
	return r.FakeRuntimeService.StopPodSandbox(ctx, id)
}

func (r *runcRuntime) CreateContainer(ctx context.Context, sandbox string, c *runtimeapi.ContainerConfig, s *runtimeapi.PodSandboxConfig) (string, error) {
	id, err := r.FakeRuntimeService.CreateContainer(ctx, sandbox, c, s)
	if err != nil {
		return "", err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.containers[id] = &container{config: c, sandbox: sandbox, logPath: filepath.Join(s.LogDirectory, c.LogPath)}
	return id, nil
}

func (r *runcRuntime) bundle(id string) string { return filepath.Join(r.state, "bundles", id) }

func (r *runcRuntime) command(args ...string) *exec.Cmd {
	return exec.Command(r.runc, append([]string{"--root", filepath.Join(r.state, "runc")}, args...)...)
}

// prepare mounts the container's root file system and writes its runc configuration.
func (r *runcRuntime) prepare(id string, c *container) error {
	image, ok := r.images[c.config.Image.Image]
	if !ok {
		return fmt.Errorf("no image %q in the images file", c.config.Image.Image)
	}
	bundle := r.bundle(id)
	root, upper, work := bundle+"/rootfs", bundle+"/upper", bundle+"/work"
	for _, dir := range []string{root, upper, work} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	layers := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", image.Rootfs, upper, work)
	if err := syscall.Mount("overlay", root, "overlay", 0, layers); err != nil {
		return fmt.Errorf("overlay %s: %w", layers, err)
	}
	for _, dir := range image.Readable {
		if err := os.Chmod(root+dir, 0o755); err != nil {
			return err
		}
	}
	r.mu.Lock()
	namespace := r.namespace(r.addresses[c.sandbox])
	r.mu.Unlock()
	text, err := json.Marshal(runcConfig(id, c.config, image, "/run/netns/"+namespace))
	if err != nil {
		return err
	}
	return os.WriteFile(bundle+"/config.json", text, 0o600)
}

func (r *runcRuntime) StartContainer(ctx context.Context, id string) error {
	r.mu.Lock()
	c := r.containers[id]
	r.mu.Unlock()
	if err := r.prepare(id, c); err != nil {
		return err
	}
	log, err := os.Create(c.logPath)
	if err != nil {
		return err
	}
	cmd := r.command("run", "--bundle", r.bundle(id), id)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		log.Close()
		return err
	}
	r.mu.Lock()
	c.cmd, c.done = cmd, make(chan struct{})
	r.mu.Unlock()
	err = r.FakeRuntimeService.StartContainer(ctx, id)
	go func() {
		_ = cmd.Wait()
		log.Close()
		r.exited(id, cmd.ProcessState.ExitCode())
		close(c.done)
	}()
	return err
}

// exited records the exit code; runc's own is that of the container, 128 + signal after a signal.
func (r *runcRuntime) exited(id string, code int) {
	_ = r.command("delete", "--force", id).Run()
	_ = syscall.Unmount(r.bundle(id)+"/rootfs", syscall.MNT_DETACH)
	_ = os.RemoveAll(r.bundle(id))
	r.Lock()
	defer r.Unlock()
	state := r.Containers[id]
	if state == nil {
		return
	}
	state.State, state.FinishedAt = runtimeapi.ContainerState_CONTAINER_EXITED, time.Now().UnixNano()
	state.ExitCode, state.Reason = int32(code), "Completed"
	if code != 0 {
		state.Reason = "Error"
	}
}

func (r *runcRuntime) StopContainer(_ context.Context, id string, timeout int64) error {
	r.mu.Lock()
	c := r.containers[id]
	r.mu.Unlock()
	if c == nil || c.done == nil {
		return nil
	}
	_ = r.command("kill", id, "TERM").Run()
	select {
	case <-c.done:
	case <-time.After(time.Duration(timeout) * time.Second):
		_ = r.command("kill", id, "KILL").Run()
		<-c.done
	}
	return nil
}

func (r *runcRuntime) ExecSync(_ context.Context, id string, argv []string, timeout time.Duration) ([]byte, []byte, error) {
	out, err := r.command(append([]string{"exec", id}, argv...)...).Output()
	return out, nil, err
}
