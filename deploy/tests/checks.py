"""Rules that no schema knows: each takes the objects of one rendered directory and returns what is wrong with them."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import yaml

from baton.server.http.routes.table import OPEN_PATHS
from deploy.tests.manifests import (
    DEPLOY,
    Object,
    arguments,
    containers,
    flag_value,
    main_container,
    of_kind,
    pod_labels,
    pod_spec,
    selects,
    settings,
    sidecar_engines,
    workloads,
)
from deploy.tests.programs import check_router_flags, engine_config

ROOT = Path(__file__).parents[2]
DEMO_MODEL = ROOT / "engine" / "baton" / "models" / "demo"
Problems = Iterator[str]


def check_selectors(objects: Sequence[Object]) -> Problems:
    """Each selector matches the pods it is meant for: those of the object's own name."""
    roles = workloads(objects)
    for role, workload in roles.items():
        matched = [
            r for r, w in roles.items() if selects(workload["spec"]["selector"], pod_labels(w))
        ]
        if matched != [role]:
            yield f"Deployment {role} selects the pods of {matched}"
        for spread in pod_spec(workload).get("topologySpreadConstraints", []):
            if not selects(spread["labelSelector"], pod_labels(workload)):
                yield f"Deployment {role}: topologySpreadConstraints count other pods"
    for kind in ("Service", "PodDisruptionBudget"):
        for item in of_kind(objects, kind):
            name, selector = item["metadata"]["name"], item["spec"]["selector"]
            selector = {"matchLabels": selector} if kind == "Service" else selector
            matched = [r for r, w in roles.items() if selects(selector, pod_labels(w))]
            if matched != [name]:
                yield f"{kind} {name} selects the pods of {matched}"
    budgets = {item["metadata"]["name"] for item in of_kind(objects, "PodDisruptionBudget")}
    yield from (f"{role} has no PodDisruptionBudget" for role in roles.keys() - budgets)


def check_discovery(objects: Sequence[Object]) -> Problems:
    """The router's flags name exactly the pods of its workers, their port and its own namespace, or the engines of its
    own pod."""
    roles = workloads(objects)
    if "router" not in roles:
        return
    args = arguments(roles["router"], objects)
    engines = sidecar_engines(objects)
    for role, container in engines.items():
        port = flag_value(arguments(roles["router"], objects, container), "--port")
        if flag_value(args, f"--{role}") != f"http://10.0.0.1:{port}":
            yield f"--{role}={flag_value(args, f'--{role}')}, the engine listens on 10.0.0.1:{port}"
        if container.get("restartPolicy") != "Always":
            yield f"{role} is no sidecar: the router would start only after it has ended"
    if engines:
        yield from (
            f"the router has no {role} engine" for role in {"prefill", "decode"} - engines.keys()
        )
        return
    for role in ("prefill", "decode"):
        text = flag_value(args, f"--{role}-selector") or ""
        selector = {
            "matchLabels": dict(pair.split("=", 1) for pair in text.split(",") if "=" in pair)
        }
        matched = [r for r, w in roles.items() if selects(selector, pod_labels(w))]
        if matched != [role]:
            yield f"--{role}-selector {text} finds the pods of {matched}"
    if flag_value(args, "--service-discovery-namespace"):
        yield "--service-discovery-namespace is set: the router's Role is for its own namespace"


def ports_table(objects: Sequence[Object]) -> list[Object]:
    """Rows of ports.yaml, without those of components that are not part of the objects."""
    policies = {item["metadata"]["name"] for item in of_kind(objects, "NetworkPolicy")}
    rows = yaml.safe_load((DEPLOY / "ports.yaml").read_text())
    return [row for row in rows if row.get("policy") in (None, *policies)]


