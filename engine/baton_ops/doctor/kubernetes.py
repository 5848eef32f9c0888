"""Checks of the objects of one Kubernetes namespace, read with kubectl as its user may.

What kubectl may not read is skipped with the server's words, not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from baton.config import EngineConfig
from baton_ops.clients.kubectl import Kubectl, KubectlError
from baton_ops.doctor.check import Check, CheckResult, add_check, fail, ok, run_checks, skip, warn

Object = dict[str, Any]

KUBECTL_SECS = 30.0
SPARE_GRACE_SECS = 10
"""Between the end of the drain and the kill: last events leave, processes end."""
KINDS = ("deployments", "statefulsets", "pods", "services", "configmaps", "nodes")
KEY_NAMES = '{{range $key, $value := .data}}{{$key}}{{"\\n"}}{{end}}'
ROUTER_VERBS = ("list", "watch")
DRAIN_FLAGS = {
    "router": ("--shutdown-grace-period-secs", 180.0),
    "engine": ("--drain-timeout-secs", EngineConfig().drain_timeout_secs),
}
"""By program, the flag that limits its drain, and the default."""
SELECTOR_FLAGS = ("--selector", "--prefill-selector", "--decode-selector")
GPU_RESOURCE = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True)
class KubeView:
    namespace: str
    objects: dict[str, list[Object]] = field(default_factory=dict)
    """By kind, as KINDS names them."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """By kind, why it could not be read."""
    secrets: dict[str, list[str] | None] = field(default_factory=dict)
    """Keys of each Secret that a pod template names; None: it is not there."""
    access: dict[tuple[str, str], str] = field(default_factory=dict)
    """By account and verb, for each account of a router: yes, no, or why it is unknown."""

    def of_kind(self, kind: str) -> list[Object]:
        return self.objects.get(kind, [])

    @property
    def workloads(self) -> list[Object]:
        """Deployments and StatefulSets that run Baton."""
        every = self.of_kind("deployments") + self.of_kind("statefulsets")
        return [workload for workload in every if program(workload) is not None]


# ---- reading -------------------------------------------------------------------------------------


def read_namespace(namespace: str, command: str = "kubectl") -> KubeView:
    kubectl = Kubectl(f"{command} --request-timeout=20s", namespace, KUBECTL_SECS)
    view = KubeView(namespace)
    for kind in KINDS:
        try:
            view.objects[kind] = kubectl.items(kind)
        except KubectlError as err:
            view.unreadable[kind] = str(err)
    for name in sorted(
        {name for workload in view.workloads for name, _ in referenced_secrets(workload)}
    ):
        try:
            # The Secret's values are not printed by kubectl and never reach this process.
            view.secrets[name] = kubectl.run(
                "get", "secret", name, "-o", f"go-template={KEY_NAMES}"
            ).split()
        except KubectlError as err:
            if "NotFound" in str(err) or "not found" in str(err):
                view.secrets[name] = None
            else:
                view.unreadable[f"secret {name}"] = str(err)
    for account in sorted(
        {account_of(workload) for workload in view.workloads if program(workload) == "router"}
    ):
        for verb in ROUTER_VERBS:
            view.access[account, verb] = _check_permission(kubectl, namespace, account, verb)
    return view


def _check_permission(kubectl: Kubectl, namespace: str, account: str, verb: str) -> str:
    try:
        who = f"--as=system:serviceaccount:{namespace}:{account}"
        answer = kubectl.run("auth", "can-i", verb, "pods", who, exits=(0, 1))
    except KubectlError as err:
        return str(err)
    return answer.strip().splitlines()[-1].partition(" ")[0]


# ---- accessors -----------------------------------------------------------------------------------


def pod_spec(workload: Object) -> Object:
    return dict(workload["spec"]["template"]["spec"])


def containers(workload: Object) -> list[Object]:
    return list(pod_spec(workload).get("containers", []))


def main_container(workload: Object) -> Object:
    """The container that runs `baton router`, `baton engine` or one of their binaries.

    Empty when none does.
    """
    return next(filter(_program_of, containers(workload)), {})


def _program_of(container: Object) -> str | None:
    words = [word.rsplit("/", 1)[-1] for word in _command_line(container)]
    if words[:1] == ["baton-router"] or words[:2] == ["baton", "router"]:
        return "router"
    return "engine" if words[:2] == ["baton", "engine"] else None


def _command_line(container: Object) -> list[str]:
    return [*container.get("command", []), *container.get("args", [])]


def program(workload: Object) -> str | None:
    return _program_of(main_container(workload))


def label(workload: Object) -> str:
    return f"{workload.get('kind', 'Deployment').lower()}/{workload['metadata']['name']}"


def account_of(workload: Object) -> str:
    return str(pod_spec(workload).get("serviceAccountName", "default"))


def arguments(workload: Object, view: KubeView) -> list[str]:
    """Command line of the main container.

    $(NAME) is replaced from ConfigMaps and plain environment.
    """
    container = main_container(workload)
    values: dict[str, str] = {}
    maps = {m["metadata"]["name"]: m.get("data", {}) for m in view.of_kind("configmaps")}
    for source in container.get("envFrom", []):
        values |= maps.get(source.get("configMapRef", {}).get("name"), {})
    values |= {
        entry["name"]: str(entry["value"]) for entry in container.get("env", []) if "value" in entry
    }
    return [
        re.sub(r"\$\((\w+)\)", lambda m: values.get(m[1], m[0]), word)
        for word in _command_line(container)
    ]


def flag_value(words: list[str], flag: str) -> str | None:
    """The last value given, as `--flag=value` or `--flag value`."""
    last_value = None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == flag:
            last_value = value if equals else following
    return last_value


def referenced_secrets(workload: Object) -> Iterator[tuple[str, str | None]]:
    """Name and key of each Secret that must exist; key None: any."""
    references = [volume.get("secret") for volume in pod_spec(workload).get("volumes", [])]
    for container in containers(workload):
        references += [
            entry.get("valueFrom", {}).get("secretKeyRef") for entry in container.get("env", [])
        ]
        references += [source.get("secretRef") for source in container.get("envFrom", [])]
    for reference in references:
        if reference and not reference.get("optional"):
            yield reference.get("secretName") or reference["name"], reference.get("key")


def labels_of(thing: Object) -> dict[str, str]:
    """Labels of a pod, or of a pod template."""
    return dict(thing["metadata"].get("labels") or {})


def pods_matching(view: KubeView, *selectors: Mapping[str, str]) -> list[Object]:
    """Pods that one of the selectors selects."""
    return [
        pod
        for pod in view.of_kind("pods")
        if any(s.items() <= labels_of(pod).items() for s in selectors)
    ]


def is_pod_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


# ---- checks --------------------------------------------------------------------------------------


KUBE_CHECKS: list[Check[KubeView]] = []


@add_check(KUBE_CHECKS, "kube.workloads")
def check_workloads(view: KubeView) -> Iterator[CheckResult]:
    if not view.workloads:
        sentence = (
            f"namespace {view.namespace} has no Deployment or StatefulSet that runs baton "
            "router or baton engine"
        )
        yield fail(
            sentence,
            "kubectl apply --server-side -k deploy/kubernetes/overlays/…; check --namespace",
        )
    for workload in view.workloads:
        replicas = int(workload["spec"].get("replicas", 1))
        ready = int(workload.get("status", {}).get("readyReplicas", 0))
        if ready < replicas:
            level = warn if ready else fail
            sentence = f"{label(workload)}: {ready} of {replicas} replicas are ready"
            yield level(
                sentence, f"kubectl -n {view.namespace} describe {label(workload)}; see kube.pods"
            )
    yield ok(f"all replicas of {', '.join(map(label, view.workloads))} are ready")


@add_check(KUBE_CHECKS, "kube.pods")
def check_pods(view: KubeView) -> Iterator[CheckResult]:
    if "pods" in view.unreadable:
        yield skip(f"pods cannot be read: {view.unreadable['pods']}")
        return
    mine = pods_matching(
        view, *(w["spec"]["selector"].get("matchLabels") or {} for w in view.workloads)
    )
    for pod in mine:
        if reason := _describe_trouble(pod):
            name = pod["metadata"]["name"]
            remedy = f"kubectl -n {view.namespace} describe pod {name}; kubectl logs --previous"
            yield fail(f"pod/{name}: {reason}", remedy)
    yield ok(f"pods without trouble: {len(mine)}")


WAITING_IS_NORMAL = ("ContainerCreating", "PodInitializing")


def _describe_trouble(pod: Object) -> str:
    """Why a pod does not run, as the scheduler and the kubelet say.

    Empty: nothing is wrong, or it starts.
    """
    status = pod.get("status", {})
    for container in [
        *status.get("initContainerStatuses", []),
        *status.get("containerStatuses", []),
    ]:
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason") and waiting["reason"] not in WAITING_IS_NORMAL:
            message = f": {waiting['message']}" if waiting.get("message") else ""
            return f"container {container['name']} waits, {waiting['reason']}{message}"
        ended = container.get("lastState", {}).get("terminated", {})
        if ended.get("reason") == "OOMKilled":
            restarts = container.get("restartCount", 0)
            return f"container {container['name']} exceeded its memory limit ({restarts} restarts)"
    if status.get("phase") == "Pending":
        for condition in status.get("conditions", []):
            if condition["type"] == "PodScheduled" and condition["status"] != "True":
                return (
                    "it is not scheduled: "
                    f"{condition.get('message', condition.get('reason', 'no reason given'))}"
                )
    if status.get("phase") == "Failed":
        return f"it failed: {status.get('message') or status.get('reason', 'no reason given')}"
    return ""


@add_check(KUBE_CHECKS, "kube.selectors")
def check_selectors(view: KubeView) -> Iterator[CheckResult]:
    counts = []
    for short_name, name, selector in _find_selectors(view):
        pods = pods_matching(view, selector)
        ready = sum(map(is_pod_ready, pods))
        counts.append(f"{short_name} {ready} of {len(pods)}")
        text = ",".join(f"{key}={value}" for key, value in selector.items())
        if not pods:
            remedy = "compare it with the labels of the pods: kubectl get pods --show-labels"
            yield fail(f"{name} selects no pod ({text})", remedy)
        elif not ready:
            yield fail(
                f"{name} selects {len(pods)} pods, of which none is ready ({text})", "see kube.pods"
            )
    if counts:
        yield ok(f"ready pods of those selected: {', '.join(counts)}")
    yield skip("neither a Service nor a router selects pods of Baton")


def _find_selectors(view: KubeView) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Short name, name and selector of what should select pods of Baton: Services, and flags of
    routers.

    A Service is meant for a workload if its selector has a key of the workload's labels, with
    whatever value.
    """
    keys = {key for workload in view.workloads for key in labels_of(workload["spec"]["template"])}
    for service in view.of_kind("services"):
        selector = service["spec"].get("selector") or {}
        if keys & selector.keys():
            name = f"service/{service['metadata']['name']}"
            yield name, name, selector
    for workload in view.workloads:
        words = arguments(workload, view)
        for flag in SELECTOR_FLAGS:
            if (text := flag_value(words, flag)) is not None:
                selector = dict(part.partition("=")[::2] for part in text.split(","))
                yield flag, f"{flag} of {label(workload)}", selector


