"""A decode node dies before its first token, or every prefill node is gone: the client waits, or notices nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.support.processes.cluster import Cluster, count, eventually, metric, settled

pytestmark = pytest.mark.timeout(240)

LONG = "page " * 600
"""In chunks of 16 tokens its prefill takes long enough to be interrupted."""


def body(prompt: str) -> dict[str, Any]:
    return {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
    }


class Asking(threading.Thread):
    """One completion in flight."""

    def __init__(self, cluster: Cluster, prompt: str) -> None:
        super().__init__(daemon=True)
        self._cluster, self._prompt = cluster, prompt
        self.answer: tuple[int, dict[str, Any]] | None = None
        self.start()

    def run(self) -> None:
        self.answer = self._cluster.post("/v1/completions", body(self._prompt))


def test_killed_decode_node_costs_neither_the_answer_nor_a_second_prefill(
    two_decode_nodes: Cluster,
) -> None:
    cluster = two_decode_nodes
    prefill = cluster.node("prefill")["url"]

    def computed() -> float:
        return metric(prefill, "baton_prompt_tokens_computed_total")

    eventually("the prefill node reports", lambda: computed() >= 0)
    before = settled(computed)
    urls = [cluster.node("decode", i)["url"] for i in (0, 1)]
    restarts = [cluster.node("decode", i)["restarts"] for i in (0, 1)]
    opened = count(cluster.url, "baton_router_decode_retries_total", result="opened")
    asking = Asking(cluster, LONG)
    victim = eventually("it is sent", lambda: [i for i in (0, 1) if cluster.loads()[urls[i]]])[0]
    cluster.kill("decode", victim)
    asking.join(90)
    assert asking.answer is not None
    status, got = asking.answer
    assert status == 200, got
    now_opened = count(cluster.url, "baton_router_decode_retries_total", result="opened")
    assert now_opened - opened == 1
    cluster.await_restart("decode", victim, restarts[victim] + 1)
    cluster.assert_nothing_is_held()
    tokens = got["usage"]["prompt_tokens"]
    # What await_restart asks is some tokens more.
    assert tokens <= computed() - before < 1.5 * tokens
    assert (
        cluster.post("/v1/completions", body(LONG))[1]["choices"][0]["text"]
        == got["choices"][0]["text"]
    )


def test_decode_node_prefills_what_is_short_and_everything_when_no_prefill_node_is_left() -> None:
    with Cluster.up("--router-args=--local-prefill-max-tokens 8") as cluster:

        def local(why: str) -> float:
            return metric(cluster.url, "baton_router_local_prefills_total", why=why)

        prompt = "wherever a node computes it, the answer to it is the same; this is one of more than eight tokens"
        _, together = cluster.post("/v1/completions", body(prompt))
        assert local("short") != 1
        cluster.complete("Hi", max_tokens=8)
        assert local("short") == 1
        cluster.kill("prefill")
        answers = []

        def alone() -> bool:
            """Until the router has noticed, the pair is asked, and fails or has come back."""
            answers.append(cluster.post("/v1/completions", body(prompt)))
            return local("no_prefill") >= 1

        eventually("the decode node computes it", alone)
        status, got = answers[-1]
        assert status == 200
        assert got["choices"][0]["text"] == together["choices"][0]["text"]
        cluster.await_restart("prefill")
        cluster.assert_nothing_is_held()