def check_ports(objects: Sequence[Object]) -> Problems:
    """Container ports, Service ports and port flags are those of ports.yaml."""
    table = ports_table([])
    roles = workloads(objects)
    for role, workload in roles.items():
        expected = {row["name"]: row["port"] for row in table if row["to"] == role}
        declared = {
            port["name"]: port["containerPort"] for port in main_container(workload)["ports"]
        }
        if declared != expected:
            yield f"{role} declares {declared}, ports.yaml has {expected}"
        args = arguments(workload, objects)
        flags = {
            "http": "--port",
            "health": "--health-port",
            "bootstrap": "--disaggregation-bootstrap-port",
            "transfer": "--transfer-port",
        }
        yield from (
            f"{role}: {flags[name]} is {flag_value(args, flags[name])}, ports.yaml has {port}"
            for name, port in expected.items()
            if flag_value(args, flags[name]) != str(port)
        )
    engine_port = str(
        next(row["port"] for row in table if row["to"] == "prefill" and row["name"] == "http")
    )
    if "router" in roles and not sidecar_engines(objects):
        found = flag_value(arguments(roles["router"], objects), "--service-discovery-port")
        if found != engine_port:
            yield f"--service-discovery-port is not {engine_port}"
    for service in of_kind(objects, "Service"):
        names = {
            port["name"] for port in main_container(roles[service["metadata"]["name"]])["ports"]
        }
        for port in service["spec"]["ports"]:
            if port["targetPort"] not in names:
                yield f"Service {service['metadata']['name']}: no container port {port['targetPort']}"


def allowed_connections(objects: Sequence[Object]) -> set[tuple[str, str, int, int]]:
    """Connections (from, to, first port, last port) that both ends' NetworkPolicies allow."""
    roles = workloads(objects)
    policies = of_kind(objects, "NetworkPolicy")

    def peers(rules: Sequence[Object] | None) -> set[str]:
        """Roles, `monitoring`, `kube-system`, or `clients` for everything."""
        if not rules:
            return {"clients", *roles}
        found: set[str] = set()
        for rule in rules:
            if "podSelector" in rule and "namespaceSelector" not in rule:
                found |= {
                    r for r, w in roles.items() if selects(rule["podSelector"], pod_labels(w))
                }
            else:
                found.add(rule["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"])
        return found

    def side(role: str, direction: str, key: str) -> set[tuple[str, int, int]]:
        applied = [
            p["spec"]
            for p in policies
            if selects(p["spec"]["podSelector"], pod_labels(roles[role]))
        ]
        applied = [spec for spec in applied if direction in spec["policyTypes"]]
        if not applied:
            return {(peer, 1, 65535) for peer in ("clients", *roles)}
        return {
            (peer, port["port"], port.get("endPort", port["port"]))
            for spec in applied
            for rule in spec.get(direction.lower(), [])
            for peer in peers(rule.get(key))
            for port in rule.get("ports", [{"port": 1, "endPort": 65535}])
        }

    egress = {role: side(role, "Egress", "to") for role in roles}
    result = set()
    for role in roles:
        for peer, first, last in side(role, "Ingress", "from"):
            if peer not in roles or any(
                to == role and low <= first and last <= high for to, low, high in egress[peer]
            ):
                result.add((peer, role, first, last))
    return result


def check_network_policy(objects: Sequence[Object]) -> Problems:
    """The policies allow the rows of ports.yaml and nothing else between pods."""
    table = ports_table(objects)
    roles = workloads(objects)
    wanted = {
        (source, row["to"], row["port"], row.get("end_port", row["port"]))
        for row in table
        if row["to"] in roles
        for source in row["from"]
        if source in roles or source not in ("router", "prefill", "decode")
    }
    found = allowed_connections(objects)
    yield from (f"ports.yaml has {row}, no policy allows it" for row in sorted(wanted - found))
    yield from (
        f"policies allow {row}, ports.yaml does not have it" for row in sorted(found - wanted)
    )
    for role, workload in workloads(objects).items():
        policies = [item["spec"] for item in of_kind(objects, "NetworkPolicy")]
        types = {
            t
            for p in policies
            if selects(p["podSelector"], pod_labels(workload))
            for t in p["policyTypes"]
        }
        if types != {"Ingress", "Egress"}:
            yield f"{role}: traffic is denied by default only for {sorted(types)}"


