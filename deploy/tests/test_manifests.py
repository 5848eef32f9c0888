"""Every kustomize directory renders, fits the schemas of three Kubernetes versions and passes all checks."""

from __future__ import annotations

import functools
from collections.abc import Callable

import kubernetes_validate
import pytest
from kubernetes_validate import utils as schema_files

from baton.server.http.http_utils import MAX_BODY_BYTES
from deploy.tests.checks import CHECKS
from deploy.tests.custom_resources import is_custom
from deploy.tests.manifests import (
    TARGETS,
    Object,
    main_container,
    named,
    pod_labels,
    pod_spec,
    render,
    selects,
    settings,
    sidecar_engines,
    workloads,
)

VERSIONS = ("1.30", "1.33", "1.37")
"""The first has preStop.sleep switched on; the last is that of the test cluster."""
VERSION_CASES = [
    VERSIONS[0],
    pytest.param(VERSIONS[1], marks=pytest.mark.slow),
    VERSIONS[2],
]

# The package reads 1.4 MB of definitions again for each object.
schema_files.schema_contents = functools.cache(schema_files.schema_contents)

BASE_KINDS = {
    "ConfigMap", "Deployment", "Namespace", "NetworkPolicy", "PodDisruptionBudget", "Role", "RoleBinding", "Service",
    "ServiceAccount",
}  # fmt: skip


@pytest.mark.parametrize("version", VERSION_CASES)
@pytest.mark.parametrize("target", TARGETS)
def test_objects_fit_the_strict_schema(target: str, version: str) -> None:
    for item in render(target):
        if not is_custom(item):  # test_monitoring.py
            kubernetes_validate.validate(item, version, strict=True)