@add_check(KUBE_CHECKS, "kube.probes")
def check_probes(view: KubeView) -> Iterator[CheckResult]:
    for workload in view.workloads:
        who = label(workload)
        is_engine = program(workload) == "engine"
        container = main_container(workload)
        probes = [
            container.get(f"{kind}Probe", {}) for kind in ("readiness", "liveness", "startup")
        ]
        readiness, liveness, startup = (probe.get("httpGet", {}).get("path") for probe in probes)
        if "readinessProbe" not in container:
            sentence = f"{who} has no readiness probe: pods get requests while they load"
            yield fail(sentence, "readinessProbe: httpGet /readyz")
        elif readiness in ("/livez", "/liveness", "/ping"):
            sentence = (
                f"{who}: its readiness probe asks {readiness}, which answers 200 while it "
                "loads and drains"
            )
            yield fail(sentence, "readinessProbe: httpGet /readyz")
        if is_engine and liveness in ("/readyz", "/health", "/readiness", "/health_generate"):
            sentence = (
                f"{who}: its liveness probe asks {liveness}, so Kubernetes kills it while "
                "it loads or drains"
            )
            yield fail(sentence, "livenessProbe: httpGet /livez")
        if "/health_generate" in (readiness, liveness, startup):
            sentence = (
                f"{who}: a probe asks /health_generate, which computes a token and waits "
                "behind requests"
            )
            yield warn(sentence, "use /readyz and /livez")
        health_port = flag_value(arguments(workload, view), "--health-port")
        if any(_port_of(probe, container) not in (None, health_port) for probe in probes):
            sentence = f"{who}: a probe asks a port of clients, who can take all its connections"
            yield warn(sentence, "probe the port of --health-port")
        if is_engine and container.get("livenessProbe") and not container.get("startupProbe"):
            sentence = (
                f"{who} has a liveness probe and no startup probe: a slow load may be taken "
                "for a hang"
            )
            yield warn(
                sentence, "startupProbe: httpGet /readyz, failureThreshold for the longest load"
            )
    yield ok(f"probes of {len(view.workloads)} workloads ask the right paths")


