// Command kube is the Kubernetes that the deployment tests run against: the control plane and the kubelet of one
// release, compiled into one program, with containers that are started by runc. It is used by tests only.
//
//	kube kube-apiserver|kube-controller-manager|kube-scheduler FLAGS
//	kube node FLAGS
package main

import (
	"fmt"
	"os"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: kube kube-apiserver|kube-controller-manager|kube-scheduler|node FLAGS")
		os.Exit(2)
	}
	name := os.Args[1]
	os.Args = append([]string{name}, os.Args[2:]...)
	if name == "node" {
		runNode()
		return
	}
	os.Exit(runControlPlane(name))
}
