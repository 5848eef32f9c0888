"""Classes and tenants through router, prefill and decode node.

The engines simulate their devices: what is asked is their schedulers', and in the front.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.processes.cluster import Cluster, count, eventually, metric, settled

pytestmark = pytest.mark.timeout(240)
TENANTS = {
    "tenants": {
        "metered": {"tokens_per_minute": 30},
        "closed": {"max_queued": 0},
        "one": {"max_running": 1},
    }
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    file = tmp_path_factory.mktemp("tenants") / "tenants.json"
    file.write_text(json.dumps(TENANTS))
    flags = ("--simulate", "reference,speed=10", "--tenant-config", str(file))
    flags += ("--priority-classes", "interactive:8,batch:1")
    with Cluster.up(*flags, "--max-running-requests", "2", "--kv-lease-secs", "2") as cluster:
        yield cluster


def ask(cluster: Cluster, tenant: str, **body: Any) -> tuple[int, Any, dict[str, str]]:
    """Status, JSON and headers of a completion; the tenant goes in the header."""
    request = urllib.request.Request(
        f"{cluster.url}/v1/completions",
        json.dumps(
            {"model": "demo", "prompt": "pages", "max_tokens": 4, "temperature": 0} | body
        ).encode(),
        {"content-type": "application/json", "x-tenant-id": tenant},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.loads(response.read()), dict(response.headers)
    except urllib.error.HTTPError as err:
        with err:
            return err.code, json.loads(err.read()), dict(err.headers)


def test_header_reaches_both_nodes_and_tokens_are_counted_there(cluster: Cluster) -> None:
    status, answer, _ = ask(cluster, "acme", ignore_eos=True, max_tokens=6)
    assert status == 200
    usage = answer["usage"]
    cluster.assert_nothing_is_held()

    def tokens(role: str, kind: str) -> float:
        return metric(
            cluster.node(role)["url"], "baton_tenant_tokens_total", tenant="acme", kind=kind
        )

    computed = usage["prompt_tokens"] - usage.get("prompt_tokens_details", {}).get(
        "cached_tokens", 0
    )

    def counted() -> list[float]:
        return [
            tokens("prefill", "prompt"),
            tokens("prefill", "generated"),
            tokens("decode", "generated"),
        ]

    eventually("both count its tokens", lambda: counted() == [computed, 1, 6], 20)


def test_refusals_come_through_the_router_with_their_codes(cluster: Cluster) -> None:
    status, answer, _ = ask(cluster, "acme", priority_class="gold")
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (
        400,
        "invalid_value",
        "priority_class",
    )
    status, answer, _ = ask(cluster, "closed")
    assert (status, answer["error"]["code"]) == (429, "tenant_queue_full")
    assert "tenant 'closed'" in answer["error"]["message"]
    while (result := ask(cluster, "metered", max_tokens=20, ignore_eos=True))[0] == 200:
        pass
    status, answer, headers = result
    assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "tenant 'metered'" in answer["error"]["message"]
    assert int({name.lower(): value for name, value in headers.items()}["retry-after"]) >= 1
    assert ask(cluster, "acme")[0] == 200
    cluster.assert_nothing_is_held()


def test_class_of_a_request_reaches_both_nodes(cluster: Cluster) -> None:
    """Which class goes first is decided by the scheduler alone: tests/sim/queue/test_fairness.py."""

    def tokens(role: str, name: str, kind: str) -> float:
        return metric(
            cluster.node(role)["url"], "baton_class_tokens_total", **{"class": name, "kind": kind}
        )

    def counted() -> list[float]:
        return [tokens("decode", name, "generated") for name in ("batch", "interactive")]

    eventually("both classes are reported", lambda: min(counted()) >= 0)
    before = settled(counted)
    prompts = tokens("prefill", "batch", "prompt")
    assert (
        ask(
            cluster,
            "crowd",
            ignore_eos=True,
            priority_class="batch",
            prompt="class one",
            max_tokens=7,
        )[0]
        == 200
    )
    assert (
        ask(
            cluster,
            "crowd",
            ignore_eos=True,
            service_tier="priority",
            prompt="at once",
            max_tokens=5,
        )[0]
        == 200
    )
    eventually("tokens by class", lambda: counted() == [before[0] + 7, before[1] + 5], 30)
    eventually("prompt tokens too", lambda: tokens("prefill", "batch", "prompt") > prompts, 30)
    cluster.assert_nothing_is_held()


def test_tenant_at_its_limit_runs_one_by_one_beside_others(cluster: Cluster) -> None:
    threads = [
        threading.Thread(
            target=ask,
            args=(cluster, "one"),
            kwargs={"prompt": f"turn {i}", "max_tokens": 300, "ignore_eos": True},
        )
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    assert ask(cluster, "free")[0] == 200
    for thread in threads:
        thread.join()
    decode = cluster.node("decode")["url"]

    def throttled(role: str) -> float:
        return count(cluster.node(role)["url"], "baton_tenant_throttled_total", reason="running")

    eventually("some had to wait", lambda: max(throttled("prefill"), throttled("decode")) >= 1)
    cluster.assert_nothing_is_held()
    eventually("none runs", lambda: metric(decode, "baton_requests", state="running") == 0)
