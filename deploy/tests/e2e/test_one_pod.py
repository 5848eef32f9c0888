"""Overlay one-pod on a real Kubernetes: engines as sidecar containers of the router, pages by shared memory."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from deploy.tests.e2e.cluster import TestCluster, with_changes
from deploy.tests.e2e.streams import ask
from deploy.tests.manifests import named, pod_spec, render_text, workloads

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]
NAMESPACE = "one-pod"


def fit_beside_the_demo(objects: list[dict[str, Any]]) -> None:
    """Move the objects into a namespace of their own, one small pod; add the Secrets that operators make."""
    named(objects, "Namespace", "baton")["metadata"]["name"] = NAMESPACE
    deployment = workloads(objects)["router"]
    deployment["spec"]["replicas"] = 1
    for container in (*pod_spec(deployment)["initContainers"], *pod_spec(deployment)["containers"]):
        container["resources"]["requests"] = {"cpu": "100m", "memory": "128Mi"}
        if container["command"] == ["baton"]:
            container["args"] += ["--cpu-threads=1", "--kv-pool-mib=64"]
    keys = {
        "baton-cluster-key": {"key": "x" * 32},
        "baton-api-keys": {"client": "demo", "control-plane": "a:b:admin:c"},
    }
    for name, data in keys.items():
        objects.append(
            {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data}
        )
    for item in objects:
        if item["kind"] != "Namespace":
            item["metadata"]["namespace"] = NAMESPACE


@pytest.fixture(scope="module")
def address(demo: TestCluster) -> str:
    text = with_changes(render_text("overlays/one-pod"), fit_beside_the_demo)
    demo.kubectl(
        "apply", "--server-side", "--validate=strict", "--warnings-as-errors", "-f", "-", stdin=text
    )
    wait = ("wait", "--for=condition=Available", "deployment/router", "--timeout=300s")
    demo.kubectl("-n", NAMESPACE, *wait)
    (pod,) = json.loads(demo.kubectl("-n", NAMESPACE, "get", "pods", "-o", "json"))["items"]
    return str(pod["status"]["podIP"])


def test_answer_is_that_of_separate_pods(demo: TestCluster, address: str) -> None:
    answer = ask(demo, 0, f"http://{address}:8000")
    assert not answer.problem, answer.problem + demo.report()
    assert answer.text == ask(demo, 0).text


def test_pages_travel_by_shared_memory(demo: TestCluster, address: str) -> None:
    assert not ask(demo, 1, f"http://{address}:8000").problem
    metrics = httpx.get(f"http://{address}:30001/metrics", timeout=30).text
    pulls = dict(
        re.findall(r'^baton_kv_pulls_total\{.*transport="(\w+)".*\} (\S+)$', metrics, re.MULTILINE)
    )
    assert float(pulls["shm"]) >= 1, pulls
    assert {name for name, count in pulls.items() if float(count) and name != "shm"} == set()


def test_pod_ends_in_order_before_it_is_killed(demo: TestCluster, address: str) -> None:
    """The kubelet would take the whole grace period if a container did not end by itself."""
    demo.kubectl("-n", NAMESPACE, "rollout", "restart", "deployment/router")
    demo.kubectl("-n", NAMESPACE, "rollout", "status", "deployment/router", "--timeout=300s")
    demo.kubectl(
        "-n",
        NAMESPACE,
        "wait",
        "--for=delete",
        "pod",
        f"--field-selector=status.podIP={address}",
        "--timeout=200s",
    )
    demo.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
