package main

import runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

type object = map[string]any

// defaultCapabilities are those of a container that drops none (the set of containerd).
var defaultCapabilities = []string{"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_MKNOD", "CAP_NET_RAW",
	"CAP_SETGID", "CAP_SETUID", "CAP_SETFCAP", "CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_KILL", "CAP_AUDIT_WRITE"}

// runcConfig translates a container of the kubelet into runc's configuration. Not translated: seccomp and AppArmor
// profiles, and resource limits (all containers of a test share the machine).
func runcConfig(id string, c *runtimeapi.ContainerConfig, image imageFiles, netns string) object {
	security := c.GetLinux().GetSecurityContext()
	user := object{"uid": security.GetRunAsUser().GetValue(), "gid": security.GetRunAsGroup().GetValue(), "additionalGids": security.GetSupplementalGroups()}
	env := append([]string{}, image.Env...)
	for _, e := range c.Envs {
		env = append(env, e.Key+"="+string(e.Value))
	}
	cwd := c.WorkingDir
	if cwd == "" {
		cwd = "/"
	}
	return object{
		"ociVersion": "1.0.2",
		"process": object{
			"user": user, "args": append(append([]string{}, c.Command...), c.Args...), "env": env, "cwd": cwd,
			"capabilities": capabilities(security), "noNewPrivileges": security.GetNoNewPrivs(),
		},
		"root":   object{"path": "rootfs", "readonly": security.GetReadonlyRootfs()},
		"mounts": mounts(c, image),
		"linux": object{
			"cgroupsPath": "/baton-kube/" + id,
			"namespaces": []object{
				{"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}, {"type": "network", "path": netns},
			},
		},
	}
}

func capabilities(security *runtimeapi.LinuxContainerSecurityContext) object {
	kept := map[string]bool{}
	for _, name := range defaultCapabilities {
		kept[name] = true
	}
	for _, name := range security.GetCapabilities().GetDropCapabilities() {
		if name == "ALL" {
			kept = map[string]bool{}
		}
		delete(kept, "CAP_"+name)
	}
	for _, name := range security.GetCapabilities().GetAddCapabilities() {
		kept["CAP_"+name] = true
	}
	names := []string{}
	for name := range kept {
		names = append(names, name)
	}
	if security.GetRunAsUser().GetValue() != 0 {
		return object{"bounding": names}
	}
	return object{"bounding": names, "effective": names, "permitted": names}
}

func mounts(c *runtimeapi.ContainerConfig, image imageFiles) []object {
	list := []object{
		{"destination": "/proc", "type": "proc", "source": "proc"},
		{"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": []string{"nosuid", "mode=755", "size=65536k"}},
		{"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"}},
		{"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": []string{"nosuid", "noexec", "nodev", "mode=1777", "size=65536k"}},
		{"destination": "/sys", "type": "none", "source": "/sys", "options": []string{"rbind", "nosuid", "noexec", "nodev", "ro"}},
	}
	for _, m := range c.Mounts {
		list = append(list, bind(m.HostPath, m.ContainerPath, m.Readonly))
	}
	for _, path := range image.Mounts {
		list = append(list, bind(path, path, true))
	}
	return list
}

func bind(source, destination string, readonly bool) object {
	options := []string{"rbind", "rw"}
	if readonly {
		options = []string{"rbind", "ro"}
	}
	return object{"destination": destination, "type": "none", "source": source, "options": options}
}
