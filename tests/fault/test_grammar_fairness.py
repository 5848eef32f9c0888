"""Clients with slow schemas beside clients with usual ones: the latter are served as if they were nearly alone.

Latencies are printed (`-s`) as ratios to those of honest clients alone. Asserted is what no load of
the machine changes: all honest checks are done, the others refused by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.config import build_config
from baton.errors import BadRequest, RateLimited
from baton.server.request.grammar.checks import queue as queue_module
from baton.server.request.grammar.checks.queue import LARGE_LANE, SMALL_LANE, CheckOutcome
from baton.server.request.grammar.checks.reader import CHECK_CLIENT, GrammarReader
from baton.server.request.grammar.markers import MarkerTokens
from tests.support.models.checkpoints import make_checkpoint

ATTACKERS = 4
HONEST = 10
ROUNDS = 8
DEADLINE_SECS = 300.0
numbers = itertools.count()


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarReader]:
    """Checks wait as long as the machine's load wants."""
    for name, limits in (("SMALL_LANE", SMALL_LANE), ("LARGE_LANE", LARGE_LANE)):
        monkeypatch.setattr(queue_module, name, replace(limits, wait_secs=DEADLINE_SECS))
    path = make_checkpoint("llama", tmp_path / "llama")
    made = GrammarReader(build_config({"model_path": str(path)}), MarkerTokens(dict))
    yield made
    made.close()


def schema_body(schema: dict[str, Any]) -> dict[str, Any]:
    named = {"name": "x", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def usual_body() -> dict[str, Any]:
    """A schema that was not checked before."""
    member = f"member_{next(numbers)}"
    return schema_body({"type": "object", "properties": {member: {"type": "string"}}})


def slow_body() -> dict[str, Any]:
    """5 kB; without limits its check takes 18 s."""
    number = next(numbers)
    parts = [{"type": "string", "pattern": f"(a.{{{i}}}b|c{number})"} for i in range(1, 120)]
    return schema_body({"allOf": parts})


def large_body() -> dict[str, Any]:
    """180 kB, checked in half a second."""
    parts = {
        f"member_{next(numbers)}": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
            "required": ["a", "b"],
        }
        for _ in range(1000)
    }
    body = schema_body({"type": "object", "properties": parts, "required": list(parts)})
    assert len(json.dumps(body)) > 2**17
    return body


async def read_as(client: str, reader: GrammarReader, body: dict[str, Any]) -> float:
    """Time until the grammar of a body is there."""
    CHECK_CLIENT.set(client)
    started = time.monotonic()
    assert (await reader.read(body)).text
    return time.monotonic() - started


async def read_usual(reader: GrammarReader) -> list[float]:
    """Latencies of honest clients, each with one request after the other."""

    async def send_all(client: str) -> list[float]:
        return [await read_as(client, reader, usual_body()) for _ in range(ROUNDS)]

    clients = [asyncio.create_task(send_all(f"honest {i}")) for i in range(HONEST)]
    return [latency for each in await asyncio.gather(*clients) for latency in each]


async def attack(client: str, reader: GrammarReader, refusals: Counter[str]) -> None:
    while True:
        try:
            await read_as(client, reader, slow_body())
        except (BadRequest, RateLimited) as err:
            refusals[err.code] += 1
            await asyncio.sleep(0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_slow_schemas_of_some_clients_refuse_and_starve_no_other(reader: GrammarReader) -> None:
    refusals: Counter[str] = Counter()

    async def go() -> tuple[list[float], list[float], float]:
        await read_usual(reader)  # the processes run
        alone = await read_usual(reader)
        attackers = [
            asyncio.create_task(attack(f"attacker {i}", reader, refusals)) for i in range(ATTACKERS)
        ]
        until = time.monotonic() + DEADLINE_SECS
        while not reader.checks.waiting[LARGE_LANE.name]:
            assert time.monotonic() < until
            await asyncio.sleep(0.01)
        beside = await asyncio.wait_for(read_usual(reader), DEADLINE_SECS)
        large = await asyncio.wait_for(read_as("large", reader, large_body()), DEADLINE_SECS)
        for each in attackers:
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await each
        return alone, beside, large

    alone, beside, large = asyncio.run(go())
    for name, latencies in (("alone", alone), ("beside", beside)):
        worst = max(latencies)
        print(f"{name}: median {statistics.median(latencies):.3f} s, worst {worst:.3f} s")
    print(f"worst beside / worst alone: {max(beside) / max(alone):.1f}; large schema {large:.1f} s")
    print(f"refusals {dict(refusals)}, {dict(reader.checks.outcomes)}, {reader.checks.cpu_secs}")
    assert reader.checks.outcomes[CheckOutcome.MOVED] >= ATTACKERS
    assert refusals.total()
    assert reader.checks.outcomes[CheckOutcome.QUEUE_FULL] == 0
    assert SMALL_LANE.cpu_secs * ATTACKERS < 0.5, "what all of them may take of one honest check"
