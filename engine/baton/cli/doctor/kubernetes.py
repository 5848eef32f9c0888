"""Checks of the objects of one Kubernetes namespace, read with kubectl as its user may.

What kubectl may not read is skipped with the server's words, not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.cli.doctor.check import CheckResult, CheckStatus, fail, problems_or_ok, skip, warn
from baton.cli.kubectl import Kubectl, KubectlError

Object = dict[str, Any]

KUBECTL_SECS = 30.0
SPARE_GRACE_SECS = 10
"""Between the end of the drain and the kill: last events leave, processes end."""
KINDS = ("deployments", "statefulsets", "pods", "services", "configmaps", "nodes")
ROUTER_VERBS = ("list", "watch")
DRAIN_FLAGS = {"router": ("--shutdown-grace-period-secs", 180.0), "engine": ("--drain-timeout-secs", 60.0)}
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
    access: dict[str, str] = field(default_factory=dict)
    """By `ACCOUNT VERB`, for each account of a router: yes, no, or why it is unknown."""
    problem: str = ""

    def of_kind(self, kind: str) -> list[Object]:
        return self.objects.get(kind, [])

    @property
    def workloads(self) -> list[Object]:
        """Deployments and StatefulSets that run Baton."""
        every = self.of_kind("deployments") + self.of_kind("statefulsets")
        return [workload for workload in every if program(workload) is not None]


# ---- reading ---------------------------------------------------------------------------------------------------


def read_namespace(namespace: str, command: str = "kubectl") -> KubeView:
    kubectl = Kubectl(f"{command} --request-timeout=20s", namespace, KUBECTL_SECS)
    objects: dict[str, list[Object]] = {}
    unreadable: dict[str, str] = {}
    for kind in KINDS:
        try:
            objects[kind] = kubectl.items(kind)
        except KubectlError as err:
            unreadable[kind] = str(err)
    if not objects:
        return KubeView(namespace, unreadable=unreadable, problem=next(iter(unreadable.values())))
    view = KubeView(namespace, objects, unreadable)
    for name in sorted({name for workload in view.workloads for name, _ in referenced_secrets(workload)}):
        try:
            view.secrets[name] = _secret_keys(kubectl, name)
        except KubectlError as err:
            if "NotFound" in str(err) or "not found" in str(err):
                view.secrets[name] = None
            else:
                view.unreadable[f"secret {name}"] = str(err)
    for account in sorted({account_of(workload) for workload in view.workloads if program(workload) == "router"}):
        for verb in ROUTER_VERBS:
            view.access[f"{account} {verb}"] = _can(kubectl, namespace, account, verb)
    return view


def _secret_keys(kubectl: Kubectl, name: str) -> list[str]:
    """Names of a Secret's keys; its values are not printed by kubectl and never reach this process."""
    template = '{{range $key, $value := .data}}{{$key}}{{"\\n"}}{{end}}'
    return kubectl.run("get", "secret", name, "-o", f"go-template={template}").split()


def _can(kubectl: Kubectl, namespace: str, account: str, verb: str) -> str:
    try:
        who = f"--as=system:serviceaccount:{namespace}:{account}"
        answer = kubectl.run("auth", "can-i", verb, "pods", who, exits=(0, 1))
    except KubectlError as err:
        return str(err)
    return answer.strip().splitlines()[-1].partition(" ")[0]


# ---- accessors -------------------------------------------------------------------------------------------------


def pod_spec(workload: Object) -> Object:
    return dict(workload["spec"]["template"]["spec"])


def containers(workload: Object) -> list[Object]:
    return list(pod_spec(workload).get("containers", []))


def main_container(workload: Object) -> Object | None:
    """The container that runs `baton router`, `baton engine` or one of their binaries."""
    return next((c for c in containers(workload) if _program_of(c) is not None), None)


def _program_of(container: Object) -> str | None:
    words = [*container.get("command", []), *container.get("args", [])]
    names = [word.rsplit("/", 1)[-1] for word in words]
    if "baton-router" in names[:1] or ("baton" in names[:1] and "router" in names[1:2]):
        return "router"
    if "baton" in names[:1] and "engine" in names[1:2]:
        return "engine"
    return None


