package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strings"

	cadvisorapi "github.com/google/cadvisor/lib/model"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	clientset "k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	apitest "k8s.io/cri-api/pkg/apis/testing"
	"k8s.io/klog/v2"
	_ "k8s.io/kubernetes/pkg/features"
	cadvisortest "k8s.io/kubernetes/pkg/kubelet/cadvisor/testing"
	"k8s.io/kubernetes/pkg/kubelet/cm"
	kubecontainer "k8s.io/kubernetes/pkg/kubelet/container"
	"k8s.io/kubernetes/pkg/kubelet/server"
	"k8s.io/kubernetes/pkg/kubemark"
)

// machine reports a capacity that no test exhausts; the real machine is shared by all nodes.
type machine struct{ cadvisortest.Fake }

func (m *machine) MachineInfo(klog.Logger) (*cadvisorapi.MachineInfo, error) {
	return &cadvisorapi.MachineInfo{NumCores: 64, InstanceID: cadvisorapi.InstanceID(m.NodeName), MemoryCapacity: 1 << 38}, nil
}

// imageStore holds the images named in the images file; any other image fails to pull, as on a real node.
type imageStore struct {
	*apitest.FakeImageService
	images map[string]imageFiles
}

func (s imageStore) ImageStatus(_ context.Context, spec *runtimeapi.ImageSpec, _ bool) (*runtimeapi.ImageStatusResponse, error) {
	if _, ok := s.images[spec.Image]; !ok {
		return &runtimeapi.ImageStatusResponse{}, nil
	}
	image := &runtimeapi.Image{Id: spec.Image, RepoTags: []string{spec.Image}, Size: 1}
	return &runtimeapi.ImageStatusResponse{Image: image}, nil
}

func (s imageStore) PullImage(_ context.Context, spec *runtimeapi.ImageSpec, _ *runtimeapi.AuthConfig, _ *runtimeapi.PodSandboxConfig) (string, error) {
	return "", fmt.Errorf("no image %q in the images file", spec.Image)
}

func check(err error) {
	if err != nil {
		klog.Fatal(err)
	}
}

func readImages(path string) map[string]imageFiles {
	images := map[string]imageFiles{}
	text, err := os.ReadFile(path)
	check(err)
	check(json.Unmarshal(text, &images))
	return images
}

// runNode runs the kubelet's own code (sync loop, prober, hooks, grace periods, restarts, status) over runcRuntime.
func runNode() {
	name := flag.String("name", "node-a", "node name")
	kubeconfig := flag.String("kubeconfig", "", "kubeconfig of the node")
	prefix := flag.String("pod-prefix", "10.88.1", "first three bytes of pod addresses")
	labels := flag.String("labels", "", "node labels: k=v,k=v")
	gpus := flag.String("gpus", "0", "nvidia.com/gpu devices that this node claims")
	port := flag.Int("port", 10250, "port of the kubelet's server")
	state := flag.String("state", "", "directory for containers, on tmpfs")
	runc := flag.String("runc", "runc", "path of the runc program")
	certificate := flag.String("certificate", "", "certificate of the kubelet's server; the key is beside it, as .key")
	imagesPath := flag.String("images", "", "JSON file: image name -> {rootfs, env, mounts}")
	flag.Parse()

	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	check(err)
	client := clientset.NewForConfigOrDie(config)
	nodeLabels := map[string]string{}
	for _, pair := range strings.Split(*labels, ",") {
		if key, value, ok := strings.Cut(pair, "="); ok {
			nodeLabels[key] = value
		}
	}
	flags, kc := kubemark.GetHollowKubeletConfig(&kubemark.HollowKubeletOptions{
		NodeName: *name, KubeletPort: *port, MaxPods: 110, NodeLabels: nodeLabels,
	})
	// The API server forwards kubectl exec to this address.
	flags.NodeIP, kc.Address = gateway, gateway
	kc.SyncFrequency.Duration = 1e9
	kc.ImageServiceEndpoint = ""
	kc.ContainerRuntimeEndpoint = "unix:///nonexistent"

	images := readImages(*imagesPath)
	runtime := newRuncRuntime(*runc, *state, *prefix, images)
	runtime.streams, err = serveExec(runtime)
	check(err)
	devices := cm.NewStubContainerManagerWithDevicePluginResource(v1.ResourceList{"nvidia.com/gpu": resource.MustParse(*gpus)})
	kubelet := kubemark.NewHollowKubelet(flags, kc, client, client, &machine{cadvisortest.Fake{NodeName: *name}},
		imageStore{apitest.NewFakeImageService(), images}, runtime, devices)
	// kubemark's own defaults are fakes; these are the real parts.
	kubelet.KubeletDeps.ProbeManager = nil
	kubelet.KubeletDeps.OSInterface = kubecontainer.RealOS{}
	kubelet.KubeletDeps.Recorder = nil
	key := strings.TrimSuffix(*certificate, ".crt") + ".key"
	kubelet.KubeletDeps.TLSOptions = &server.TLSOptions{MinVersion: tls.VersionTLS12, CertFile: *certificate, KeyFile: key}
	kubelet.KubeletDeps.EventClient = client.CoreV1()
	kubelet.Run(context.Background())
}
