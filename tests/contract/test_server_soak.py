"""Random requests, rank errors and clients that leave, many at once: every answer is whole, and nothing is left."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from typing import Any

import aiohttp
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.processes.front import FakeEngine, fake_engine, model

REQUESTS = 400
AT_ONCE = 48


def random_request(rng: random.Random) -> tuple[dict[str, Any], float]:
    """A body, and how many seconds its client waits."""
    script: dict[str, Any] = {"step": rng.choice([0, 0.001, 0.02]), "delay": rng.choice([0, 0.01])}
    fate = rng.random()
    if fate < 0.15:
        script |= {"error": ["kv_transfer_failed", "x"], "error_after": rng.choice([0, 1, 3])}
    elif fate < 0.2:
        script["silent"] = True
    body = {
        "prompt": rng.choice(["a", ["a", "bb"], "hello " * 30]), "n": rng.choice([1, 1, 2]),
        "max_tokens": rng.choice([1, 5, 40]), "ignore_eos": True, "stream": rng.random() < 0.6,
        "stop": rng.choice([None, "e"]), "cache_salt": json.dumps(script),
    }  # fmt: skip
    return body, 0.05 if script.get("silent") else rng.choice([0.005, 0.05, 0.2, 30, 30])


async def one(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], timeout_secs: float
) -> str:
    """Outcome of one request: a status, or 'left'. Fails on an answer that is not whole."""
    try:
        async with session.post(
            url, json=body, timeout=aiohttp.ClientTimeout(total=timeout_secs)
        ) as r:
            text = await r.text()
    except asyncio.TimeoutError:
        return "left"
    if r.content_type == "text/event-stream":
        assert text.endswith("data: [DONE]\n\n")
        assert text.count("data: [DONE]") == 1
    else:
        assert ("error" in json.loads(text)) == (r.status != 200)
    return str(r.status)


async def storm(engine: FakeEngine, rng: random.Random) -> Counter[str]:
    room = asyncio.Semaphore(AT_ONCE)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def enter(body: dict[str, Any], timeout_secs: float) -> str:
            async with room:
                return await one(session, engine.url + "/v1/completions", body, timeout_secs)

        return Counter(
            await asyncio.gather(*(enter(*random_request(rng)) for _ in range(REQUESTS)))
        )


def test_storm_leaves_nothing_behind() -> None:
    seed = random.SystemRandom().getrandbits(32)
    with fake_engine("--model-path", model(), "--dp-size", "2", "--log-level", "warning") as engine:
        outcomes = asyncio.run(storm(engine, random.Random(seed)))
        assert outcomes.keys() <= {"200", "502", "left"}, f"seed {seed}"
        assert outcomes["200"] > REQUESTS / 10, f"seed {seed}"
        deadline = time.monotonic() + 5
        while any(engine.ledger(rank)["running"] for rank in (0, 1)):
            if time.monotonic() > deadline:
                pytest.fail(f"the ranks still work after 5 s; seed {seed}")
        families = {
            f.name: f
            for f in text_string_to_metric_families(httpx.get(engine.url + "/metrics").text)
        }
        assert [s.value for s in families["baton_requests_in_flight"].samples] == [0.0]
        assert [
            load["num_reqs"] for load in httpx.get(engine.url + "/v1/loads").json()["loads"]
        ] == [0, 0]
        assert [
            load["num_tokens"] for load in httpx.get(engine.url + "/v1/loads").json()["loads"]
        ] == [0, 0]
        assert engine.log == "", f"seed {seed}"