def program(workload: Object) -> str | None:
    container = main_container(workload)
    return None if container is None else _program_of(container)


def label(workload: Object) -> str:
    return f"{workload.get('kind', 'Deployment').lower()}/{workload['metadata']['name']}"


def account_of(workload: Object) -> str:
    return str(pod_spec(workload).get("serviceAccountName", "default"))


def arguments(workload: Object, view: KubeView) -> list[str]:
    """Command line of the main container with $(NAME) replaced from ConfigMaps and plain environment."""
    container = main_container(workload) or {}
    values: dict[str, str] = {}
    maps = {m["metadata"]["name"]: m.get("data", {}) for m in view.of_kind("configmaps")}
    for source in container.get("envFrom", []):
        values |= maps.get(source.get("configMapRef", {}).get("name"), {})
    values |= {entry["name"]: str(entry["value"]) for entry in container.get("env", []) if "value" in entry}
    words = [*container.get("command", []), *container.get("args", [])]
    return [re.sub(r"\$\((\w+)\)", lambda m: values.get(m[1], m[0]), word) for word in words]


def flag_value(words: list[str], flag: str) -> str | None:
    """The last value given, as `--flag=value` or `--flag value`."""
    found = None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == flag:
            found = following
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def referenced_secrets(workload: Object) -> Iterator[tuple[str, str | None]]:
    """Name and key of each Secret that must exist; key None: any."""
    for container in containers(workload):
        for entry in container.get("env", []):
            reference = entry.get("valueFrom", {}).get("secretKeyRef")
            if reference and not reference.get("optional"):
                yield reference["name"], reference["key"]
        for source in container.get("envFrom", []):
            if (reference := source.get("secretRef")) and not reference.get("optional"):
                yield reference["name"], None
    for volume in pod_spec(workload).get("volumes", []):
        if (reference := volume.get("secret")) and not reference.get("optional"):
            yield reference["secretName"], None


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector.items())


def pods_matching(view: KubeView, selector: Mapping[str, str]) -> list[Object]:
    return [pod for pod in view.of_kind("pods") if selects(selector, pod["metadata"].get("labels") or {})]


def is_pod_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


# ---- checks ----------------------------------------------------------------------------------------------------


def check_workloads(view: KubeView) -> list[CheckResult]:
    name = "kube.workloads"
    found = view.workloads
    if not found:
        sentence = f"namespace {view.namespace} has no Deployment or StatefulSet that runs baton router or baton engine"
        return [fail(name, sentence, "kubectl apply --server-side -k deploy/kubernetes/overlays/…; check --namespace")]
    problems = []
    for workload in found:
        wanted, ready = (
            int(workload["spec"].get("replicas", 1)),
            int(workload.get("status", {}).get("readyReplicas", 0)),
        )
        if ready < wanted:
            level = fail if ready == 0 else warn
            sentence = f"{label(workload)}: {ready} of {wanted} replicas are ready"
            problems.append(
                level(name, sentence, f"kubectl -n {view.namespace} describe {label(workload)}; see kube.pods")
            )
    return problems_or_ok(name, problems, f"all replicas of {', '.join(label(w) for w in found)} are ready")


def check_access(view: KubeView) -> list[CheckResult]:
    name = "kube.access"
    uses = [w for w in view.workloads if program(w) == "router" and "--service-discovery" in arguments(w, view)]
    if not uses:
        return [skip(name, "no router finds its workers through Kubernetes")]
    problems = []
    accounts = {account_of(workload) for workload in uses}
    for question, answer in view.access.items():
        account, verb = question.split(" ")
        if account in accounts and answer == "no":
            sentence = f"the router's service account {account} may not {verb} pods: it finds no worker"
            remedy = "bind it to a Role that may list and watch pods, as deploy/kubernetes/base/rbac.yaml does"
            problems.append(fail(name, sentence, remedy))
        elif account in accounts and answer != "yes":
            return [skip(name, f"whether {account} may {verb} pods is unknown: {answer}")]
    return problems_or_ok(name, problems, f"{', '.join(sorted(accounts))} may list and watch pods")