def open_paths(role: str) -> set[str]:
    """Paths that the program answers without an API key, read from its source."""
    if role != "router":
        return set(OPEN_PATHS)
    source = (ROOT / "router" / "src" / "server" / "api" / "mod.rs").read_text()
    _, _, behind = source.partition("fn health_routes()")
    function, _, _ = behind.partition("\n}\n")
    return set(re.findall(r'"(/\w+)"', function))


def check_probes(objects: Sequence[Object]) -> Problems:
    """Startup and readiness ask /readyz, liveness /livez, on the health port, whose connections clients cannot take; a
    router may start without workers."""
    for role, workload in workloads(objects).items():
        expected = {
            "startupProbe": "/readyz",
            "readinessProbe": "/readyz",
            "livenessProbe": "/livez",
        }
        if role == "router":
            expected["startupProbe"] = "/livez"
        for probe, path in expected.items():
            get = main_container(workload).get(probe, {}).get("httpGet", {})
            if get != {"path": path, "port": "health"}:
                yield f"{role}: {probe} asks {get}, not {path}"
            if path not in open_paths(role):
                yield f"{role}: the program does not serve {path} without a key"
    for role, container in sidecar_engines(objects).items():
        port = int(
            flag_value(arguments(workloads(objects)["router"], objects, container), "--health-port")
            or 0
        )
        for probe, path in {
            "startupProbe": "/readyz",
            "readinessProbe": "/readyz",
            "livenessProbe": "/livez",
        }.items():
            get = container.get(probe, {}).get("httpGet", {})
            if get != {"path": path, "port": port}:
                yield f"sidecar {role}: {probe} asks {get}, not {path} of port {port}"


def check_grace(objects: Sequence[Object]) -> Problems:
    """Kubernetes kills a pod only after preStop, drain and 10 s; a rollout may take as long as loading the model."""
    values = settings(objects)
    roles = workloads(objects)
    for role, workload in roles.items():
        spec, container = pod_spec(workload), main_container(workload)
        drain_flag = "--shutdown-grace-period-secs" if role == "router" else "--drain-timeout-secs"
        drain = float(flag_value(arguments(workload, objects), drain_flag) or 0)
        pre_stop = (
            container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        )
        grace = spec["terminationGracePeriodSeconds"]
        if not drain:
            yield f"{role}: {drain_flag} is not given"
        if pre_stop < 2:
            yield f"{role}: preStop sleeps {pre_stop} s; routers and Services need about 2 s to see a pod leave"
        # Sidecars get SIGTERM when the router has ended, one after the other.
        sidecars = [arguments(workload, objects, c) for c in spec.get("initContainers", [])]
        drain += sum(float(flag_value(args, "--drain-timeout-secs") or "inf") for args in sidecars)
        if grace < pre_stop + drain + 10:
            yield f"{role}: killed after {grace} s, needs preStop {pre_stop} + drain {drain:g} + 10 s"
        if (
            str(grace)
            != values["ROUTER_GRACE_SECONDS" if role == "router" else "ENGINE_GRACE_SECONDS"]
        ):
            yield f"{role}: terminationGracePeriodSeconds {grace} is not that of config.env"
        if workload["spec"].get("minReadySeconds", 0) < 5:
            yield f"{role}: minReadySeconds lets a rollout go on before routers have probed the new pod"
        probe = container["startupProbe"]
        budget = probe["failureThreshold"] * probe.get("periodSeconds", 10)
        if workload["spec"].get("progressDeadlineSeconds", 600) <= budget:
            yield f"{role}: progressDeadlineSeconds ends before the {budget} s of the startup probe"


ROUTER_RESERVE_BYTES = 224 * 2**20
"""Memory of a router without clients: program, tokenizer of a large vocabulary, rooms, timelines, and the allocator's
slack."""
BODY_COST = 1.5
"""Memory of a body for each of its bytes: one that comes without a length is copied while it grows. Measured: 200
clients with chunked bodies of 24 MB, a tokenizer and these limits drive a router to 634 MB."""
BODY_WORK_FACTOR = 4
"""A body that is worked on (scanned, rendered, tokenized) costs this many times its length beside itself; half of the
cores work on one each."""


