"""Scraping and autoscaling objects: they find the pods, the ports and the rules that they name."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.monitoring.generate import MONITORING
from deploy.tests.checks import allowed_connections
from deploy.tests.custom_resources import is_custom, validate
from deploy.tests.manifests import (
    DEPLOY,
    TARGETS,
    Object,
    main_container,
    named,
    of_kind,
    pod_labels,
    render,
    selects,
    workloads,
)

COMPONENTS = ("router", "prefill", "decode")
SCALERS = {"base+autoscale-hpa": "HorizontalPodAutoscaler", "base+autoscale-keda": "ScaledObject"}


def scrape_config() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    return config


@pytest.mark.parametrize(
    "target",
    [
        name
        for name in TARGETS
        if name in {"base+monitoring", "base+autoscale-keda", "overlays/inferencepool"}
    ],
)
def test_custom_resources_fit_the_strict_schema(target: str) -> None:
    found = [item for item in render(target) if is_custom(item)]
    assert found
    for item in found:
        validate(item)


def test_errors_in_custom_resources_are_found() -> None:
    monitor = named(render("base+monitoring"), "PodMonitor", "baton")
    monitor["spec"]["podMetricsEndpoints"][0]["intervall"] = "15s"
    with pytest.raises(jsonschema.ValidationError, match="intervall"):
        validate(monitor)


def test_all_roles_are_scraped_on_a_port_that_policies_open_to_prometheus() -> None:
    objects = render("base+monitoring")
    spec = named(objects, "PodMonitor", "baton")["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    connections = allowed_connections(objects)
    for role, workload in workloads(objects).items():
        assert selects(spec["selector"], pod_labels(workload)), role
        ports = {port["name"]: port["containerPort"] for port in main_container(workload)["ports"]}
        port = ports[endpoint["port"]]
        assert any((peer, role, port, port) in connections for peer in ("monitoring", "clients")), (
            role
        )
    labels = {rule["targetLabel"]: rule["sourceLabels"] for rule in endpoint["relabelings"]}
    assert labels["component"] == ["__meta_kubernetes_pod_label_app_kubernetes_io_component"]


def test_prometheus_scrapes_the_ports_of_the_table_with_the_labels_of_the_rules() -> None:
    ports = {
        row["to"]: row["port"]
        for row in yaml.safe_load((DEPLOY / "ports.yaml").read_text())
        if row["name"] == "http"
    }
    jobs = {job["job_name"]: job for job in scrape_config()["scrape_configs"]}
    assert {name for name in jobs if name != "baton-files"} == {
        f"baton-{role}" for role in COMPONENTS
    }
    for role in COMPONENTS:
        job = jobs[f"baton-{role}"]
        assert job["dns_sd_configs"] == [{"names": [role], "type": "A", "port": ports[role]}]
        namespace, component = job["relabel_configs"]
        assert namespace == {"target_label": "namespace", "replacement": "baton"}
        derived = re.fullmatch(component["regex"], job["job_name"])
        assert derived is not None
        assert (component["target_label"], derived[1]) == ("component", role)
    example = yaml.safe_load((MONITORING / "targets" / "hosts.yml.example").read_text())
    assert [group["labels"] for group in example] == [
        {"namespace": "baton", "component": role} for role in COMPONENTS
    ]
    assert [{target.rpartition(":")[2] for target in g["targets"]} for g in example] == [
        {str(ports[r])} for r in COMPONENTS
    ]


# ---- autoscaling ----


def scalers(target: str) -> dict[str, Object]:
    return {item["metadata"]["name"]: item for item in of_kind(render(target), SCALERS[target])}


def recorded() -> set[str]:
    groups = yaml.safe_load((MONITORING / "rules" / "recording.yml").read_text())["groups"]
    return {rule["record"] for group in groups for rule in group["rules"]}


@pytest.mark.parametrize("target", SCALERS)
def test_each_engine_role_has_one_autoscaler_which_owns_its_replicas(target: str) -> None:
    roles = workloads(render(target))
    assert set(scalers(target)) == {"prefill", "decode"}
    for role, scaler in scalers(target).items():
        assert scaler["spec"]["scaleTargetRef"] == {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "name": role,
        }
        assert "replicas" not in roles[role]["spec"], (
            f"applying the manifests again would undo the scaling of {role}"
        )
    assert roles["router"]["spec"]["replicas"] == 2


def test_both_autoscalers_scale_alike() -> None:
    for role, hpa in scalers("base+autoscale-hpa").items():
        keda = scalers("base+autoscale-keda")[role]
        assert (
            keda["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
            == hpa["spec"]["behavior"]
        )
        assert hpa["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] >= 600
        limits = (hpa["spec"]["minReplicas"], hpa["spec"]["maxReplicas"])
        assert limits == (keda["spec"]["minReplicaCount"], keda["spec"]["maxReplicaCount"])
        assert limits[0] == 1


def test_autoscalers_read_the_recording_rule_of_their_role() -> None:
    (adapted,) = yaml.safe_load((MONITORING / "prometheus-adapter.yml").read_text())[
        "externalRules"
    ]
    assert adapted["seriesQuery"] in recorded()
    assert adapted["seriesQuery"] in adapted["metricsQuery"]
    for role, hpa in scalers("base+autoscale-hpa").items():
        (metric,) = hpa["spec"]["metrics"]
        assert metric["external"]["metric"]["name"] == adapted["name"]["as"]
        assert metric["external"]["metric"]["selector"] == {"matchLabels": {"role": role}}
        assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
    for role, keda in scalers("base+autoscale-keda").items():
        (trigger,) = keda["spec"]["triggers"]
        assert trigger["metadata"]["threshold"] == "1"
        assert trigger["metadata"]["ignoreNullValues"] == "false"
        query = trigger["metadata"]["query"]
        found = re.fullmatch(r'max\(([\w:]+)\{namespace="baton",role="(\w+)"\}\)', query)
        assert found is not None, query
        assert (found[1] in recorded(), found[2]) == (True, role)
