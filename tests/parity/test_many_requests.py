"""Two thousand requests through pools that are too small for them, in models of several page groups: every answer is
transformers', no page is lost, and no group waits for another for ever."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.parity.conftest import Reference
from tests.parity.test_preempted_tokens import storm
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.models.checkpoints import VOCAB

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROUNDS = 13
REQUESTS = 40
"""Of a round, behind which the engine is idle."""
MOST_TOKENS = 64
TOKENS = {"gemma3": 140, "gpt-oss": 140, "llama4": 140, "qwen3-next": 400}
"""Of the pool. One with states needs room for snapshots that are found again."""


@pytest.mark.parametrize("variant", TOKENS)
def test_every_answer_of_many_is_transformers(
    reference: Callable[[str], Reference], variant: str
) -> None:
    ref = reference(variant)
    rng = random.Random(variant)
    systems = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(4)]
    prompts = [
        rng.choice(systems)[: rng.randrange(40)] + [rng.randrange(VOCAB) for _ in range(more)]
        for more in rng.choices(range(1, 30), k=60)
    ]
    engine = make_engine(
        ref.path,
        max_total_tokens=TOKENS[variant],
        max_running_requests=12,
        schedule_conservativeness=0.05,
        num_reserved_decode_tokens=0,
    )
    disturb = storm(engine, rng)
    for _ in range(ROUNDS):
        asked = rng.choices(prompts, k=REQUESTS)
        tokens = rng.randint(1, MOST_TOKENS)
        got = answer(engine, asked, greedy(tokens), stagger=rng.choice([0, 1, 3]), disturb=disturb)
        ref.answers(asked, MOST_TOKENS)
        assert got == ref.answers(asked, tokens)
        engine.sched.ledger().check_idle(engine.sched.limits.num_pages)
    assert engine.sched.report.counters()["suspensions_total"] > ROUNDS
    assert sum(engine.sched.hit_tokens.values()) > 0
    engine.close()
