"""`baton doctor --namespace` on the real manifests: what is deployed as they say is well, each planted fault is named.

kubectl is replaced by a program that answers from a file, so the reading is tested, too.
"""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton_ops.doctor import check, kubernetes, main
from baton_ops.doctor.check import CheckResult, CheckStatus
from baton_ops.doctor.kubernetes import KubeView
from deploy.tests.manifests import (
    Object,
    main_container,
    named,
    of_kind,
    pod_labels,
    pod_spec,
    render,
    workloads,
)

NAMESPACE = "baton"
FAKE = """#!{python}
import json, sys
words = sys.argv[1:]
answers = json.load(open({answers!r}))
while words and words[0].startswith("-"):
    words = words[1:] if "=" in words[0] else words[2:]
found = answers.get(" ".join(words))
if found is None:
    print("Error from server (NotFound): " + " ".join(words) + " not found", file=sys.stderr)
    sys.exit(1)
sys.stdout.write(found["out"])
sys.stderr.write(found.get("err", ""))
sys.exit(found.get("code", 0))
"""


def running(target: str) -> list[Object]:
    """The objects of a kustomize directory with pods that are ready, as a cluster would have them."""
    objects = render(target)
    for name, workload in workloads(objects).items():
        replicas = workload["spec"].get("replicas", 1)
        workload["status"] = {"readyReplicas": replicas}
        objects += [
            {
                "kind": "Pod",
                "metadata": {"name": f"{name}-{i}", "labels": dict(pod_labels(workload))},
                "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
            }
            for i in range(replicas)
        ]
    return objects


def view_of(objects: list[Object], gpus: int = 8) -> KubeView:
    kinds = {
        "deployments": "Deployment",
        "pods": "Pod",
        "services": "Service",
        "configmaps": "ConfigMap",
    }
    found = {plural: of_kind(objects, kind) for plural, kind in kinds.items()}
    found["nodes"] = [{"status": {"allocatable": {"nvidia.com/gpu": str(gpus)}}}] if gpus else [{}]
    view = KubeView(NAMESPACE, found)
    for workload in view.workloads:
        for name, key in kubernetes.referenced_secrets(workload):
            keys = view.secrets.setdefault(name, [])
            assert keys is not None
            keys.append(key or "any")
    view.access.update({("baton-router", verb): "yes" for verb in kubernetes.ROUTER_VERBS})
    return view


def problems(view: KubeView) -> list[CheckResult]:
    return [result for result in kubernetes.check_namespace(view) if check.is_problem(result)]


@pytest.mark.parametrize(
    "target", ["base", "overlays/cpu-demo", "overlays/gpu", "base+tls", "base+tracing"]
)
def test_namespace_as_in_the_manifests_has_no_problems(target: str) -> None:
    results = kubernetes.check_namespace(view_of(running(target)))
    assert not [result for result in results if check.is_problem(result)]
    assert {r.name for r in results if r.status is CheckStatus.OK} >= {
        "kube.workloads", "kube.pods", "kube.selectors", "kube.probes", "kube.grace", "kube.access", "kube.secrets",
    }  # fmt: skip


def _readiness_on_livez(objects: list[Object]) -> None:
    main_container(workloads(objects)["decode"])["readinessProbe"]["httpGet"]["path"] = "/livez"


def _liveness_on_readyz(objects: list[Object]) -> None:
    main_container(workloads(objects)["prefill"])["livenessProbe"]["httpGet"]["path"] = "/readyz"


def _liveness_on_port_of_clients(objects: list[Object]) -> None:
    main_container(workloads(objects)["router"])["livenessProbe"]["httpGet"]["port"] = "http"


def _no_startup_probe(objects: list[Object]) -> None:
    del main_container(workloads(objects)["prefill"])["startupProbe"]


def _misspelt_service(objects: list[Object]) -> None:
    named(objects, "Service", "router")["spec"]["selector"]["app.kubernetes.io/component"] = "ruter"


def _misspelt_flag(objects: list[Object]) -> None:
    args = main_container(workloads(objects)["router"])["args"]
    args[:] = [arg.replace("component=decode", "component=decoder") for arg in args]


def _grace_too_short(objects: list[Object]) -> None:
    pod_spec(workloads(objects)["decode"])["terminationGracePeriodSeconds"] = 30


def _no_prestop(objects: list[Object]) -> None:
    del main_container(workloads(objects)["router"])["lifecycle"]


def _pod_status(objects: list[Object], status: dict[str, Any]) -> None:
    named(objects, "Pod", "decode-1")["status"] = status


def _image_missing(objects: list[Object]) -> None:
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    _pod_status(
        objects,
        {
            "phase": "Pending",
            "containerStatuses": [{"name": "engine", "state": {"waiting": waiting}}],
        },
    )


def _unscheduled(objects: list[Object]) -> None:
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "message": "0/3 nodes: insufficient nvidia.com/gpu",
    }
    _pod_status(objects, {"phase": "Pending", "conditions": [condition]})


def _out_of_memory(objects: list[Object]) -> None:
    ended = {
        "name": "engine",
        "state": {},
        "lastState": {"terminated": {"reason": "OOMKilled"}},
        "restartCount": 3,
    }
    _pod_status(objects, {"phase": "Running", "containerStatuses": [ended]})


def _not_ready(objects: list[Object]) -> None:
    workloads(objects)["decode"]["status"] = {"readyReplicas": 1}