def check_selectors(view: KubeView) -> list[CheckResult]:
    name, problems = "kube.selectors", []
    counts = []
    for service in view.of_kind("services"):
        selector = service["spec"].get("selector")
        if not selector or not any(selects(selector, _labels(w)) or _is_near(selector, w) for w in view.workloads):
            continue
        pods = pods_matching(view, selector)
        ready = sum(map(is_pod_ready, pods))
        what = f"service/{service['metadata']['name']}"
        counts.append(f"{what} {ready} of {len(pods)}")
        problems += _judge(name, what, selector, pods)
    for workload in view.workloads:
        words = arguments(workload, view)
        for flag in SELECTOR_FLAGS:
            if (text := flag_value(words, flag)) is not None:
                selector = dict(part.partition("=")[::2] for part in text.split(","))
                pods = pods_matching(view, selector)
                counts.append(f"{flag} {sum(map(is_pod_ready, pods))} of {len(pods)}")
                problems += _judge(name, f"{flag} of {label(workload)}", selector, pods)
    if not counts:
        return [skip(name, "neither a Service nor a router selects pods of Baton")]
    return problems_or_ok(name, problems, f"ready pods of those selected: {', '.join(counts)}")


def _labels(workload: Object) -> dict[str, str]:
    return dict(workload["spec"]["template"]["metadata"].get("labels") or {})


def _is_near(selector: Mapping[str, str], workload: Object) -> bool:
    """True if a Service seems meant for a workload that it does not select: they share a key, or a value of a label."""
    labels = _labels(workload)
    return bool(set(selector.items()) & set(labels.items())) or bool(set(selector) & set(labels))


def _judge(name: str, what: str, selector: Mapping[str, str], pods: list[Object]) -> list[CheckResult]:
    text = ",".join(f"{key}={value}" for key, value in selector.items())
    if not pods:
        return [
            fail(
                name,
                f"{what} selects no pod ({text})",
                "compare it with the labels of the pods: kubectl get pods --show-labels",
            )
        ]
    if not any(map(is_pod_ready, pods)):
        return [fail(name, f"{what} selects {len(pods)} pods, of which none is ready ({text})", "see kube.pods")]
    return []


def check_probes(view: KubeView) -> list[CheckResult]:
    name, problems = "kube.probes", []
    for workload in view.workloads:
        container = main_container(workload) or {}
        paths = {
            kind: container.get(f"{kind}Probe", {}).get("httpGet", {}).get("path")
            for kind in ("readiness", "liveness", "startup")
        }
        who = label(workload)
        if container.get("readinessProbe") is None:
            problems.append(
                fail(
                    name,
                    f"{who} has no readiness probe: pods get requests while they load",
                    "readinessProbe: httpGet /readyz",
                )
            )
        elif paths["readiness"] in ("/livez", "/liveness", "/ping"):
            sentence = (
                f"{who}: its readiness probe asks {paths['readiness']}, which answers 200 while it loads and drains"
            )
            problems.append(fail(name, sentence, "readinessProbe: httpGet /readyz"))
        if (
            paths["liveness"] in ("/readyz", "/health", "/readiness", "/health_generate")
            and program(workload) == "engine"
        ):
            sentence = (
                f"{who}: its liveness probe asks {paths['liveness']}, so Kubernetes kills it while it loads or drains"
            )
            problems.append(fail(name, sentence, "livenessProbe: httpGet /livez"))
        if "/health_generate" in paths.values():
            sentence = f"{who}: a probe asks /health_generate, which computes a token and waits behind requests"
            problems.append(warn(name, sentence, "use /readyz and /livez"))
        if program(workload) == "engine" and container.get("livenessProbe") and not container.get("startupProbe"):
            sentence = f"{who} has a liveness probe and no startup probe: a slow load may be taken for a hang"
            problems.append(
                warn(name, sentence, "startupProbe: httpGet /readyz, failureThreshold for the longest load")
            )
    return problems_or_ok(name, problems, f"probes of {len(view.workloads)} workloads ask the right paths")


