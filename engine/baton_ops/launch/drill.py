"""`baton up --drill`: three promises shown on the cluster that was started, in a minute.

 1. clients that leave: most of many requests are aborted, then no node holds anything;
 2. a slow D: its processes are stopped while prompts arrive, for longer than a lease of pages;
 3. a dead D: it is killed while it answers, is restarted, and the stream continues where it was.

Each compares answers with those of the same cluster before. The scripts of docs/guarantees.md go
further.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from baton_ops.launch.holdings import is_holding
from baton_ops.launch.smoke_test import SmokeClient, SmokeFailure, expect_that

STOP_SECS = 2.5
"""Longer than the lease of a drill's nodes (`DRILL_LEASE_SECS` of the cluster's plan)."""
ABORTED = 120
AT_ONCE = 12
STREAM_TOKENS = 160
KILLED_AFTER = 20
"""Events of the stream, at which D is killed."""
SETTLE_SECS = 60.0
LOOK_SECS = 0.2
REQUEST_TIMEOUT_SECS = 300.0
_SAMPLE = re.compile(r"^baton_(\w+)(?:\{([^}]*)\})? (\S+)$")
_STATE = re.compile(r'state="(\w+)"')


class DrillNode(Protocol):
    """Engine of the cluster."""

    @property
    def role(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def pid(self) -> int:
        """Id of its process group, which has its ranks, too."""


@dataclass(frozen=True, slots=True)
class DrillCluster:
    """Running cluster, as the drills need it."""

    client: SmokeClient
    nodes: Sequence[DrillNode]

    @property
    def decode_node(self) -> DrillNode:
        return next(node for node in self.nodes if node.role == "decode")

    async def complete(self, prompt: str, max_tokens: int = 16) -> str:
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        answer = await self.client.post("/v1/completions", body)
        return str(answer["choices"][0]["text"])

    async def holdings(self) -> dict[str, float]:
        """Gauges of pages, requests, rooms and leases of all nodes that are not zero."""
        found = {}
        for node in self.nodes:
            async with self.client.session.get(f"{node.url}/metrics") as response:
                text = await response.text()
            for line in text.splitlines():
                sample = _SAMPLE.match(line)
                if sample is None or not float(sample[3]):
                    continue
                state = _STATE.search(sample[2] or "")
                if is_holding(sample[1], state[1] if state else None):
                    found[f"{node.role} {line}"] = float(sample[3])
        return found

    async def await_idle(self) -> None:
        """Until no node holds anything. Raises SmokeFailure."""
        deadline = time.monotonic() + SETTLE_SECS
        while held := await self.holdings():
            expect_that(time.monotonic() < deadline, f"after {SETTLE_SECS:g} s still held: {held}")
            await asyncio.sleep(LOOK_SECS)


async def _leaving_clients(cluster: DrillCluster) -> str:
    counts: Counter[str] = Counter()
    expected = await cluster.complete("Baton is")

    async def ask(number: int) -> None:
        if number % 4 == 0:
            text = await cluster.complete("Baton is")
            counts["right" if text == expected else "wrong"] += 1
            return
        asking = asyncio.ensure_future(cluster.complete(f"{number}: a page and a room", 64))
        await asyncio.wait([asking], timeout=0.02 * (number % 10))
        asking.cancel()
        await asyncio.wait([asking])
        counts["aborted"] += 1

    for start in range(0, ABORTED, AT_ONCE):
        await asyncio.gather(*(ask(number) for number in range(start, start + AT_ONCE)))
    expect_that(not counts["wrong"], f"wrong answers: {dict(counts)}")
    await cluster.await_idle()
    return f"{dict(counts)}; pages, rooms, leases and requests are back at 0"


async def _slow_decode_node(cluster: DrillCluster) -> str:
    prompts = [f"{i}: the lease of a page " * 12 for i in range(4)]
    expected = [await cluster.complete(prompt) for prompt in prompts]
    await asyncio.gather(
        *(cluster.client.session.post(f"{node.url}/flush_cache") for node in cluster.nodes)
    )
    group = cluster.decode_node.pid
    asking = [asyncio.ensure_future(cluster.complete(prompt)) for prompt in prompts]
    await asyncio.sleep(0.05)  # P computes, and announces pages
    os.killpg(group, signal.SIGSTOP)
    try:
        await asyncio.sleep(STOP_SECS)
    finally:
        os.killpg(group, signal.SIGCONT)
    texts = await asyncio.gather(*asking)
    wrong = sum(a != b for a, b in zip(texts, expected, strict=True))
    expect_that(not wrong, f"{wrong} of {len(prompts)} answers are wrong")
    await cluster.await_idle()
    return f"D stood still for {STOP_SECS:g} s: {len(prompts)} of {len(prompts)} answers right"


async def _killed_decode_node(cluster: DrillCluster) -> str:
    body = {"prompt": "The router", "max_tokens": STREAM_TOKENS, "ignore_eos": True}
    expected = await cluster.complete("The router", STREAM_TOKENS)
    text = ""
    events = 0
    longest_secs = 0.0
    last = time.monotonic()
    async for event in cluster.client.stream("/v1/completions", body):
        expect_that("error" not in event, f"the stream carried an error: {event}")
        now = time.monotonic()
        longest_secs = max(longest_secs, now - last)
        last = now
        events += 1
        text += "".join(choice["text"] for choice in event["choices"])
        if events == KILLED_AFTER:
            os.killpg(cluster.decode_node.pid, signal.SIGKILL)
    expect_that(events > KILLED_AFTER, f"the stream had {events} events and ended before the kill")
    expect_that(text == expected, f"resumed {text[-80:]!r}, undisturbed {expected[-80:]!r}")
    await cluster.await_idle()
    return f"{STREAM_TOKENS} tokens as undisturbed, with a pause of {longest_secs:.1f} s"


DRILLS: tuple[tuple[str, Callable[[DrillCluster], Awaitable[str]]], ...] = (
    ("clients that leave", _leaving_clients),
    ("a slow D, its lease over", _slow_decode_node),
    ("kill -9 of D in mid-stream", _killed_decode_node),
)


async def run_drill(
    url: str, model: str, nodes: Sequence[DrillNode], api_key: str | None = None
) -> bool:
    """Run all drills in order, print one row each; whether all promises were kept."""
    kept = 0
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_SECS)
    async with aiohttp.ClientSession(url, headers=headers, timeout=timeout) as session:
        cluster = DrillCluster(SmokeClient(session, model), nodes)
        for name, drill in DRILLS:
            started = time.perf_counter()
            detail, is_kept = await _run_one(cluster, drill)
            kept += is_kept
            secs = time.perf_counter() - started
            print(
                f"  {'kept  ' if is_kept else 'BROKEN'}  {name:<26} {secs:5.1f} s  {detail}",
                flush=True,
            )
    print(f"{kept} of {len(DRILLS)} promises kept; more of them: docs/guarantees.md", flush=True)
    return kept == len(DRILLS)


async def _run_one(
    cluster: DrillCluster, drill: Callable[[DrillCluster], Awaitable[Any]]
) -> tuple[str, bool]:
    try:
        return await drill(cluster), True
    except (SmokeFailure, aiohttp.ClientError, asyncio.TimeoutError, KeyError, ValueError) as err:
        return f"{type(err).__name__}: {err}", False
