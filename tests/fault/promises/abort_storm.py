"""Clients that leave give no wrong token to those who stay, while their pages go to other requests.

Most clients leave at a random moment: before, during and after the transfer of their prompt's pages. The pools of P and
D are so small that the freed pages have another owner at once. Those who stay get the tokens of an undisturbed run,
and in the end no node holds anything.

    python -m tests.fault.promises.abort_storm [--short]

The long form is a router, a P and two D nodes with clients that close their connections; the short form is a P and a D
in one process, whose copies are slowed down so that most aborts hit one.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

import baton.models
from tests.fault.promises.show import Show, run_script
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.engines.retried_pair import RetriedPair
from tests.support.processes.cluster import Cluster, metrics

DEMO = Path(baton.models.__file__).parent / "demo"
SEED = 35049
WAVES = 1
WAVE = 12
REQUESTS = 2000
PROMPTS = 48
CLIENTS = 16
LEAVING = 0.7
MAX_TOKENS = 12
MEAN_STAY_SECS = 1.0
POOL_TOKENS = 4000
"""A dozen of the long form's prompts."""


def short(show: Show) -> None:
    rng = random.Random(SEED)
    prompts = [[rng.randrange(3000) for _ in range(rng.randrange(17, 80))] for _ in range(WAVE)]
    params = greedy(2)
    engine = make_engine(DEMO, page_size=16)
    expected = answer(engine, prompts, params)
    engine.close()
    for transport in ("shm", "tcp"):
        _storm_in_one_process(show, transport, prompts, expected)


def _storm_in_one_process(
    show: Show, transport: str, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    rng = random.Random(SEED)
    slow: dict[str, Any] = {"on": "PAGE", "do": {"delay_ms": 5}, "repeat": True}
    settings: dict[str, Any] = {"settings": {"fault": {"rules": [slow]}}}
    pair = RetriedPair(
        DEMO, transport, settings, settings, page_size=16, max_total_tokens=320,
        disable_radix_cache=True,
    )  # fmt: skip
    params = greedy(2)
    pages = range(pair.p.native.num_pages)
    left = wrong = stayed = retried = 0
    phases: Counter[str] = Counter()
    try:
        for _ in range(WAVES):
            rooms = pair.submit(prompts, params)
            leaving = set(rng.sample(rooms, int(LEAVING * WAVE)))
            while leaving:
                for _ in range(rng.randrange(1, 4)):
                    pair.p.turn()
                    pair.d.turn()
                # Those in mid-transfer first: that is what this is about.
                in_transfer = [room for room in leaving if pair.room_state(room) == "pulling"]
                room = rng.choice(in_transfer or sorted(leaving))
                leaving.remove(room)
                phases[pair.room_state(room)] += 1
                pair.leave(room)
            staying = [i for i, room in enumerate(rooms) if room not in pair.left]
            outcome = pair.collect(
                [rooms[i] for i in staying], [prompts[i] for i in staying], params
            )
            wrong += sum(
                tokens != expected[i] for i, tokens in zip(staying, outcome.tokens, strict=True)
            )
            retried += outcome.retried
            stayed += len(staying)
            left += WAVE - len(staying)
        pair.wait_idle()
        owners = sum(pair.p.native.generation(page) // 2 for page in pages) / len(pages)
        held = pair.holdings()
    finally:
        pair.close()
    show.tell(
        f"{transport}: {left} of {left + stayed} requests left, when D's side was {dict(phases)}; "
        f"each page of P had {owners:.0f} owners; {retried} retries"
    )
    show.keep(
        f"{transport}: 0 wrong answers of those who stayed", not wrong, f"{wrong} of {stayed}"
    )
    show.keep(f"{transport}: nothing is held", not held, held or "all gauges are zero")


def long(show: Show) -> None:
    with Cluster.up(
        "--decode", "2", "--max-total-tokens", str(POOL_TOKENS), "--chunked-prefill-size", "64"
    ) as cluster:
        asyncio.run(_storm(show, cluster))


async def _storm(show: Show, cluster: Cluster) -> None:
    prompts = [f"{i} of the storm: " + f"abort {i} and reuse " * 40 for i in range(PROMPTS)]
    expected = {prompt: cluster.complete(prompt, MAX_TOKENS) for prompt in prompts}
    show.tell(f"{PROMPTS} answers of the undisturbed cluster are known")
    counts: Counter[str] = Counter()
    numbers = iter(range(REQUESTS))
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(cluster.url, timeout=timeout) as session:

        async def work() -> None:
            for number in numbers:
                rng = random.Random(f"{SEED} {number}")
                prompt = rng.choice(prompts)
                counts[await _ask(session, prompt, expected[prompt], rng)] += 1

        await asyncio.gather(*(work() for _ in range(CLIENTS)))
    pulls = sum(
        sample.value
        for node in cluster.state["nodes"]
        for sample in metrics(node["url"])
        if sample.name == "baton_kv_pulls_total"
    )
    show.tell(
        f"{REQUESTS} requests of {CLIENTS} clients: {dict(counts)}; {pulls:.0f} pulls were complete"
    )
    cluster.assert_nothing_is_held(60)
    show.keep("0 wrong answers of those who stayed", not counts["wrong"], dict(counts))
    show.keep("those who stayed were answered", not counts["failed"], dict(counts))
    show.keep(
        "nothing is held", True, "all gauges of pages, requests, rooms, leases and loads are zero"
    )


async def _read(asked: Any) -> None:
    async with asked as response:
        await response.read()


async def _ask(
    session: aiohttp.ClientSession, prompt: str, expected: str, rng: random.Random
) -> str:
    body = {
        "model": "demo", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    asked = session.post("/v1/completions", json=body)
    if rng.random() < LEAVING:
        reading = asyncio.ensure_future(_read(asked))
        _, pending = await asyncio.wait([reading], timeout=rng.expovariate(1 / MEAN_STAY_SECS))
        if not pending:
            return "left after the answer"
        reading.cancel()
        await asyncio.wait([reading])
        return "left"
    async with asked as response:
        answered = await response.json()
        if response.status != 200:
            return "failed"
        return "right" if answered["choices"][0]["text"] == expected else "wrong"


if __name__ == "__main__":
    run_script(__doc__, long, short)