def check_grace(view: KubeView) -> list[CheckResult]:
    """preStop + drain + 10 s must fit into terminationGracePeriodSeconds, or Kubernetes kills running requests."""
    name, problems = "kube.grace", []
    notes = []
    for workload in view.workloads:
        flag, default = DRAIN_FLAGS[str(program(workload))]
        text = flag_value(arguments(workload, view), flag)
        drain = _seconds(text, default)
        if drain is None:
            problems.append(
                warn(name, f"{label(workload)}: {flag} is {text!r}, which no ConfigMap resolves", "write the number")
            )
            continue
        pause = _prestop_seconds(main_container(workload) or {})
        grace = int(pod_spec(workload).get("terminationGracePeriodSeconds", 30))
        needed = pause + drain + SPARE_GRACE_SECS
        notes.append(f"{label(workload)} {grace} >= {pause:g} + {drain:g} + {SPARE_GRACE_SECS}")
        if grace < needed:
            sentence = (
                f"{label(workload)}: Kubernetes kills its pods after {grace} s, but they need {needed:g} s: "
                f"preStop {pause:g} + {flag} {drain:g} + {SPARE_GRACE_SECS}"
            )
            problems.append(fail(name, sentence, f"terminationGracePeriodSeconds: {needed:g}, or a smaller {flag}"))
        if pause == 0:
            sentence = f"{label(workload)} has no preStop pause: requests still arrive when it refuses them already"
            problems.append(warn(name, sentence, "lifecycle: preStop: sleep: seconds: 5"))
    return problems_or_ok(name, problems, "; ".join(notes))


def _seconds(text: str | None, default: float) -> float | None:
    try:
        return default if text is None else float(text)
    except ValueError:
        return None


def _prestop_seconds(container: Object) -> float:
    hook = container.get("lifecycle", {}).get("preStop", {})
    if "sleep" in hook:
        return float(hook["sleep"].get("seconds", 0))
    words = " ".join(hook.get("exec", {}).get("command", []))
    found = re.search(r"sleep (\d+(?:\.\d+)?)", words)
    return float(found[1]) if found else 0.0


def check_pods(view: KubeView) -> list[CheckResult]:
    name, problems = "kube.pods", []
    if "pods" in view.unreadable:
        return [skip(name, f"pods cannot be read: {view.unreadable['pods']}")]
    mine = [
        pod
        for pod in view.of_kind("pods")
        if any(selects(_selector(w), pod["metadata"].get("labels") or {}) for w in view.workloads)
    ]
    for pod in mine:
        if reason := _trouble(pod):
            sentence = f"pod/{pod['metadata']['name']}: {reason}"
            problems.append(
                fail(
                    name,
                    sentence,
                    f"kubectl -n {view.namespace} describe pod {pod['metadata']['name']}; kubectl logs --previous",
                )
            )
    return problems_or_ok(name, problems, f"pods without trouble: {len(mine)}")


def _selector(workload: Object) -> dict[str, str]:
    return dict(workload["spec"]["selector"].get("matchLabels") or {})


WAITING_IS_NORMAL = ("ContainerCreating", "PodInitializing")


def _trouble(pod: Object) -> str:
    """Why a pod does not run, as the scheduler and the kubelet say; empty: nothing is wrong, or it starts."""
    status = pod.get("status", {})
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason") and waiting["reason"] not in WAITING_IS_NORMAL:
            message = f": {waiting['message']}" if waiting.get("message") else ""
            return f"container {container['name']} waits, {waiting['reason']}{message}"
        ended = container.get("lastState", {}).get("terminated", {})
        if ended.get("reason") == "OOMKilled":
            return (
                f"container {container['name']} exceeded its memory limit ({container.get('restartCount', 0)} restarts)"
            )
    if status.get("phase") == "Pending":
        for condition in status.get("conditions", []):
            if condition["type"] == "PodScheduled" and condition["status"] != "True":
                return f"it is not scheduled: {condition.get('message', condition.get('reason', 'no reason given'))}"
    if status.get("phase") == "Failed":
        return f"it failed: {status.get('message') or status.get('reason', 'no reason given')}"
    return ""


