"""A Kubernetes cluster for tests: etcd, control plane and two nodes, in the namespaces that kube/run.sh has made.

Life cycle: `start` boots everything and returns when both nodes are Ready; `stop` ends all processes. runc runs the
containers; the engine's image is the files of this machine (`image_files`), the router's is the one of deploy/docker.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
STATE = Path("/run/baton")
GATEWAY = "10.88.0.1"
API_ADDRESS = "10.96.0.1"
"""First address of the Service range, which pods get as KUBERNETES_SERVICE_HOST; the API server listens on it."""
TOKEN = "admin-token-of-a-test-cluster"
NODES = ("node-a", "node-b")
START_SECS = 180
AUDIT_POLICY = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: Metadata, userGroups: ["system:serviceaccounts:baton"]}
- {level: None}
"""


def wait_until(
    condition: Callable[[], object], what: str, timeout_secs: float = START_SECS
) -> None:
    deadline = time.monotonic() + timeout_secs
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_secs} s: {what}"
        time.sleep(0.2)


def image_files() -> dict[str, Any]:
    """An image of this machine's root file system with this checkout's `baton` in PATH."""
    programs = Path(sys.executable).parent
    needed = {Path(p).resolve() for p in (sys.prefix, sys.base_prefix, ROOT)}
    closed = {
        str(parent)
        for path in needed
        for parent in (path, *path.parents)
        if not stat.S_IMODE(parent.stat().st_mode) & stat.S_IXOTH
    }
    env = [
        f"PATH={programs}:/usr/local/bin:/usr/bin:/bin",
        f"PYTHONPATH={ROOT / 'engine'}",
        "PYTHONDONTWRITEBYTECODE=1",
    ]
    hidden = [
        str(path) for path in needed if path.is_relative_to("/tmp")
    ]  # the pods' own /tmp covers them
    return {"rootfs": "/", "env": env, "mounts": hidden, "readable": sorted(closed)}


def router_image_files() -> dict[str, Any] | None:
    """The image that deploy/docker/Dockerfile makes, unpacked by kube/run.sh; None where it could not be built."""
    rootfs = os.environ.get("BATON_KUBE_ROUTER_ROOTFS")
    if not rootfs:
        return None
    return {
        "rootfs": rootfs,
        "env": ["PATH=/usr/local/bin:/usr/bin:/bin"],
        "mounts": [],
        "readable": [],
    }


