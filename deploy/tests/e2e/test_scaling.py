"""Autoscaling: the HorizontalPodAutoscalers of components/autoscale-hpa with Kubernetes' controller and a Prometheus.

Prometheus chooses and labels pods as the PodMonitor says and has the recording rules, with shorter times.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.monitoring.generate import MONITORING
from deploy.tests import prometheus
from deploy.tests.e2e import external_metrics
from deploy.tests.e2e.cluster import TestCluster, wait_until
from deploy.tests.e2e.streams import StreamLoad
from deploy.tests.manifests import named, of_kind, render

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]
ENGINES = ("prefill", "decode")
WINDOW = "15s"
"""In place of the rules' minutes."""
PODS = "pods.json"
CLIENTS = 6
PROMPT_WORDS = 800


def scrape_config(monitor: dict[str, Any]) -> dict[str, Any]:
    """Scrape configuration that prometheus-operator makes of our PodMonitors."""
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    keep = [
        {"source_labels": ["__meta_kubernetes_pod_container_port_name"], "regex": endpoint["port"]}
    ]
    for expression in monitor["spec"]["selector"]["matchExpressions"]:
        keep.append(
            {
                "source_labels": [meta_label(expression["key"])],
                "regex": "|".join(expression["values"]),
            }
        )
    relabel: list[dict[str, Any]] = [{"action": "keep", **rule} for rule in keep]
    relabel.append({"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"})
    for rule in endpoint["relabelings"]:
        relabel.append({"source_labels": rule["sourceLabels"], "target_label": rule["targetLabel"]})
    files = [{"files": [PODS]}]
    return {
        "job_name": "pods",
        "metrics_path": endpoint["path"],
        "file_sd_configs": files,
        "relabel_configs": relabel,
    }


def meta_label(key: str) -> str:
    return "__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", key)


def discovered(pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Targets with the labels of Prometheus' discovery of pods."""
    return [
        {
            "targets": [f"{pod['status']['podIP']}:{port['containerPort']}"],
            "labels": {
                "__meta_kubernetes_namespace": pod["metadata"]["namespace"],
                "__meta_kubernetes_pod_name": pod["metadata"]["name"],
                "__meta_kubernetes_pod_container_port_name": port["name"],
                **{meta_label(key): value for key, value in pod["metadata"]["labels"].items()},
            },
        }
        for pod in pods
        if pod["status"].get("phase") == "Running" and pod["status"].get("podIP")
        for container in pod["spec"]["containers"]
        for port in container.get("ports", [])
    ]


@contextlib.contextmanager
def discovery(cluster: TestCluster, path: Path) -> Iterator[None]:
    """Keep a file of the cluster's pods for Prometheus, whose Debian package cannot ask Kubernetes."""
    stopping = threading.Event()

    def write() -> None:
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(discovered(cluster.get("pods")["items"])))
        partial.rename(path)

    def follow() -> None:
        while not stopping.wait(1):
            write()

    write()
    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


