"""A node is killed under load: every request gets an answer or its error, nothing stays held, service returns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from tests.support.processes.cluster import Cluster, eventually, metric, metrics

pytestmark = pytest.mark.timeout(240)
IN_FLIGHT = 12


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Small chunks, so that prefill takes a while and a kill finds requests in every stage."""
    with Cluster.up("--chunked-prefill-size", "16", "--kv-lease-secs", "5") as cluster:
        yield cluster


@dataclass
class Stream:
    """One client's view of its stream."""

    status: int = 0
    text: str = ""
    finishes: list[str] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    is_done: bool = False

    def check(self) -> None:
        """Exactly one end: a finish reason or a typed error (DESIGN §4)."""
        assert len(self.finishes) + len(self.errors) == 1, self
        for error in self.errors:
            assert set(error) == {"message", "type", "param", "code"}, error
            assert isinstance(error["code"], str), error
            assert error["code"] != "internal_error", error
        if self.status == 200:
            assert self.is_done, self
        else:
            assert self.status in (502, 503, 504), self


async def stream(
    session: aiohttp.ClientSession, prompt: str, max_tokens: int, started: asyncio.Event
) -> Stream:
    seen = Stream()
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    async with session.post("/v1/completions", json={**body, "stream": True}) as response:
        seen.status = response.status
        if response.status != 200:
            seen.errors.append(json.loads(await response.read())["error"])
            return seen
        async for raw in response.content:
            line = raw.decode().strip()
            if not line.startswith("data: "):
                continue
            started.set()
            if line == "data: [DONE]":
                seen.is_done = True
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                seen.errors.append(event["error"])
            for choice in event.get("choices", ()):
                seen.text += choice["text"]
                if choice["finish_reason"]:
                    seen.finishes.append(choice["finish_reason"])
    return seen


def kill_under_load(
    cluster: Cluster, role: str, prompt_words: int, max_tokens: int
) -> list[Stream]:
    """Start streams, kill `role` when the first token has come, return what every client saw."""

    async def work() -> list[Stream]:
        started = asyncio.Event()
        timeout = aiohttp.ClientTimeout(total=90)
        async with aiohttp.ClientSession(cluster.url, timeout=timeout) as session:
            prompts = [f"{i} " + "page " * prompt_words for i in range(IN_FLIGHT)]
            tasks = [
                asyncio.ensure_future(stream(session, prompt, max_tokens, started))
                for prompt in prompts
            ]
            await asyncio.wait_for(started.wait(), 60)
            cluster.kill(role)
            return await asyncio.gather(*tasks)

    return asyncio.run(work())


def killed_node_is_survived(
    cluster: Cluster, role: str, prompt_words: int, max_tokens: int
) -> list[Stream]:
    restarts = cluster.node(role)["restarts"]
    before = cluster.complete("the answer does not change", max_tokens=16)
    streams = kill_under_load(cluster, role, prompt_words, max_tokens)
    for seen in streams:
        seen.check()
    cluster.await_restart(role, restarts=restarts + 1)
    cluster.assert_nothing_is_held()
    assert cluster.complete("the answer does not change", max_tokens=16) == before
    return streams


def resumed(cluster: Cluster) -> float:
    return sum(s.value for s in metrics(cluster.url) if s.name == "baton_router_failovers_total")


@pytest.mark.slow
def test_killed_decode_node(cluster: Cluster) -> None:
    """Streams of a killed node wait for it to come back and are resumed.

    In the fast suite one stream does: the last test of test_failover.py.
    """
    before = resumed(cluster)
    streams = killed_node_is_survived(cluster, "decode", prompt_words=20, max_tokens=400)
    assert not any(seen.errors for seen in streams)
    assert resumed(cluster) > before, "nothing was in flight when the node was killed"


def retries(cluster: Cluster) -> float:
    return sum(
        sample.value
        for sample in metrics(cluster.url)
        if sample.name == "baton_router_retries_total"
    )


def test_killed_prefill_node(cluster: Cluster) -> None:
    """Long prompts, short answers: most requests are still waiting for their prompt's KV. D computes them itself."""
    before = retries(cluster)
    streams = killed_node_is_survived(cluster, "prefill", prompt_words=600, max_tokens=8)
    was_in_flight = retries(cluster) > before or any(seen.errors for seen in streams)
    assert was_in_flight, "nothing was in flight when the node was killed"


@pytest.mark.slow
def test_killed_prefill_node_over_gloo(gloo_pair: Cluster) -> None:
    """The dead node's sends are posted, and only D is left to abort them.

    In the fast suite transfer nodes of one process lose each other: tests/parity/test_staged.py.
    """
    killed_node_is_survived(gloo_pair, "prefill", prompt_words=600, max_tokens=8)
    decode = gloo_pair.node("decode")["url"]
    eventually(
        "no communicator is left of the dead node",
        lambda: metric(decode, "baton_kv_communicators", state="aborting") == 0,
    )
    assert metric(decode, "baton_kv_communicators", state="abandoned") == 0


def test_killed_prefill_node_does_not_matter_to_running_answers(cluster: Cluster) -> None:
    """D owns a full copy once it has committed: a stream that runs ends as if nothing had happened."""
    undisturbed = cluster.complete("one long answer", max_tokens=300)
    restarts = cluster.node("prefill")["restarts"]

    async def work() -> Stream:
        started = asyncio.Event()
        async with aiohttp.ClientSession(
            cluster.url, timeout=aiohttp.ClientTimeout(total=90)
        ) as session:
            task = asyncio.ensure_future(stream(session, "one long answer", 300, started))
            await asyncio.wait_for(started.wait(), 60)
            cluster.kill("prefill")
            return await task

    seen = asyncio.run(work())
    assert (seen.text, seen.finishes, seen.errors) == (undisturbed, ["length"], [])
    cluster.await_restart("prefill", restarts=restarts + 1)
    cluster.assert_nothing_is_held()


def test_killed_router_comes_back(cluster: Cluster) -> None:
    pid = cluster.state["router"]["pid"]
    cluster.kill("router")
    cluster.await_line("router was killed by SIGKILL")
    cluster.await_service()
    eventually("the state file names the new router", lambda: cluster.state["router"]["pid"] != pid)
    cluster.assert_nothing_is_held()