def check_router_memory(objects: Sequence[Object]) -> Problems:
    """Memory that clients can make a router hold fits its limit: bodies, one of them in work, streams that could be
    resumed, heads of all connections, and the index of both roles."""
    router = workloads(objects).get("router")
    if router is None:
        return
    flags = {
        name: router_limit(objects, arguments(router, objects), name)
        for name in (
            "max-payload-size", "max-total-body-bytes", "max-index-bytes", "failover-max-bytes", "max-connections",
            "max-header-bytes",
        )
    }  # fmt: skip
    container = main_container(router)
    limit = quantity(container["resources"]["limits"]["memory"])
    if container["resources"]["limits"]["memory"] != settings(objects)["ROUTER_MEMORY"]:
        yield "router: its memory limit is not that of config.env"
    needed = (
        ROUTER_RESERVE_BYTES
        + int(BODY_COST * flags["max-total-body-bytes"])
        + BODY_WORK_FACTOR * flags["max-payload-size"]
        + flags["failover-max-bytes"]
        + 2 * flags["max-index-bytes"]
        + flags["max-connections"] * flags["max-header-bytes"]
    )
    if needed > limit:
        yield f"router: its clients can make it hold {needed} bytes, its memory limit is {limit}"


def router_limit(objects: Sequence[Object], args: Sequence[str], name: str) -> int:
    """Value of a router's flag: an argument, a setting of config.env, or the default."""
    variable = "BATON_ROUTER_FLAG_" + name.upper().replace("-", "_")
    given = flag_value(args, f"--{name}") or settings(objects).get(variable)
    return int(given) if given else router_default(name)


def router_default(name: str) -> int:
    """Default of a router's flag, as docs/flags.md has it from the program."""
    rows = (ROOT / "docs" / "flags.md").read_text()
    found = re.search(rf"^\| `--{name}` \| `(\d+)` \|", rows, re.MULTILINE)
    assert found is not None, f"docs/flags.md has no default of --{name}"
    return int(found[1])


def quantity(text: str) -> int:
    """Bytes of a Kubernetes quantity with a binary suffix, or none."""
    units = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
    return int(text[:-2]) * units[text[-2:]] if text[-2:] in units else int(text)


def check_rollout(objects: Sequence[Object]) -> Problems:
    """A pod that takes GPUs is replaced in place: a surge pod would wait for devices that its predecessor holds."""
    for role, workload in workloads(objects).items():
        update = workload["spec"].get("strategy", {}).get("rollingUpdate", {})
        limits = main_container(workload).get("resources", {}).get("limits", {})
        takes_gpu = any(name.endswith("/gpu") for name in limits)
        expected = (
            {"maxSurge": 0, "maxUnavailable": 1}
            if takes_gpu
            else {"maxSurge": 1, "maxUnavailable": 0}
        )
        if update != expected:
            yield f"{role}: rollingUpdate is {update}, not {expected}"