@pytest.fixture(scope="module")
def metrics(
    demo: TestCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[prometheus.Server]:
    """A Prometheus that scrapes the pods each second, behind an API for external metrics."""
    folder = tmp_path_factory.mktemp("prometheus")
    rules = (MONITORING / "rules" / "recording.yml").read_text()
    rules = re.sub(r"\[\d+[mh]\]", f"[{WINDOW}]", re.sub(r"interval: \d+s", "interval: 1s", rules))
    (folder / "recording.yml").write_text(rules)
    monitor = named(render("base+monitoring"), "PodMonitor", "baton")
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["recording.yml"],
        "scrape_configs": [scrape_config(monitor)],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with (
        discovery(demo, folder / PODS),
        prometheus.serve(folder) as server,
        external_metrics.serve(demo, server, folder),
    ):
        yield server


@pytest.fixture
def autoscaled(demo: TestCluster, metrics: prometheus.Server) -> Iterator[TestCluster]:
    """The demo with the component's autoscalers, which may go to two nodes and do not wait before they go back."""
    scalers = of_kind(render("base+autoscale-hpa"), "HorizontalPodAutoscaler")
    for scaler in scalers:
        scaler["spec"]["maxReplicas"] = 2
        scaler["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] = 0
    for role in ENGINES:
        wait_until(lambda role=role: wanted(metrics, role) == [1], f"one {role} node is wanted")
    text = yaml.safe_dump_all(scalers)
    demo.kubectl("apply", "-f", "-", stdin=text)
    yield demo
    demo.kubectl("delete", "-f", "-", stdin=text)
    demo.kubectl(
        "-n", "baton", "scale", *(f"deployment/{role}" for role in ENGINES), "--replicas=1"
    )


def wanted(metrics: prometheus.Server, role: str) -> list[float]:
    return metrics.numbers(f'baton:wanted_replicas{{namespace="baton",role="{role}"}}')


def long_prompt(number: int) -> dict[str, object]:
    """A request that is nearly all prefill, and that no cache shortens: one token, which P computes."""
    rng = random.Random(number)
    text = " ".join(
        rng.choice(("page", "node", "token", "queue", "router", "cache"))
        for _ in range(PROMPT_WORDS)
    )
    messages = [{"role": "user", "content": f"{number} {text}"}]
    return {
        "model": "demo",
        "stream": True,
        "max_tokens": 1,
        "temperature": 0,
        "messages": messages,
    }


def replicas(cluster: TestCluster, role: str) -> tuple[int, int]:
    """Number of pods that the Deployment asks for, and of ready ones."""
    deployment = cluster.get("deployment", role)
    return deployment["spec"]["replicas"], deployment["status"].get("readyReplicas", 0)


def has_metric(cluster: TestCluster, role: str) -> bool:
    status = cluster.get("horizontalpodautoscaler", role)["status"]
    return any(
        c["type"] == "ScalingActive" and c["status"] == "True" for c in status.get("conditions", [])
    )


def rescales(cluster: TestCluster, role: str) -> list[int]:
    """Sizes that the autoscaler gave a role, in order of time."""
    selector = f"--field-selector=reason=SuccessfulRescale,involvedObject.name={role}"
    events = cluster.get("events", selector)["items"]
    events.sort(key=lambda event: int(event["metadata"]["resourceVersion"]))
    return [
        int(found[1])
        for event in events
        if (found := re.search(r"New size: (\d+)", event["message"]))
    ]


def test_prefill_follows_the_load_and_decode_stays(
    autoscaled: TestCluster, metrics: prometheus.Server
) -> None:
    for role in ENGINES:
        wait_until(
            lambda role=role: has_metric(autoscaled, role),
            f"the autoscaler of {role} has its metric",
        )
        assert replicas(autoscaled, role) == (1, 1)
    with StreamLoad(autoscaled, clients=CLIENTS, body=long_prompt) as heavy:
        wait_until(
            lambda: heavy.problems or replicas(autoscaled, "prefill") == (2, 2),
            "a second prefill node",
            300,
        )
        until = heavy.started + 2 * CLIENTS
        wait_until(lambda: heavy.problems or len(heavy.results) >= until, "more prompts")
        assert heavy.problems == [], (
            autoscaled.report()
        )  # at once, while the logs still end with the reason
    with StreamLoad(autoscaled, clients=1) as light:
        wait_until(lambda: replicas(autoscaled, "prefill") == (1, 1), "one prefill node", 300)
        wait_until(lambda: len(autoscaled.pods("prefill")) == 1, "the second one has ended", 300)
        until = light.started + 4
        wait_until(lambda: len(light.results) >= until, "more streams")
    assert heavy.problems + light.problems == [], autoscaled.report()
    assert {role: rescales(autoscaled, role) for role in ENGINES} == {
        "prefill": [2, 1],
        "decode": [],
    }, json.dumps(
        {name: metrics.query(name) for name in ("baton:pressure_ratio", "baton:wanted_replicas")}
    )
    print(f"{len(heavy.results)} long prompts, {len(light.results)} streams, none broken")