def test_schema_errors_are_found() -> None:
    objects = render("base")
    pod_spec(workloads(objects)["router"])["terminationGracePeriodSecond"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(workloads(objects)["router"], VERSIONS[-1], strict=True)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("target", TARGETS)
def test_manifests_pass(target: str, check: str) -> None:
    assert list(CHECKS[check](render(target))) == []


def test_base_has_neither_secrets_nor_custom_resources() -> None:
    assert {item["kind"] for item in render("base")} == BASE_KINDS


@pytest.mark.parametrize("target", TARGETS)
def test_all_objects_are_in_one_namespace(target: str) -> None:
    elsewhere = [
        i
        for i in render(target)
        if i["kind"] != "Namespace" and i["metadata"].get("namespace") != "baton"
    ]
    assert elsewhere == []


def test_topology_spreads_roles_over_zones_and_keeps_pairs_together() -> None:
    roles = workloads(render("base+topology"))
    for workload in roles.values():
        keys = [spread["topologyKey"] for spread in pod_spec(workload)["topologySpreadConstraints"]]
        assert keys == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    terms = pod_spec(roles["decode"])["affinity"]["podAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    (term,) = (term["podAffinityTerm"] for term in terms)
    assert term["topologyKey"] == "topology.kubernetes.io/zone"
    near = [
        role
        for role, workload in roles.items()
        if selects(term["labelSelector"], pod_labels(workload))
    ]
    assert near == ["prefill"]


def test_inference_pool_has_all_engines_by_their_port_and_roles() -> None:
    objects = render("overlays/inferencepool")
    roles = workloads(objects)
    assert roles.keys() == {"prefill", "decode"}
    pool = named(objects, "InferencePool", "baton")["spec"]
    for role, workload in roles.items():
        assert selects(pool["selector"], pod_labels(workload))
        assert pod_labels(workload)["llm-d.ai/role"] == role
        ports = {port["name"]: port["containerPort"] for port in main_container(workload)["ports"]}
        assert pool["targetPorts"] == [{"number": ports["http"]}]
    (rule,) = named(objects, "HTTPRoute", "baton")["spec"]["rules"]
    assert [(ref["kind"], ref["name"]) for ref in rule["backendRefs"]] == [
        ("InferencePool", "baton")
    ]


def test_router_reads_no_longer_bodies_than_engines() -> None:
    assert settings(render("base"))["BATON_ROUTER_FLAG_MAX_PAYLOAD_SIZE"] == str(MAX_BODY_BYTES)


def test_rdma_gives_engines_a_device() -> None:
    limits = {
        role: main_container(w)["resources"]["limits"]
        for role, w in workloads(render("base+rdma")).items()
    }
    assert {role for role, limit in limits.items() if "rdma/hca_shared" in limit} == {
        "prefill",
        "decode",
    }


# ---- mutations: each defect is found by exactly the check that is there for it ----


def _service_selector(objects: list[Object]) -> None:
    named(objects, "Service", "router")["spec"]["selector"]["app.kubernetes.io/component"] = "routr"


def _readiness_on_livez(objects: list[Object]) -> None:
    main_container(workloads(objects)["decode"])["readinessProbe"]["httpGet"]["path"] = "/livez"


def _no_pre_stop_and_no_grace(objects: list[Object]) -> None:
    workload = workloads(objects)["prefill"]
    del main_container(workload)["lifecycle"]
    pod_spec(workload)["terminationGracePeriodSeconds"] = 1


def _bodies_beyond_the_memory(objects: list[Object]) -> None:
    config = next(i for i in objects if i["metadata"]["name"].startswith("baton-config"))
    del config["data"][
        "BATON_ROUTER_FLAG_MAX_TOTAL_BODY_BYTES"
    ]  # the default is larger than the pod


def _surge_on_gpus(objects: list[Object]) -> None:
    main_container(workloads(objects)["decode"])["resources"]["limits"]["nvidia.com/gpu"] = 8


def _port_missing_in_policy(objects: list[Object]) -> None:
    del named(objects, "NetworkPolicy", "prefill")["spec"]["ingress"][0]["ports"][0]


def _policy_too_wide(objects: list[Object]) -> None:
    named(objects, "NetworkPolicy", "engine")["spec"]["ingress"].append(
        {"ports": [{"port": 30000}]}
    )


def _capability_kept(objects: list[Object]) -> None:
    main_container(workloads(objects)["router"])["securityContext"]["capabilities"] = {
        "drop": ["NET_RAW"]
    }


def _verb_removed(objects: list[Object]) -> None:
    named(objects, "Role", "baton-router")["rules"][0]["verbs"].remove("watch")


def _unknown_flag(objects: list[Object]) -> None:
    main_container(workloads(objects)["router"])["args"].append("--pd-disagregation")


def _bad_value(objects: list[Object]) -> None:
    main_container(workloads(objects)["prefill"])["args"].append("--page-size=7x")


def _wrong_engine_port(objects: list[Object]) -> None:
    args = main_container(workloads(objects)["decode"])["args"]
    args[args.index("--port=30000")] = "--port=30001"


def _discovery_of_both_roles(objects: list[Object]) -> None:
    args = main_container(workloads(objects)["router"])["args"]
    index = next(i for i, arg in enumerate(args) if arg.startswith("--decode-selector"))
    args[index] = "--decode-selector=app.kubernetes.io/name=baton"


def _secret_key_misspelt(objects: list[Object]) -> None:
    env = main_container(workloads(objects)["decode"])["env"]
    next(v for v in env if v["name"] == "BATON_CLUSTER_KEY")["valueFrom"]["secretKeyRef"]["key"] = (
        "cluster"
    )


def _latest_tag(objects: list[Object]) -> None:
    main_container(workloads(objects)["decode"])["image"] = "baton-engine:latest"


MUTATIONS: dict[Callable[[list[Object]], None], str] = {
    _service_selector: "selectors",
    _readiness_on_livez: "probes",
    _no_pre_stop_and_no_grace: "grace",
    _bodies_beyond_the_memory: "router_memory",
    _surge_on_gpus: "rollout",
    _port_missing_in_policy: "network_policy",
    _policy_too_wide: "network_policy",
    _capability_kept: "hardening",
    _verb_removed: "access",
    _unknown_flag: "flags",
    _bad_value: "flags",
    _wrong_engine_port: "ports",
    _discovery_of_both_roles: "discovery",
    _secret_key_misspelt: "references",
    _latest_tag: "images",
}


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__.strip("_"))
def test_defect_fails_its_own_check(mutate: Callable[[list[Object]], None]) -> None:
    objects = render("base")
    mutate(objects)
    failed = [name for name, check in CHECKS.items() if list(check(objects))]
    assert failed == [MUTATIONS[mutate]]


def _no_sidecar(objects: list[Object]) -> None:
    del sidecar_engines(objects)["prefill"]["restartPolicy"]


def _sidecar_elsewhere(objects: list[Object]) -> None:
    args = main_container(workloads(objects)["router"])["args"]
    args[args.index("--decode=http://$(POD_IP):30001")] = "--decode=http://$(POD_IP):30002"


def _grace_without_sidecars(objects: list[Object]) -> None:
    for name in ("prefill", "decode"):
        args = sidecar_engines(objects)[name]["args"]
        args[args.index("--drain-timeout-secs=$(ENGINE_DRAIN_SECONDS)")] = "--drain-timeout-secs=60"


def _sidecar_in_the_wrong_mode(objects: list[Object]) -> None:
    sidecar_engines(objects)["decode"]["args"].append("--disaggregation-mode=prefill")


ONE_POD_MUTATIONS: dict[Callable[[list[Object]], None], str] = {
    _no_sidecar: "discovery",
    _sidecar_elsewhere: "discovery",
    _grace_without_sidecars: "grace",
    _sidecar_in_the_wrong_mode: "flags",
}


@pytest.mark.parametrize("mutate", ONE_POD_MUTATIONS, ids=lambda mutate: mutate.__name__.strip("_"))
def test_defect_of_one_pod_fails_its_own_check(mutate: Callable[[list[Object]], None]) -> None:
    objects = render("overlays/one-pod")
    mutate(objects)
    failed = [name for name, check in CHECKS.items() if list(check(objects))]
    assert failed == [ONE_POD_MUTATIONS[mutate]]