def _port_of(probe: Object, container: Object) -> str | None:
    """Number of the port that a probe asks over HTTP; None: it asks otherwise."""
    port = probe.get("httpGet", {}).get("port")
    numbers = {named.get("name"): named["containerPort"] for named in container.get("ports", [])}
    return None if port is None else str(numbers.get(port, port))


@add_check(KUBE_CHECKS, "kube.grace")
def check_grace(view: KubeView) -> Iterator[CheckResult]:
    """preStop + drain + 10 s must fit into terminationGracePeriodSeconds, or Kubernetes kills
    running requests.
    """
    notes = []
    for workload in view.workloads:
        flag, default = DRAIN_FLAGS[str(program(workload))]
        text = flag_value(arguments(workload, view), flag)
        try:
            drain = default if text is None else float(text)
        except ValueError:
            yield warn(
                f"{label(workload)}: {flag} is {text!r}, which no ConfigMap resolves",
                "write the number",
            )
            continue
        pause = _prestop_seconds(main_container(workload))
        grace = int(pod_spec(workload).get("terminationGracePeriodSeconds", 30))
        needed = pause + drain + SPARE_GRACE_SECS
        notes.append(f"{label(workload)} {grace} >= {pause:g} + {drain:g} + {SPARE_GRACE_SECS}")
        if grace < needed:
            reason = (
                f"they need {needed:g} s: preStop {pause:g} + {flag} {drain:g} + {SPARE_GRACE_SECS}"
            )
            sentence = f"{label(workload)}: Kubernetes kills its pods after {grace} s, but {reason}"
            yield fail(sentence, f"terminationGracePeriodSeconds: {needed:g}, or a smaller {flag}")
        if pause == 0:
            sentence = (
                f"{label(workload)} has no preStop pause: requests still arrive when it "
                "refuses them already"
            )
            yield warn(sentence, "lifecycle: preStop: sleep: seconds: 5")
    yield ok("; ".join(notes))


