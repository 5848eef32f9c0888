"""Every query of the dashboards, and every recording rule, has data from a Prometheus that scraped a fleet."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator

import openai
import pytest
import yaml

from deploy.monitoring.generate import MONITORING, dashboard_source, queries
from deploy.tests import prometheus
from deploy.tests.test_dashboards import as_promql
from tests.support.processes.cluster import Cluster, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DATA_SECS = 300.0
UNLOADED = {"itl"}
"""Signals of baton:pressure_ratio that need more running requests than the test sends."""


@pytest.fixture(scope="module")
def fleet() -> Iterator[Cluster]:
    prometheus.require("prometheus")
    with Cluster.up("--prefill", "2", "--decode", "2", "--transport", "tcp") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def scraped(
    fleet: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[prometheus.Server]:
    """The Prometheus of deploy/monitoring, looking each second, with the fleet in its file of targets."""
    folder = tmp_path_factory.mktemp("prometheus")
    faster = re.compile(r"(interval: )\d+s")
    (folder / "rules").mkdir()
    for name in ("prometheus.yml", "rules/recording.yml", "rules/alerts.yml"):
        (folder / name).write_text(faster.sub(r"\g<1>1s", (MONITORING / name).read_text()))
    shutil.copytree(MONITORING / "targets", folder / "targets")
    members = [
        ("router", fleet.url),
        *((node["role"], node["url"]) for node in fleet.state["nodes"]),
    ]
    targets = [
        {
            "targets": [url.removeprefix("http://")],
            "labels": {"namespace": "baton", "component": role},
        }
        for role, url in members
    ]
    (folder / "targets" / "hosts.yml").write_text(yaml.safe_dump(targets))
    with prometheus.serve(folder) as server:
        eventually("all targets are up", lambda: len(server.query("up == 1")) == len(members))
        yield server


@pytest.fixture(scope="module")
def traffic(fleet: Cluster) -> Iterator[None]:
    """Requests until the end of the tests: streamed and whole, with a shared beginning, longer than a block."""
    enough = threading.Event()
    failures: list[Exception] = []

    def send() -> None:
        number = 0
        with fleet.client() as client:
            while not enough.is_set():
                number += 1
                prompt = "Baton is a router. " * 40 + str(number)
                try:
                    answer = client.completions.create(
                        model="demo",
                        prompt=prompt,
                        max_tokens=12,
                        temperature=0,
                        stream=number % 2 == 0,
                    )
                    if isinstance(answer, openai.Stream):
                        for _ in answer:
                            pass
                except openai.OpenAIError as err:
                    failures.append(err)
                    return
                enough.wait(0.2)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    yield
    enough.set()
    sender.join(60)
    assert failures == []


def test_every_dashboard_query_has_data(scraped: prometheus.Server, traffic: None) -> None:
    wanted = {
        f"{board['name']}: {panel['title']}: {legend}": as_promql(text)
        for board in dashboard_source()["dashboards"]
        for panel in board["panels"]
        if "when" not in panel
        for legend, text in queries(panel).items()
    }
    assert len(wanted) > 100

    def have_data() -> bool:
        for where in [where for where, text in wanted.items() if scraped.numbers(text)]:
            del wanted[where]
        return not wanted

    try:
        eventually("all have data", have_data, DATA_SECS)
    except AssertionError:
        pytest.fail(f"no data in {DATA_SECS:g} s: {wanted}")


def test_every_recording_rule_has_data(
    scraped: prometheus.Server, traffic: None, fleet: Cluster
) -> None:
    groups = yaml.safe_load((MONITORING / "rules" / "recording.yml").read_text())["groups"]
    wanted = {
        rule["record"]
        + "".join(
            f'{{role="{labels["role"]}",signal="{labels["signal"]}"}}'
            for labels in [rule["labels"]]
        )
        if "labels" in rule
        else rule["record"]
        for group in groups
        for rule in group["rules"]
        if rule.get("labels", {}).get("signal") not in UNLOADED
    }
    for name in sorted(wanted):
        eventually(f"{name} has data", lambda name=name: scraped.numbers(name), DATA_SECS)
    for role in ("prefill", "decode"):
        assert scraped.numbers(f'baton:ready_replicas{{namespace="baton",role="{role}"}}') == [2]
        assert scraped.numbers(f'baton:wanted_replicas{{namespace="baton",role="{role}"}}')[0] in (
            1,
            2,
            3,
            4,
        )


def test_no_alert_is_on_its_way_in_a_healthy_fleet(
    scraped: prometheus.Server, traffic: None
) -> None:
    eventually(
        "the rules of budgets have data",
        lambda: scraped.numbers("baton:request_errors:ratio_rate5m"),
        DATA_SECS,
    )
    latencies = {
        "TTFTBurn",
        "ITLBurn",
        "TransferSlow",
    }  # how fast the machine is, is not the matter here
    active = {sample["metric"]["alertname"] for sample in scraped.query("ALERTS")}
    assert active - latencies == set()
