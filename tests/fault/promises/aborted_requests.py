"""After 100,000 aborted requests nothing is held: pages, pins, rooms, leases, loads and requests are at zero.

Clients leave before, while and after their request is sent, while P computes, while pages travel, and while D answers.

    python -m tests.fault.promises.aborted_requests [--short]

The long form sends the requests through a router to simulated engines, whose transfers are real; the short form aborts
fewer in a P and a D in one process.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from typing import Any

import psutil

from tests.fault.promises.show import Show, run_script
from tests.support.engines.engine_run import greedy
from tests.support.engines.retried_pair import RetriedPair
from tests.support.processes.cluster import Cluster, family

SEED = 46283
REQUESTS = int(os.environ.get("BATON_TEST_ABORTS", "100000"))
CLIENTS = 48
DEVICE = "reference,speed=20"
LONGEST_STAY_SECS = 0.25
PATIENT = 0.2
"""Share of clients that leave after the first byte. With them requests come no faster than the router takes them, or
the others would leave before anything has read their requests."""
ANSWER_SECS = 120.0
REPORT_EVERY = 10_000
SHORT_REQUESTS = 200
SHORT_WAVE = 40


def short(show: Show) -> None:
    rng = random.Random(SEED)
    pair = RetriedPair(
        "", "tcp", simulate="reference,speed=1000", page_size=16, max_total_tokens=8192,
        max_running_requests=64,
    )  # fmt: skip
    phases: Counter[str] = Counter()
    params = greedy(40)
    try:
        for _ in range(SHORT_REQUESTS // SHORT_WAVE):
            prompts = [
                [rng.randrange(1000) for _ in range(rng.randrange(1, 200))]
                for _ in range(SHORT_WAVE)
            ]
            rooms = pair.submit(prompts, params)
            rng.shuffle(rooms)
            for room in rooms:
                for _ in range(rng.randrange(3)):
                    pair.p.turn()
                    pair.d.turn()
                phases[_phase(pair, room)] += 1
                pair.leave(room)
        pair.wait_idle()
        held = pair.holdings()
    finally:
        pair.close()
    show.tell(f"{phases.total()} requests were aborted, in these states of D: {dict(phases)}")
    show.keep("nothing is held", not held, held or "all gauges are zero")


def _phase(pair: RetriedPair, room: int) -> str:
    state = pair.room_state(room)
    if state != "over":
        return state
    return "answering" if room in pair.d.got else "not begun"


def long(show: Show) -> None:
    with Cluster.up("--simulate", DEVICE, "--kv-lease-secs", "5") as cluster:
        cluster.complete("the first request", 4)
        asyncio.run(_abort_all(show, cluster))


async def _abort_all(show: Show, cluster: Cluster) -> None:
    rng = random.Random(SEED)
    counts: Counter[str] = Counter()
    before = _resources(cluster)
    numbers = iter(range(REQUESTS))
    host, port = cluster.url.removeprefix("http://").split(":")

    async def work() -> None:
        for number in numbers:
            if number and number % REPORT_EVERY == 0:
                show.tell(f"{number} requests: {dict(counts)}; {_resources(cluster)}")
            counts[await _abort(host, int(port), number, rng)] += 1

    await asyncio.gather(*(work() for _ in range(CLIENTS)))
    show.tell(f"{REQUESTS} requests: {dict(counts)}")
    cluster.assert_nothing_is_held(120)
    answered = cluster.complete("the last request", 4)
    show.tell(f"{before} before; {_resources(cluster)} after")
    show.keep(
        "nothing is held, and the next request is answered", bool(answered),
        "all gauges of pages, pins, requests, rooms, leases and loads are zero",
    )  # fmt: skip


async def _abort(host: str, port: int, number: int, rng: random.Random) -> str:
    """Send a request and leave; when."""
    body: dict[str, Any] = {
        "model": "demo",
        "prompt": f"{number % 977} aborted " * rng.randrange(1, 60),
        "max_tokens": 200,
        "stream": bool(number % 2),
        "ignore_eos": True,
    }
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    ).encode()
    stay_secs = rng.random() ** 2 * LONGEST_STAY_SECS
    waits_for_answer = rng.random() < PATIENT
    reader, writer = await asyncio.open_connection(host, port)
    try:
        if rng.random() < 0.05:
            writer.write((head + data)[: rng.randrange(1, len(head) + len(data))])
            await writer.drain()
            return "left before the request was sent"
        writer.write(head + data)
        if waits_for_answer:
            try:
                first = await asyncio.wait_for(reader.read(1), ANSWER_SECS)
            except asyncio.TimeoutError:
                return "left after a long wait"
            await asyncio.sleep(stay_secs)
            return "left after the first byte" if first else "closed by the router"
        await asyncio.sleep(stay_secs)
        return "left before the first byte or soon after"
    finally:
        writer.transport.abort()


def _resources(cluster: Cluster) -> str:
    processes: list[psutil.Process] = family(cluster.process.pid)
    resident = sum(process.memory_info().rss for process in processes) / 2**20
    descriptors = sum(process.num_fds() for process in processes)
    return f"{resident:.0f} MiB resident, {descriptors} descriptors"


if __name__ == "__main__":
    run_script(__doc__, long, short)