def _prestop_seconds(container: Object) -> float:
    hook = container.get("lifecycle", {}).get("preStop", {})
    if "sleep" in hook:
        return float(hook["sleep"].get("seconds", 0))
    words = " ".join(hook.get("exec", {}).get("command", []))
    sleep = re.search(r"sleep (\d+(?:\.\d+)?)", words)
    return float(sleep[1]) if sleep else 0.0


@add_check(KUBE_CHECKS, "kube.access")
def check_access(view: KubeView) -> Iterator[CheckResult]:
    uses = [
        w
        for w in view.workloads
        if program(w) == "router" and "--service-discovery" in arguments(w, view)
    ]
    accounts = {account_of(workload) for workload in uses}
    if not accounts:
        yield skip("no router finds its workers through Kubernetes")
        return
    for (account, verb), answer in view.access.items():
        if account in accounts and answer not in ("yes", "no"):
            yield skip(f"whether {account} may {verb} pods is unknown: {answer}")
            return
    for (account, verb), answer in view.access.items():
        if account in accounts and answer == "no":
            sentence = (
                f"the router's service account {account} may not {verb} pods: it finds no worker"
            )
            remedy = (
                "bind it to a Role that may list and watch pods, as "
                "deploy/kubernetes/base/rbac.yaml does"
            )
            yield fail(sentence, remedy)
    yield ok(f"{', '.join(sorted(accounts))} may list and watch pods")