def check_hardening(objects: Sequence[Object]) -> Problems:
    """Pod Security Standard `restricted`, one fixed user, a read-only root file system, no host namespaces or paths."""
    for role, workload in workloads(objects).items():
        spec = pod_spec(workload)
        pod = {"runAsNonRoot": True, "runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532}
        pod["seccompProfile"] = {"type": "RuntimeDefault"}
        if spec.get("securityContext") != pod:
            yield f"{role}: securityContext of the pod is {spec.get('securityContext')}"
        own = {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        for container in containers(workload):
            if container.get("securityContext") != own:
                yield f"{role}: securityContext of {container['name']} is {container.get('securityContext')}"
            if "memory" not in container.get("resources", {}).get("limits", {}):
                yield f"{role}: {container['name']} has no memory limit"
        yield from (
            f"{role}: {key} is set"
            for key in ("hostNetwork", "hostIPC", "hostPID")
            if spec.get(key)
        )
        for volume in spec.get("volumes", []):
            if "hostPath" in volume:
                yield f"{role}: volume {volume['name']} is a path of the host"
            if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
                yield f"{role}: volume {volume['name']} has no sizeLimit"
    for namespace in of_kind(objects, "Namespace"):
        if (
            namespace["metadata"]["labels"].get("pod-security.kubernetes.io/enforce")
            != "restricted"
        ):
            yield "the namespace does not enforce the restricted profile"


def check_access(objects: Sequence[Object]) -> Problems:
    """The router may list and watch pods of its namespace; engines get no token; no right spans the cluster."""
    roles = workloads(objects)
    rules = [rule for role in of_kind(objects, "Role") for rule in role["rules"]]
    if "router" not in roles or sidecar_engines(objects):  # no pod asks the API server
        kinds = ("ServiceAccount", "Role", "RoleBinding")
        yield from (
            f"{i['kind']} {i['metadata']['name']} has no use" for i in objects if i["kind"] in kinds
        )
        for role, workload in roles.items():
            if pod_spec(workload).get("automountServiceAccountToken") is not False:
                yield f"{role}: automountServiceAccountToken"
        return
    if rules != [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]:
        yield f"Roles allow {rules}"
    yield from (
        f"{i['kind']} {i['metadata']['name']}"
        for i in objects
        if i["kind"].startswith("ClusterRole")
    )
    account = pod_spec(roles["router"])["serviceAccountName"]
    bound = {s["name"] for binding in of_kind(objects, "RoleBinding") for s in binding["subjects"]}
    if bound != {account}:
        yield f"the router runs as {account}, the Role is bound to {bound}"
    for role, workload in roles.items():
        if pod_spec(workload).get("automountServiceAccountToken") is not (role == "router"):
            yield f"{role}: automountServiceAccountToken"


EXTERNAL_SECRETS = {
    "baton-cluster-key": {"key", "second"},
    "baton-api-keys": {"client", "control-plane"},
}
"""Secrets that the base names and the operator makes, with their keys."""
EXTERNAL_CLAIMS = {"baton-model"}
EXTERNAL_FILES = {"baton-router-tls"}
"""Secrets of the components that are mounted as files."""


def check_references(objects: Sequence[Object]) -> Problems:
    """Every ConfigMap, Secret, ServiceAccount and volume that a pod names exists; keys come from Secrets alone."""
    have = {(item["kind"], item["metadata"]["name"]): item for item in objects}
    for role, workload in workloads(objects).items():
        spec = pod_spec(workload)
        account = spec.get("serviceAccountName")
        if account and ("ServiceAccount", account) not in have:
            yield f"{role}: no ServiceAccount {account}"
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        for volume in spec.get("volumes", []):
            claim = volume.get("persistentVolumeClaim")
            if claim and not (claim["claimName"] in EXTERNAL_CLAIMS and claim.get("readOnly")):
                yield f"{role}: claim {claim['claimName']} is unknown or writable"
            secret_name = volume.get("secret", {}).get("secretName")
            if secret_name and secret_name not in EXTERNAL_FILES:
                yield f"{role}: no Secret {secret_name}"
        used: set[str] = set()
        for container in containers(workload):
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            used |= mounted
            if not mounted <= volumes:
                yield f"{role}: volumes {sorted(volumes)}, {container['name']} mounts {sorted(mounted)}"
            for source in container.get("envFrom", []):
                if ("ConfigMap", source["configMapRef"]["name"]) not in have:
                    yield f"{role}: no ConfigMap {source['configMapRef']['name']}"
            for variable in container.get("env", []):
                reference = variable.get("valueFrom", {}).get("secretKeyRef")
                if reference:
                    secret = have.get(("Secret", reference["name"]))
                    # kustomize appends a hash to the names of Secrets that it generates.
                    named = [
                        keys
                        for name, keys in EXTERNAL_SECRETS.items()
                        if reference["name"].startswith(name)
                    ]
                    external = named[0] if named else set()
                    keys = (
                        set(secret.get("data", {})) | set(secret.get("stringData", {}))
                        if secret
                        else set(external)
                    )
                    if reference.get("optional"):
                        keys |= external
                    if reference["key"] not in keys:
                        yield f"{role}: no Secret {reference['name']} with key {reference['key']}"
                elif "KEY" in variable["name"]:
                    yield f"{role}: {variable['name']} is not from a Secret"
        if used != volumes:
            yield f"{role}: volumes {sorted(volumes)}, mounted {sorted(used)}"


def check_images(objects: Sequence[Object]) -> Problems:
    """Images have this version as tag."""
    version = re.search(r'^version = "(.+)"$', (ROOT / "Cargo.toml").read_text(), re.M)
    assert version
    for role, workload in workloads(objects).items():
        for container in containers(workload):
            if not container["image"].endswith(f":{version[1]}"):
                yield f"{role}: image {container['image']} is not of version {version[1]}"


def make_certificate(directory: Path) -> None:
    """Write tls.crt and tls.key, self-signed."""
    files = ["-keyout", str(directory / "tls.key"), "-out", str(directory / "tls.crt")]
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    subprocess.run([*command, "-subj", "/CN=router", *files], check=True, capture_output=True)


def check_flags(objects: Sequence[Object]) -> Problems:
    """The programs accept their arguments: engines' are parsed, a router is started until it asks for Kubernetes."""
    roles = workloads(objects)
    engines = {
        role: arguments(workload, objects) for role, workload in roles.items() if role != "router"
    }
    for role, container in sidecar_engines(objects).items():
        engines[role] = arguments(roles["router"], objects, container)
    router = arguments(roles["router"], objects) if "router" in roles else None
    for role, args in [("router", router or ()), *engines.items()]:
        yield from (f"{role}: {arg} has an unknown variable" for arg in args if "$(" in arg)
    if router is not None:
        yield from check_router_starts(tuple(router))
    for role, args in engines.items():
        try:
            parsed = engine_config(args[1:])
        except AssertionError as err:
            yield f"{role}: {err}"
            continue
        if args[0] != "engine" or parsed.disaggregation_mode != role:
            yield f"{role}: starts {args[0]} in mode {parsed.disaggregation_mode}"


@functools.cache  # most directories and most defects leave the router's arguments as they are
def check_router_starts(args: tuple[str, ...]) -> tuple[str, ...]:
    """Problems of a router that is started until it asks for Kubernetes, or without discovery only parses its flags."""
    if "--service-discovery" not in args:
        try:
            check_router_flags(args)
        except AssertionError as err:
            return (str(err),)
        return ()
    with tempfile.TemporaryDirectory() as mounted:
        if flag_value(args, "--tls-cert-path"):
            make_certificate(Path(mounted))
        local = [
            arg.replace("=/model", f"={DEMO_MODEL}").replace("=/tls/", f"={mounted}/")
            for arg in args
        ]
        command = [
            sys.executable,
            "-m",
            "baton_ops.cli",
            "router",
            *local,
            "--kubeconfig=/nonexistent",
            *("--port=0", "--health-port=0"),  # tests beside this one start routers too
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    routine = re.compile(r'Z +(INFO|WARN) |"level":"(INFO|WARN)"')
    errors = [line for line in done.stderr.splitlines() if not routine.search(line)]
    if done.returncode != 2 or len(errors) != 1 or "--kubeconfig /nonexistent" not in errors[0]:
        return (f"router: exit code {done.returncode}: {done.stderr}",)
    return ()


CHECKS: dict[str, Callable[[Sequence[Object]], Problems]] = {
    "selectors": check_selectors,
    "discovery": check_discovery,
    "ports": check_ports,
    "network_policy": check_network_policy,
    "probes": check_probes,
    "grace": check_grace,
    "router_memory": check_router_memory,
    "rollout": check_rollout,
    "hardening": check_hardening,
    "access": check_access,
    "references": check_references,
    "images": check_images,
    "flags": check_flags,
}
