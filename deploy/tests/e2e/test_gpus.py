"""Engines on nodes whose GPUs are all in use: the test's nodes claim eight each, and no engine uses one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from deploy.tests.e2e.cluster import NODES, TestCluster, wait_until
from deploy.tests.manifests import main_container, render, workloads

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]
GPUS = "8"
NAME = "on-gpus"


def deployment() -> dict[str, Any]:
    """A demo engine per node that takes all GPUs there, with the rollout strategy of the base; not in the fleet."""
    made: dict[str, Any] = workloads(render("overlays/cpu-demo"))["decode"]
    made["metadata"]["name"] = NAME
    template = made["spec"]["template"]
    for labels in (made["spec"]["selector"]["matchLabels"], template["metadata"]["labels"]):
        labels["app.kubernetes.io/component"] = NAME
    main_container(made)["resources"]["limits"]["nvidia.com/gpu"] = GPUS
    made["spec"] |= {"replicas": len(NODES), "minReadySeconds": 0}
    return made


@pytest.fixture
def full(demo: TestCluster) -> Iterator[TestCluster]:
    demo.kubectl("apply", "-f", "-", stdin=json.dumps(deployment()))
    demo.kubectl("-n", "baton", "rollout", "status", f"deployment/{NAME}", "--timeout=300s")
    yield demo
    demo.kubectl("-n", "baton", "delete", "deployment", NAME)
    wait_until(lambda: not demo.pods(NAME), "pods on GPUs are gone", 400)


def unschedulable(cluster: TestCluster) -> list[str]:
    """Messages of the scheduler about pods that it finds no node for."""
    conditions = [c for pod in cluster.pods(NAME) for c in pod["status"].get("conditions", [])]
    return [c["message"] for c in conditions if c.get("reason") == "Unschedulable"]


def test_rollout_on_full_gpus_waits_with_a_surge_and_ends_with_the_overlays_strategy(
    full: TestCluster,
) -> None:
    full.kubectl("-n", "baton", "rollout", "restart", f"deployment/{NAME}")
    wait_until(lambda: unschedulable(full), "a pod that no node has GPUs for")
    assert "Insufficient nvidia.com/gpu" in unschedulable(full)[0]
    assert full.get("deployment", NAME)["status"]["readyReplicas"] == len(NODES)
    strategy = workloads(render("overlays/gpu"))["decode"]["spec"]["strategy"]
    full.kubectl(
        "-n",
        "baton",
        "patch",
        "deployment",
        NAME,
        "-p",
        json.dumps({"spec": {"strategy": strategy}}),
    )
    full.kubectl("-n", "baton", "rollout", "status", f"deployment/{NAME}", "--timeout=300s")
    assert unschedulable(full) == []
