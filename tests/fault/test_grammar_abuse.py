"""Constraints that cannot be followed or compiled: each is refused with a 400, or compiled within the limits.

Beside each part runs a counter, whose largest gap is printed (`-s`), and the most CPU time that the loop's thread took
between two turns, which does not depend on the load of the machine: while a grammar is checked in a process beside the
front, or compiled on a thread of the rank, the event loop of a front and the loop of a rank go on.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.config import build_config
from baton.errors import EngineError
from baton.runtime.grammar.store import GrammarStore
from baton.sched.types.request import SamplingParams
from baton.server.http.body_decoder import BodyDecoder
from baton.server.request.grammar.checks.reader import GrammarReader
from baton.server.request.grammar.markers import MarkerTokens
from tests.support.engines.engine_run import make_engine
from tests.support.grammars.adversaries import make_adversary
from tests.support.grammars.engines import (
    GrammarAnswer,
    follow_grammars,
    make_store,
    request,
    run_to_end,
)
from tests.support.models.checkpoints import make_checkpoint

COUNT = int(os.environ.get("BATON_TEST_ADVERSARIES", "10000"))
SEED = int(os.environ.get("BATON_TEST_SEED", "1"))
AT_ONCE = 8
BATCH = 16
PROMPT = [1, 2, 3]
CLIENT_ERRORS = {"invalid_value", "unsupported_parameter", "missing_field", "invalid_json"}


@dataclass
class LoopGaps:
    """Longest time between two turns of a loop, and the most CPU time of its thread."""

    largest_secs: float = 0.0
    largest_cpu_secs: float = 0.0
    _turned: float | None = None
    _cpu_turned: float = 0.0

    def turn(self) -> None:
        now = time.monotonic()
        cpu = time.thread_time()
        if self._turned is not None:
            self.largest_secs = max(self.largest_secs, now - self._turned)
            self.largest_cpu_secs = max(self.largest_cpu_secs, cpu - self._cpu_turned)
        self._turned = now
        self._cpu_turned = cpu

    def __str__(self) -> str:
        return (
            f"largest gap of its loop {self.largest_secs * 1000:.0f} ms, "
            f"most CPU time of a turn {self.largest_cpu_secs * 1000:.0f} ms"
        )


@asynccontextmanager
async def watched_loop(gaps: LoopGaps) -> AsyncIterator[None]:
    async def count() -> None:
        while True:
            gaps.turn()
            await asyncio.sleep(0.001)

    task = asyncio.create_task(count())
    try:
        yield
    finally:
        task.cancel()


async def read_all(reader: GrammarReader, bodies: list[bytes], outcomes: Counter[str]) -> set[str]:
    """Texts of the grammars of the bodies that are accepted."""
    texts = set()
    todo = iter(bodies)
    decoder = BodyDecoder()

    async def read_some() -> None:
        for raw in todo:
            await asyncio.sleep(0)  # bodies arrive one by one
            try:
                body = await decoder.decode(raw)
                texts.add((await reader.read(body)).text)
                outcomes["accepted"] += 1
            except EngineError as err:
                check_refusal(err, raw)
                outcomes[err.code] += 1

    await asyncio.gather(*(read_some() for _ in range(AT_ONCE)))
    return texts


def check_refusal(err: EngineError, raw: bytes) -> None:
    assert err.status == 400, (raw[:500], err)
    assert err.code in CLIENT_ERRORS, (raw[:500], err)
    assert 0 < len(err.message) < 800, (raw[:500], err)


@contextmanager
def frozen_heap() -> Iterator[None]:
    """The garbage collector looks at nothing that torch has made: a front does not load it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_each_is_refused_or_compiled(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    bodies = [make_adversary(rng) for _ in range(COUNT)]
    path = make_checkpoint("llama", tmp_path / "llama")
    config = build_config({"model_path": str(path)})
    reader = GrammarReader(config, MarkerTokens(dict))
    outcomes: Counter[str] = Counter()
    front = LoopGaps()

    async def read() -> set[str]:
        async with watched_loop(front):
            return await read_all(reader, bodies, outcomes)

    with frozen_heap():
        texts = sorted(asyncio.run(read()))
    reader.close()
    print(f"front: {dict(outcomes)}, {front}")
    assert outcomes.total() == COUNT
    assert min(outcomes["accepted"], outcomes["invalid_value"]) > COUNT // 20

    rank = LoopGaps()
    answered = Counter(compile_all(make_store(path), path, texts, rank))
    print(f"rank: {dict(answered)}, {rank}")
    assert answered.total() == len(texts)


def compile_all(store: GrammarStore, path: Path, texts: list[str], gaps: LoopGaps) -> list[str]:
    """Outcome of a request with each grammar."""
    engine = follow_grammars(make_engine(path), store)
    found = []
    for start in range(0, len(texts), BATCH):
        some = texts[start : start + BATCH]
        params = [SamplingParams(max_new_tokens=4, grammar=text) for text in some]
        answers = run_to_end(
            engine, [request(PROMPT, each) for each in params], lambda _: gaps.turn()
        )
        found += list(map(outcome_of, some, answers))
    engine.close()
    return found


def outcome_of(text: str, answer: GrammarAnswer) -> str:
    """`grammar_failed`: it is compiled, and its matcher has reached a limit in the first tokens."""
    if answer.error is None:
        return "answered"
    code, message, _ = answer.error
    assert code in {"invalid_value", "grammar_failed"}, (text[:500], code, message)
    assert "was not compiled:" not in message, (text[:500], message)
    return code
