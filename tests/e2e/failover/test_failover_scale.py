"""Failover at scale: hundreds of streams while every node of a simulated fleet is killed, frozen and drained."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
import pytest

from tests.support.processes.cluster import Cluster, eventually, family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STREAMS = int(os.environ.get("BATON_SCALE_STREAMS", "600"))
TOKENS = int(os.environ.get("BATON_SCALE_TOKENS", "2000"))
FLEET = (
    "--prefill",
    "3",
    "--decode",
    "3",
    "--simulate",
    "h200-8b",
    "--max-running-requests",
    "512",
)


@dataclass
class StreamTally:
    """Tokens that all clients have received so far."""

    begun: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    texts: set[str] = field(default_factory=set)


async def read_stream(session: aiohttp.ClientSession, number: int, tally: StreamTally) -> None:
    """Read one stream to its end and note its outcome: `ok`, or the reason why not."""
    body = {
        "model": "demo", "prompt": f"{number:04d} " * 40, "max_tokens": TOKENS, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    text: list[str] = []
    usage = ends = 0
    try:
        async with session.post("/v1/completions", json=body) as answer:
            if answer.status != 200:
                error = (await answer.json())["error"]
                tally.outcomes[f"{answer.status} {error['code']}: {error['message']}"] += 1
                return
            async for line in answer.content:
                if line == b"data: [DONE]\n":
                    ends += 1
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        tally.outcomes[
                            f"{event['error']['code']}: {event['error']['message']}"
                        ] += 1
                        return
                    tally.begun += not text
                    text += [choice["text"] for choice in event["choices"]]
                    usage = (event.get("usage") or {}).get("completion_tokens", usage)
    except aiohttp.ClientError as err:
        tally.outcomes[repr(err)] += 1
        return
    tally.texts.add("".join(text))
    is_whole = (ends, usage) == (1, TOKENS)
    tally.outcomes["ok" if is_whole else f"{ends} ends, {usage} tokens"] += 1


def run_streams(cluster: Cluster, disturb: Callable[[Cluster], None]) -> StreamTally:
    """Start all streams at once, and call `disturb` when all of them have begun."""
    tally = StreamTally()

    def disturb_when_begun() -> None:
        eventually(
            "all streams begin", lambda: tally.begun + sum(tally.outcomes.values()) >= STREAMS, 300
        )
        disturb(cluster)

    async def work() -> None:
        timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            cluster.url, timeout=timeout, connector=connector
        ) as session:
            streams = [read_stream(session, i, tally) for i in range(STREAMS)]
            await asyncio.gather(asyncio.to_thread(disturb_when_begun), *streams)

    asyncio.run(work())
    return tally


def ready_again(cluster: Cluster, role: str, index: int) -> None:
    url = cluster.node(role, index)["url"]
    eventually(f"{role} {index} is ready", lambda: url in cluster.ready(), 180)


def kill(cluster: Cluster, role: str, index: int) -> None:
    restarts = cluster.node(role, index)["restarts"]
    cluster.kill(role, index)
    eventually(
        f"{role} {index} is restarted",
        lambda: cluster.node(role, index)["restarts"] > restarts,
        180,
    )
    ready_again(cluster, role, index)


def drain(cluster: Cluster, role: str, index: int) -> None:
    restarts = cluster.node(role, index)["restarts"]
    os.kill(cluster.node(role, index)["pid"], signal.SIGTERM)
    eventually(
        f"{role} {index} is restarted",
        lambda: cluster.node(role, index)["restarts"] > restarts,
        180,
    )
    ready_again(cluster, role, index)


def freeze(cluster: Cluster, role: str, index: int) -> None:
    """Stop the node's processes until the router has noticed."""
    node = cluster.node(role, index)
    frozen = family(node["pid"])
    for process in frozen:
        process.suspend()
    try:
        eventually(f"{role} {index} is out", lambda: node["url"] not in cluster.ready(), 180)
    finally:
        for process in frozen:
            process.resume()
    ready_again(cluster, role, index)


def kill_three(cluster: Cluster) -> None:
    for role in ("decode", "prefill", "decode"):
        loads = cluster.loads()
        kill(cluster, role, max(range(3), key=lambda i: loads.get(cluster.node(role, i)["url"], 0)))


def disturb_every_node(cluster: Cluster) -> None:
    for index, disturb in enumerate((kill, freeze, drain)):
        disturb(cluster, "decode", index)
        disturb(cluster, "prefill", index)


@pytest.mark.parametrize("disturb", [kill_three, disturb_every_node])
def test_no_stream_breaks(disturb: Callable[[Cluster], None]) -> None:
    with Cluster.up(*FLEET, "--drain-timeout-secs", "2") as cluster:
        tally = run_streams(cluster, disturb)
        assert tally.outcomes == {"ok": STREAMS}
        assert {len(text) for text in tally.texts} == {4 * TOKENS}
        cluster.assert_nothing_is_held()