class TestCluster:
    __test__ = False

    def __init__(self, programs: Path) -> None:
        self._kube = programs / "kube"
        self._debian = programs / "debian"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, tuple[str, ...]] = {}
        self.certificates = STATE / "certificates"
        self.audit_log = STATE / "audit.log"
        self.kubeconfig = STATE / "kubeconfig"

    # ---- life cycle ----

    def start(self) -> None:
        self._prepare_network()
        self._write_files()
        self._start_control_plane()
        wait_until(
            lambda: self._kubectl_status("get", "--raw", "/readyz") == 0, "the API server is ready"
        )
        flags = [f"--kubeconfig={self.kubeconfig}", "--leader-elect=false"]
        self._spawn(
            "kube-controller-manager", str(self._kube), "kube-controller-manager", *flags,
            f"--service-account-private-key-file={self.certificates}/sa.key",
            f"--root-ca-file={self.certificates}/apiserver.crt", "--horizontal-pod-autoscaler-sync-period=2s",
            # Kubelets that could not reach a stopped API server, or got no CPU, do not take their pods out of Services.
            "--node-monitor-grace-period=600s",
        )  # fmt: skip
        self._spawn("kube-scheduler", str(self._kube), "kube-scheduler", *flags)
        for i, name in enumerate(NODES):
            self._start_node(name, i)
        wait_until(lambda: self._kubectl_status("get", "node", *NODES) == 0, "nodes register")
        self.kubectl("wait", "--for=condition=Ready", "node", "--all", f"--timeout={START_SECS}s")

    def stop(self) -> None:
        for process in reversed(self._processes.values()):
            process.send_signal(signal.SIGKILL)
            process.wait()

    @contextlib.contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """Freeze a process: connections to it stay open, and nothing answers."""
        self._processes[name].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._processes[name].send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def killed(self, name: str) -> Iterator[None]:
        """Kill a process: connections to it are refused. Afterwards it starts again, and the API server answers."""
        self._processes[name].kill()
        self._processes[name].wait()
        try:
            yield
        finally:
            self._spawn(name, *self._commands[name])
            wait_until(
                lambda: self._kubectl_status("get", "--raw", "/readyz") == 0,
                "the API server is ready again",
            )

    def _prepare_network(self) -> None:
        for command in (
            "ip link add bk0 type bridge",
            f"ip addr add {GATEWAY}/16 dev bk0",
            f"ip addr add {API_ADDRESS}/32 dev bk0",
            "ip link set bk0 up",
        ):
            subprocess.run(command.split(), check=True)

    def _write_files(self) -> None:
        self.certificates.mkdir(parents=True)
        key = str(self.certificates / "sa.key")
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        public = str(self.certificates / "sa.pub")
        subprocess.run(
            ["openssl", "rsa", "-in", key, "-pubout", "-out", public],
            check=True,
            capture_output=True,
        )
        (STATE / "tokens.csv").write_text(f'{TOKEN},admin,admin,"system:masters"\n')
        (STATE / "audit.yaml").write_text(AUDIT_POLICY)
        router = router_image_files() or image_files()
        images = {
            f"baton-router:{self.version}": router,
            f"baton-engine:{self.version}": image_files(),
        }
        (STATE / "images.json").write_text(json.dumps(images))
        server = {"server": f"https://{API_ADDRESS}", "insecure-skip-tls-verify": True}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "clusters": [{"name": "test", "cluster": server}],
            "users": [{"name": "admin", "user": {"token": TOKEN}}],
        }  # fmt: skip
        self.kubeconfig.write_text(json.dumps(config))

    @property
    def version(self) -> str:
        for line in (ROOT / "Cargo.toml").read_text().splitlines():
            if line.startswith("version = "):
                return line.split('"')[1]
        raise AssertionError("Cargo.toml has no version")

    def _start_control_plane(self) -> None:
        client, peer = "http://127.0.0.1:23790", "http://127.0.0.1:23800"
        self._spawn(
            "etcd", str(self._debian / "usr/bin/etcd"), f"--data-dir={STATE}/etcd", "--unsafe-no-fsync",
            f"--listen-client-urls={client}", f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}",
        )  # fmt: skip
        self._spawn(
            "kube-apiserver", str(self._kube), "kube-apiserver", f"--etcd-servers={client}", "--secure-port=443",
            "--bind-address=0.0.0.0", f"--advertise-address={GATEWAY}", f"--cert-dir={self.certificates}",
            f"--service-account-key-file={self.certificates}/sa.pub",
            f"--service-account-signing-key-file={self.certificates}/sa.key",
            "--service-account-issuer=https://kubernetes.default.svc", "--service-cluster-ip-range=10.96.0.0/16",
            f"--token-auth-file={STATE}/tokens.csv", "--authorization-mode=RBAC",
            f"--audit-policy-file={STATE}/audit.yaml", f"--audit-log-path={self.audit_log}",
            "--kubelet-preferred-address-types=InternalIP",
        )  # fmt: skip

    def _start_node(self, name: str, index: int) -> None:
        state = STATE / name
        state.mkdir()
        self._spawn(
            name, str(self._kube), "node", f"--name={name}", f"--kubeconfig={self.kubeconfig}",
            f"--pod-prefix=10.88.{index + 1}", f"--port={10250 + index}", f"--state={state}",
            f"--labels=topology.kubernetes.io/zone=zone-{name[-1]}", "--gpus=8",
            f"--runc={self._debian}/usr/sbin/runc", f"--images={STATE}/images.json",
            f"--certificate={self.certificates}/apiserver.crt",
        )  # fmt: skip

    def _spawn(self, name: str, *command: str) -> None:
        with self.log(name).open("ab") as log:
            self._commands[name] = command
            # kube's memory is bounded by collecting more often: the machine is shared with engines.
            env = {**os.environ, "GOGC": "50"}
            self._processes[name] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=env
            )

    # ---- what tests use ----

    def log(self, name: str) -> Path:
        return STATE / f"{name}.log"

    def _kubectl_status(self, *args: str) -> int:
        return self._kubectl(*args).returncode

    def _kubectl(self, *args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        command = ["kubectl", f"--kubeconfig={self.kubeconfig}", *args]
        return subprocess.run(command, input=stdin, capture_output=True, text=True)

    def kubectl(self, *args: str, stdin: str | None = None, fails: bool = False) -> str:
        """Run kubectl; return its output, or with `fails` its error."""
        done = self._kubectl(*args, stdin=stdin)
        assert (done.returncode != 0) is fails, (
            f"kubectl {' '.join(args)}: {done.stdout}{done.stderr}{self.report()}"
        )
        return done.stderr if fails else done.stdout

    def run_readme(self, heading: str) -> None:
        """Run the `sh` blocks below a heading of deploy/README.md in the checkout's root."""
        section = (
            (ROOT / "deploy" / "README.md")
            .read_text()
            .split(f"\n## {heading}\n", 1)[1]
            .split("\n## ", 1)[0]
        )
        script = "".join(re.findall(r"^```sh\n(.*?)^```$", section, re.DOTALL | re.MULTILINE))
        assert script, f"deploy/README.md has no commands under {heading}"
        env = {**os.environ, "KUBECONFIG": str(self.kubeconfig)}
        done = subprocess.run(
            ["bash", "-euc", script], cwd=ROOT, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{script}{done.stdout}{done.stderr}{self.report()}"

    def get(self, *args: str) -> dict[str, Any]:
        return json.loads(self.kubectl("--namespace=baton", "get", *args, "-o", "json"))

    def pods(self, role: str) -> list[dict[str, Any]]:
        return self.get("pods", f"--selector=app.kubernetes.io/component={role}")["items"]

    def endpoints(self, service: str) -> list[str]:
        """Ready addresses of a Service, which is what kube-proxy would forward to."""
        slices = self.get("endpointslices", f"--selector=kubernetes.io/service-name={service}")[
            "items"
        ]
        return [
            f"http://{address}:{port['port']}"
            for item in slices
            for endpoint in item.get("endpoints") or ()
            if endpoint["conditions"].get("ready")
            for address in endpoint["addresses"]
            for port in item["ports"]
        ]

    def run_in_pod(self, pod: dict[str, Any], *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a pod's first container, with its user, capabilities and file system."""
        root = STATE / pod["spec"]["nodeName"] / "runc"
        name = pod["status"]["containerStatuses"][0]["containerID"].partition("://")[2]
        command = [str(self._debian / "usr/sbin/runc"), "--root", str(root), "exec", name, *argv]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    def logs(self, pod: str) -> str:
        """Output of all containers of a pod so far."""
        paths = [
            path for path in Path("/var/log/containers").glob(f"{pod}_baton_*.log") if path.exists()
        ]
        return "".join(path.read_text(errors="replace") for path in paths)

    def audited(self) -> list[dict[str, Any]]:
        """Requests of the namespace's service accounts to the API server."""
        return [json.loads(line) for line in self.audit_log.read_text().splitlines()]

    def report(self) -> str:
        """Pods, events and the ends of containers' logs, for the message of a failed test."""
        parts = ["\n"]
        for args in (
            ("get", "pods", "-A", "-o", "wide"),
            ("get", "events", "-A", "--sort-by=.lastTimestamp"),
        ):
            parts.append("\n".join(self._kubectl(*args).stdout.splitlines()[-30:]))
        logs = [
            path for path in Path("/var/log/containers").glob("*.log") if path.exists()
        ]  # no dangling links
        for path in sorted(logs, key=lambda path: path.stat().st_mtime)[-6:]:
            parts.append(f"--- {path.name}\n{tail(path)}")
        for name in self._processes:
            parts.append(f"--- {name}\n{tail(self.log(name), 5)}")
        return "\n".join(parts)


def tail(path: Path, lines: int = 15) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def with_changes(text: str, change: Callable[[list[dict[str, Any]]], None]) -> str:
    """A manifest after `change` was applied to its objects."""
    objects = [item for item in yaml.safe_load_all(text) if item]
    change(objects)
    return yaml.safe_dump_all(objects)


def names(items: Sequence[dict[str, Any]]) -> set[str]:
    return {item["metadata"]["name"] for item in items}