@add_check(KUBE_CHECKS, "kube.secrets")
def check_secrets(view: KubeView) -> Iterator[CheckResult]:
    secret_names = {
        reference for workload in view.workloads for reference in referenced_secrets(workload)
    }
    create = f"kubectl -n {view.namespace} create secret generic"
    remedies: dict[str, str] = {}
    for secret, key in sorted(secret_names, key=str):
        keys = view.secrets.get(secret, [])
        if keys is None:
            sentence = f"Secret {secret} does not exist"
        elif secret in view.secrets and key is not None and key not in keys:
            sentence = f"Secret {secret} has no key {key}, only {', '.join(keys) or 'none'}"
        else:
            continue
        remedies[sentence] = f"{create} {secret} --from-literal={key or 'KEY'}=…"
    for sentence, remedy in remedies.items():
        yield fail(sentence, remedy)
    for kind, reason in view.unreadable.items():
        if kind.startswith("secret "):
            yield skip(f"Secrets cannot be read: {reason}")
            return
    yield ok(f"{len(view.secrets)} Secrets exist with the keys that pods name")


@add_check(KUBE_CHECKS, "kube.gpus")
def check_gpus(view: KubeView) -> Iterator[CheckResult]:
    wanted_gpus = sum(_count_gpus(w) * int(w["spec"].get("replicas", 1)) for w in view.workloads)
    offers = [
        node.get("status", {}).get("allocatable", {}).get(GPU_RESOURCE, 0)
        for node in view.of_kind("nodes")
    ]
    there = sum(map(int, offers))
    if not wanted_gpus:
        yield skip(f"no workload asks for {GPU_RESOURCE}")
    elif "nodes" in view.unreadable:
        yield skip(f"nodes cannot be read: {view.unreadable['nodes']}")
    elif there == 0:
        sentence = f"{wanted_gpus} GPUs are asked for, no node offers {GPU_RESOURCE}"
        yield fail(
            sentence, "install NVIDIA's device plugin or GPU operator; kubectl describe node"
        )
    elif there < wanted_gpus:
        sentence = f"{wanted_gpus} GPUs are asked for, all nodes together offer {there}"
        yield fail(sentence, "fewer replicas, or more nodes")
    else:
        for workload in view.workloads:
            surge = (
                workload["spec"].get("strategy", {}).get("rollingUpdate", {}).get("maxSurge", "25%")
            )
            extra = _count_gpus(workload) if workload.get("kind") != "StatefulSet" else 0
            if extra and str(surge) not in ("0", "0%") and there < wanted_gpus + extra:
                sentence = (
                    f"{label(workload)}: maxSurge {surge}, but no GPU of {there} is left: a "
                    "rollout would hang"
                )
                yield warn(sentence, "strategy: rollingUpdate: {maxSurge: 0, maxUnavailable: 1}")
        yield ok(f"GPUs asked for: {wanted_gpus}, offered by nodes: {there}")


def _count_gpus(workload: Object) -> int:
    return sum(
        int(c.get("resources", {}).get("limits", {}).get(GPU_RESOURCE, 0))
        for c in containers(workload)
    )


def check_namespace(view: KubeView) -> list[CheckResult]:
    if view.unreadable and not view.objects:
        sentence = (
            f"namespace {view.namespace} cannot be read: {next(iter(view.unreadable.values()))}"
        )
        problem = fail(sentence, "check kubectl (--kubectl, KUBECONFIG) and what its user may read")
        return [replace(problem, name="kube.api")]
    return run_checks(KUBE_CHECKS, view) if view.workloads else check_workloads(view)