def check_secrets(view: KubeView) -> list[CheckResult]:
    name, problems = "kube.secrets", []
    wanted = {(secret, key) for workload in view.workloads for secret, key in referenced_secrets(workload)}
    unread = [reason for kind, reason in view.unreadable.items() if kind.startswith("secret ")]
    for secret, key in sorted(wanted, key=str):
        if secret not in view.secrets:
            continue
        keys = view.secrets[secret]
        remedy = f"kubectl -n {view.namespace} create secret generic {secret} --from-literal={key or 'KEY'}=…"
        if keys is None:
            problems.append(fail(name, f"Secret {secret} does not exist", remedy))
        elif key is not None and key not in keys:
            problems.append(fail(name, f"Secret {secret} has no key {key}, only {', '.join(keys) or 'none'}", remedy))
    if not problems and unread:
        return [skip(name, f"Secrets cannot be read: {unread[0]}")]
    return problems_or_ok(name, _unique(problems), f"{len(view.secrets)} Secrets exist with the keys that pods name")


def _unique(results: list[CheckResult]) -> list[CheckResult]:
    return list({result.sentence: result for result in results}.values())


def check_gpus(view: KubeView) -> list[CheckResult]:
    name = "kube.gpus"
    wanted = sum(_gpus(pod_spec(w)) * int(w["spec"].get("replicas", 1)) for w in view.workloads)
    if not wanted:
        return [skip(name, f"no workload asks for {GPU_RESOURCE}")]
    if "nodes" in view.unreadable:
        return [skip(name, f"nodes cannot be read: {view.unreadable['nodes']}")]
    there = sum(
        int(node.get("status", {}).get("allocatable", {}).get(GPU_RESOURCE, 0)) for node in view.of_kind("nodes")
    )
    if there == 0:
        sentence = f"{wanted} GPUs are asked for, no node offers {GPU_RESOURCE}"
        return [fail(name, sentence, "install NVIDIA's device plugin or GPU operator; kubectl describe node")]
    if there < wanted:
        return [
            fail(
                name, f"{wanted} GPUs are asked for, all nodes together offer {there}", "fewer replicas, or more nodes"
            )
        ]
    problems = []
    for workload in view.workloads:
        surge = workload["spec"].get("strategy", {}).get("rollingUpdate", {}).get("maxSurge", "25%")
        extra = _gpus(pod_spec(workload))
        if extra and str(surge) not in ("0", "0%") and workload.get("kind") != "StatefulSet" and there < wanted + extra:
            sentence = f"{label(workload)}: maxSurge {surge}, but no GPU of {there} is left: a rollout would hang"
            problems.append(warn(name, sentence, "strategy: rollingUpdate: {maxSurge: 0, maxUnavailable: 1}"))
    return problems_or_ok(name, problems, f"GPUs asked for: {wanted}, offered by nodes: {there}")


def _gpus(spec: Object) -> int:
    return sum(int(c.get("resources", {}).get("limits", {}).get(GPU_RESOURCE, 0)) for c in spec.get("containers", []))


KUBE_CHECKS: tuple[Callable[[KubeView], list[CheckResult]], ...] = (
    check_workloads,
    check_pods,
    check_selectors,
    check_probes,
    check_grace,
    check_access,
    check_secrets,
    check_gpus,
)


def check_namespace(view: KubeView) -> list[CheckResult]:
    if view.problem:
        remedy = "check kubectl (--kubectl, KUBECONFIG) and what its user may read"
        return [fail("kube.api", f"namespace {view.namespace} cannot be read: {view.problem}", remedy)]
    results = check_workloads(view)
    if results[0].status is CheckStatus.FAIL and not view.workloads:
        return results
    return results + [result for check in KUBE_CHECKS[1:] for result in check(view)]
