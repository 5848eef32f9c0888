"""2 000 requests while processes are killed and stopped, clients leave and strangers send garbage.

The seed decides who does what. A client repeats a request that was refused with a retryable status or whose
connection ended without an answer; an answer that begins must end, with exactly the tokens of an undisturbed run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil
import pytest

from tests.support.processes.cluster import Cluster, eventually, family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SEED = int(os.environ.get("BATON_SOAK_SEED", "1"))
REQUESTS = int(os.environ.get("BATON_SOAK_REQUESTS", "2000"))
AT_ONCE = 12
FAULT_EVERY = 60
"""Requests between two faults: a killed node needs some seconds of both cores to come back."""
PROMPTS = [
    f"{begin} {end}"
    for begin in ("Baton", "The router", "A page", "The prefill node")
    for end in ("is", "has")
]
RETRYABLE = {429, 502, 503, 504}
RSS_GROWTH = 1.3


@dataclass
class Tally:
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def body(prompt: str, max_tokens: int, **changes: Any) -> dict[str, Any]:
    return {
        "model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **changes,
    }  # fmt: skip


async def streamed(session: aiohttp.ClientSession, asked: dict[str, Any]) -> tuple[int, str]:
    """Status and text; an answer that began and did not end raises AssertionError, unless the connection broke."""
    async with session.post("/v1/completions", json={**asked, "stream": True}) as answer:
        if answer.status != 200:
            await answer.read()
            return answer.status, ""
        text, ends = "", 0
        async for raw in answer.content:
            line = raw.decode().rstrip("\n")
            if line == "data: [DONE]":
                ends += 1
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += "".join(choice["text"] for choice in event["choices"])
        assert ends == 1, "the stream ended without [DONE]"
        return 200, text


async def whole(session: aiohttp.ClientSession, asked: dict[str, Any]) -> tuple[int, str]:
    async with session.post("/v1/completions", json=asked) as answer:
        body = await answer.json()
        return answer.status, body["choices"][0]["text"] if answer.status == 200 else ""


class Client:
    """One of several at once: takes the next number, does what the seed says about it."""

    def __init__(
        self,
        cluster: Cluster,
        session: aiohttp.ClientSession,
        expected: dict[tuple[str, int], str],
        tally: Tally,
    ) -> None:
        self.cluster, self.session, self.expected, self.tally = cluster, session, expected, tally

    async def do(self, number: int) -> None:
        rng = random.Random(f"{SEED} {number}")
        kind = rng.choices(["stream", "whole", "leave", "garbage"], [50, 30, 12, 8])[0]
        self.tally.counts[kind] += 1
        key = rng.choice(list(self.expected))
        if kind == "garbage":
            with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                data = rng.choice([b"{", b"\xff\xfe", b'{"prompt": NaN}', rng.randbytes(4096)])
                async with self.session.post("/v1/completions", data=data) as answer:
                    assert answer.status >= 400
        elif kind == "leave":
            with contextlib.suppress(asyncio.TimeoutError, aiohttp.ClientError, AssertionError):
                await asyncio.wait_for(streamed(self.session, body(*key)), rng.uniform(0.01, 0.5))
        else:
            await self._ask(number, streamed if kind == "stream" else whole, key)

    async def _ask(self, number: int, ask: Any, key: tuple[str, int]) -> None:
        for attempt in range(60):
            router = router_pid(self.cluster)
            try:
                status, text = await ask(self.session, body(*key))
            except (
                aiohttp.ClientError,
                ConnectionError,
                asyncio.TimeoutError,
                AssertionError,
            ) as err:
                # Only the router's own death may end an answer that began, or a connection.
                if not await self._is_replaced(router):
                    self.tally.lost.append(f"{number} attempt {attempt}: {err!r}")
                    return
                self.tally.counts["repeated after the router's death"] += 1
                await asyncio.sleep(0.5)
                continue
            if status == 200:
                if text != self.expected[key]:
                    self.tally.wrong.append(f"{number} {key}: {text!r}")
                return
            if status not in RETRYABLE:
                self.tally.lost.append(f"{number}: status {status}")
                return
            self.tally.counts[f"repeated after {status}"] += 1
            await asyncio.sleep(0.5)
        self.tally.lost.append(f"{number}: never answered")

    async def _is_replaced(self, router: int) -> bool:
        """True if the router that had this process id has died; its successor is there soon."""
        for _ in range(60):
            if router_pid(self.cluster) != router:
                return True
            await asyncio.sleep(0.5)
        return False


def router_pid(cluster: Cluster) -> int:
    return int(cluster.state["router"]["pid"])


def strike(cluster: Cluster, rng: random.Random) -> str:
    """Kill or stop one process; what was done."""
    targets = [(n["role"], int(n["pid"])) for n in cluster.state["nodes"]]
    targets.append(("router", router_pid(cluster)))
    role, pid = rng.choice(targets)
    process = rng.choice(family(pid) or [None])  # a front, one of its ranks, or the router
    if process is None:
        return "none"
    is_kill = rng.random() < 0.6
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGKILL if is_kill else signal.SIGSTOP)
    if not is_kill:
        loop = asyncio.get_running_loop()

        def proceed() -> None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)

        loop.call_later(rng.uniform(0.5, 8.0), proceed)
    return f"{'kill' if is_kill else 'stop'} {role}"


async def soak(cluster: Cluster, expected: dict[tuple[str, int], str]) -> Tally:
    tally, numbers, rng = Tally(), iter(range(REQUESTS)), random.Random(SEED)
    timeout = aiohttp.ClientTimeout(total=180)
    async with aiohttp.ClientSession(cluster.url, timeout=timeout) as session:
        client = Client(cluster, session, expected, tally)

        async def work() -> None:
            for number in numbers:
                if number % FAULT_EVERY == FAULT_EVERY - 1:
                    tally.counts[strike(cluster, rng)] += 1
                await client.do(number)

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        await asyncio.sleep(9)  # the last stopped process goes on
    return tally


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.up("--prefill", "2", "--decode", "2", "--kv-lease-secs", "3") as cluster:
        yield cluster


def resident_mib(cluster: Cluster) -> float:
    return sum(p.memory_info().rss for p in family(cluster.process.pid)) / 2**20


def test_2000_requests_under_faults_lose_nothing(cluster: Cluster) -> None:
    expected = {(p, n): cluster.complete(p, n) for p in PROMPTS for n in (4, 24, 96)}
    before = resident_mib(cluster)
    tally = asyncio.run(soak(cluster, expected))
    print(f"seed {SEED}: {dict(tally.counts)}; {len(tally.wrong)} wrong, {len(tally.lost)} lost")
    eventually("all nodes are back", lambda: len(cluster.ready()) == 4, 180)
    cluster.assert_nothing_is_held(90)
    after = resident_mib(cluster)
    print(f"resident {before:.0f} MiB before, {after:.0f} MiB after")
    assert not tally.wrong, tally.wrong[:5]
    assert not tally.lost, tally.lost[:5]
    assert after < RSS_GROWTH * before
