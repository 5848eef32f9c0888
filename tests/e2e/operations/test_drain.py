"""Drain under streams: two routers, two prefill and two decode nodes; nothing breaks, and nothing goes astray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from tests.support.processes.cluster import Cluster, eventually, get, metric
from tests.support.processes.router import Router

pytestmark = pytest.mark.timeout(300)

FLEET = ("--prefill", "2", "--decode", "2", "--simulate", "h200-8b")
STREAMS_PER_ROUTER = 6
TOKENS = 150


def post(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30) as answer:
        body: dict[str, Any] = json.load(answer)
        return body


def drain_report(node: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(get(f"{node}/drain") or "{}")
    return report


def worker(router: str, node: str) -> dict[str, Any]:
    """A node as a router shows it."""
    listed = json.loads(get(f"{router}/workers") or "{}").get("workers", [])
    found: dict[str, Any] = next((w for w in listed if w["url"] == node), {})
    return found


class Load:
    """Streams that follow one another through some routers, until `end`."""

    def __init__(self, routers: list[str]) -> None:
        self.outcomes: Counter[str] = Counter()
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(url, i))
            for url in routers
            for i in range(STREAMS_PER_ROUTER)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, url: str, number: int) -> None:
        with openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            turn = 0
            while not self._is_over.is_set():
                turn += 1
                self.outcomes[self._stream(client, f"{number} {turn} " * 20)] += 1

    @staticmethod
    def _stream(client: openai.OpenAI, prompt: str) -> str:
        """`ok`, or what was wrong with a stream."""
        usage = reason = None
        try:
            events = client.completions.create(
                model="demo", prompt=prompt, max_tokens=TOKENS, stream=True, extra_body={"ignore_eos": True},
                stream_options={"include_usage": True},
            )  # fmt: skip
            for event in events:
                usage = event.usage or usage
                reason = next((c.finish_reason for c in event.choices if c.finish_reason), reason)
        except openai.APIError as err:
            return repr(err)
        tokens = usage.completion_tokens if usage is not None else None
        return (
            "ok"
            if (reason, tokens) == ("length", TOKENS)
            else f"ends with {reason} after {tokens} tokens"
        )

    def more(self, count: int) -> None:
        """Wait until so many more streams have ended."""
        wanted = sum(self.outcomes.values()) + count
        eventually(f"{count} more streams end", lambda: sum(self.outcomes.values()) >= wanted, 120)

    def end(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(120)


@contextmanager
def two_routers(cluster: Cluster) -> Iterator[list[str]]:
    """The cluster's router and a second one in front of the same nodes, which probes rarely."""
    nodes = cluster.state["nodes"]
    flags = ["--pd-disaggregation", "--health-check-interval-secs", "300"]
    for node in nodes:
        flags += [f"--{node['role']}", node["url"]]
        flags += [str(node["bootstrap_port"])] if node["role"] == "prefill" else []
    with Router.up(*flags) as second:
        for node in nodes:
            eventually(
                "both know the node",
                lambda url=node["url"]: worker(second, url).get("state") == "ready",
            )
        yield [cluster.url, second]


def refused_here(node: str) -> float:
    """Requests that the node has refused because it drains."""
    return metric(node, "baton_http_requests_total", code="draining")


def answered_here(node: str) -> float:
    return metric(node, "baton_http_requests_total")


@pytest.mark.parametrize("role", ["decode", pytest.param("prefill", marks=pytest.mark.slow)])
def test_drain_through_one_router_is_applied_by_the_other(role: str) -> None:
    with Cluster.up(*FLEET) as cluster, two_routers(cluster) as (first, second):
        node = cluster.node(role)["url"]
        load = Load([first, second])
        try:
            eventually("the node works", lambda: drain_report(node)["left"]["requests"] > 0)
            id = worker(first, node)["id"]
            reply = post(f"{first}/workers/{id}/drain")
            assert (reply["status"], reply["drained_by"]) == ("draining", "worker")
            assert worker(first, node)["state"] == "draining"
            eventually(
                "the second router knows", lambda: worker(second, node)["state"] == "draining"
            )
            eventually("nothing is left there", lambda: drain_report(node)["is_drained"])
            seen = answered_here(node), refused_here(node)
            load.more(4 * STREAMS_PER_ROUTER)
            assert (answered_here(node), refused_here(node)) == seen, (
                "no router sends anything there"
            )
            assert drain_report(node)["is_drained"]

            id = worker(second, node)["id"]
            post(f"{second}/workers/{id}/undrain")
            for router in (first, second):
                eventually("it is back", lambda url=router: worker(url, node)["state"] == "ready")
            eventually("it gets requests again", lambda: answered_here(node) > seen[0], 120)
            assert refused_here(node) == seen[1]
        finally:
            load.end()
        assert load.outcomes == {"ok": sum(load.outcomes.values())}
        cluster.assert_nothing_is_held()


def test_process_stopped_after_the_drain_command_loses_nothing() -> None:
    with Cluster.up(*FLEET) as cluster, two_routers(cluster) as routers:
        load = Load(routers)
        try:
            for role in ("decode", "prefill"):
                node = cluster.node(role)
                eventually(
                    "the node works",
                    lambda url=node["url"]: drain_report(url)["left"]["requests"] > 0,
                )
                command = [
                    sys.executable,
                    "-m",
                    "baton_ops.cli",
                    "drain",
                    node["url"],
                    "--wait",
                    "--timeout",
                    "120",
                ]
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=180, check=False
                )
                assert done.returncode == 0, done.stdout + done.stderr
                assert done.stdout.splitlines()[-1] == f"safe to stop: {node['url']}"
                os.kill(node["pid"], signal.SIGTERM)
                cluster.await_restart(role, restarts=node["restarts"] + 1)
                for router in routers:
                    eventually(
                        "it is back",
                        lambda r=router, n=node: worker(r, n["url"])["state"] == "ready",
                        120,
                    )
        finally:
            load.end()
        assert load.outcomes == {"ok": sum(load.outcomes.values())}
        resumed = [
            metric(router, "baton_router_failovers_total", outcome="resumed") for router in routers
        ]
        assert not any(count > 0 for count in resumed), "every stream ended where it began"
        cluster.assert_nothing_is_held()