FAULTS: dict[str, tuple[Callable[[list[Object]], None], str, str]] = {
    "readiness": (
        _readiness_on_livez,
        "kube.probes",
        "deployment/decode: its readiness probe asks /livez",
    ),
    "liveness": (
        _liveness_on_readyz,
        "kube.probes",
        "deployment/prefill: its liveness probe asks /readyz",
    ),
    "port": (
        _liveness_on_port_of_clients,
        "kube.probes",
        "deployment/router: a probe asks a port of clients",
    ),
    "startup": (
        _no_startup_probe,
        "kube.probes",
        "deployment/prefill has a liveness probe and no startup probe",
    ),
    "service": (_misspelt_service, "kube.selectors", "service/router selects no pod"),
    "flag": (
        _misspelt_flag,
        "kube.selectors",
        "--decode-selector of deployment/router selects no pod",
    ),
    "grace": (
        _grace_too_short,
        "kube.grace",
        "after 30 s, but they need 315 s: preStop 5 + --drain-timeout-secs 300 + 10",
    ),
    "pause": (_no_prestop, "kube.grace", "deployment/router has no preStop pause"),
    "image": (
        _image_missing,
        "kube.pods",
        "pod/decode-1: container engine waits, ImagePullBackOff: no such image",
    ),
    "pending": (
        _unscheduled,
        "kube.pods",
        "pod/decode-1: it is not scheduled: 0/3 nodes: insufficient nvidia.com/gpu",
    ),
    "memory": (
        _out_of_memory,
        "kube.pods",
        "container engine exceeded its memory limit (3 restarts)",
    ),
    "replicas": (_not_ready, "kube.workloads", "deployment/decode: 1 of 2 replicas are ready"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_a_manifest_is_the_only_thing_named(fault: str) -> None:
    plant, name, sentence = FAULTS[fault]
    objects = running("base")
    plant(objects)
    found = problems(view_of(objects))
    assert [result.name for result in found] == [name], found
    assert sentence in found[0].sentence
    assert found[0].remedy


def test_missing_secrets_and_keys_are_named() -> None:
    view = view_of(running("base"))
    view.secrets.update({"baton-cluster-key": None, "baton-api-keys": ["client"]})
    assert [result.sentence for result in problems(view)] == [
        "Secret baton-api-keys has no key control-plane, only client",
        "Secret baton-cluster-key does not exist",
    ]


def test_access_that_is_denied_fails_and_unknown_access_is_skipped() -> None:
    view = view_of(running("base"))
    view.access["baton-router", "watch"] = "no"
    assert [result.name for result in problems(view)] == ["kube.access"]
    view.access["baton-router", "watch"] = "user dev cannot impersonate"
    assert not problems(view)
    skipped = next(r for r in kubernetes.check_namespace(view) if r.name == "kube.access")
    assert skipped.status is CheckStatus.SKIP
    assert "cannot impersonate" in skipped.sentence


def test_gpus_are_counted() -> None:
    objects = running("overlays/gpu")
    assert "no node offers nvidia.com/gpu" in problems(view_of(objects, gpus=0))[0].sentence
    assert "all nodes together offer 1" in problems(view_of(objects, gpus=1))[0].sentence
    wanted = sum(w["spec"]["replicas"] for n, w in workloads(objects).items() if n != "router")
    assert not problems(view_of(objects, gpus=wanted)), "maxSurge 0: a rollout needs no further GPU"
    workloads(objects)["decode"]["spec"]["strategy"]["rollingUpdate"]["maxSurge"] = 1
    assert "a rollout would hang" in problems(view_of(objects, gpus=wanted))[0].sentence


def test_empty_namespace_is_a_failure() -> None:
    assert [result.name for result in problems(KubeView(NAMESPACE))] == ["kube.workloads"]


def answers_of(objects: list[Object]) -> dict[str, dict[str, Any]]:
    """Output of kubectl, keyed by its arguments."""
    view = view_of(objects)
    kinds = {
        kind: {"out": json.dumps({"items": view.of_kind(kind)})} for kind in (*kubernetes.KINDS,)
    }
    found = {f"get {kind} -o json": answer for kind, answer in kinds.items()}
    template = '{{range $key, $value := .data}}{{$key}}{{"\\n"}}{{end}}'
    for name, keys in view.secrets.items():
        found[f"get secret {name} -o go-template={template}"] = {"out": "\n".join(keys or [])}
    for verb in kubernetes.ROUTER_VERBS:
        found[f"auth can-i {verb} pods --as=system:serviceaccount:{NAMESPACE}:baton-router"] = {
            "out": "yes\n"
        }
    return found


def run_doctor(
    tmp_path: Path,
    answers: dict[str, dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> tuple[int, str]:
    stored, program = tmp_path / "answers.json", tmp_path / "kubectl"
    stored.write_text(json.dumps(answers))
    program.write_text(FAKE.format(python=sys.executable, answers=str(stored)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    code = main.main(["--namespace", NAMESPACE, f"--kubectl={program} --context=test"])
    return code, capsys.readouterr().out


def test_command_reads_a_namespace_through_kubectl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = answers_of(running("base"))
    code, shown = run_doctor(tmp_path, answers, capsys)
    assert code == 0, shown
    assert "service/router 2 of 2" in shown
    secret = next(words for words in answers if words.startswith("get secret baton-cluster-key"))
    del answers[secret]
    answers["get nodes -o json"] = {
        "out": "",
        "err": "Error from server (Forbidden): nodes is forbidden\n",
        "code": 1,
    }
    denied = next(words for words in answers if "can-i watch" in words)
    answers[denied] = {"out": "no\n", "code": 1}
    code, shown = run_doctor(tmp_path, answers, capsys)
    assert code == 2, shown
    assert "Secret baton-cluster-key does not exist" in shown
    assert "baton-router may not watch pods" in shown


def test_unreachable_api_server_is_one_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown = run_doctor(tmp_path, {}, capsys)
    assert code == 2
    assert shown.startswith(
        "fail  kube.api  namespace baton cannot be read: Error from server (NotFound)"
    )
