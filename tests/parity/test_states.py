"""States of sequences: the same bits in every cut of a prompt and every batch, and transformers' tokens whatever
interrupts a request."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from baton.layers.kv_spec import ROLLING_SNAPSHOT_TOKENS
from baton.runtime.engine_loop import EngineLoop
from tests.parity.conftest import Reference
from tests.parity.test_engine import prompts_of
from tests.parity.test_preempted_tokens import storm
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.engines.scripted_drafter import ScriptedDrafter, speculate
from tests.support.models.checkpoints import VOCAB
from tests.support.models.model_loop import ModelLoop
from tests.support.models.whole_model import load_model

pytest.importorskip("baton._native", reason="the native module is not built")

STEPS = 16
LONG_ANSWER = 200
DRAFTED_ANSWER = 80
LENGTHS = [1, 3, 4, 5, 63, 64, 65, 70, 130]
"""Around taps of the convolution, pages, chunks, and the 64 tokens of transformers' chunked form."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_have_the_same_bits_token_by_token_and_in_any_chunks_and_pages(
    reference: Callable[[str], Reference], stateful: str, dtype: str
) -> None:
    """Decode is a chunk of one token: an answer that is computed again from its tokens goes on as it would have."""
    model = load_model(reference(stateful).path, dtype=dtype)
    model.pack()
    prompt = prompts_of(random.Random(1), [150])[0]
    whole = ModelLoop(model, "cpu", 16).prompt_logits(prompt, 1000)
    for page_size, chunk in ((1, 7), (4, 1), (64, 64), (16, 33)):
        logits = ModelLoop(model, "cpu", page_size).prompt_logits(prompt, chunk)
        assert torch.equal(logits, whole), (page_size, chunk)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_a_batch_have_the_bits_of_single_rows(
    reference: Callable[[str], Reference], stateful: str, dtype: str
) -> None:
    model = load_model(reference(stateful).path, dtype=dtype)
    model.pack()
    prompts = prompts_of(random.Random(2), [1, 5, 40, 70])
    loop = ModelLoop(model, "cpu", 4)
    seqs = [loop.start(prompt, 1) for prompt in prompts]
    together = loop.decoder.forward(loop.batch([(seq, len(seq.tokens)) for seq in seqs]), loop.attn)
    for row, prompt in enumerate(prompts):
        alone = ModelLoop(model, "cpu", 4).prompt_logits(prompt, 1000)[-1]
        assert torch.equal(together[row], alone), f"row {row}"


@pytest.mark.parametrize(
    "flags",
    [
        {"page_size": 1, "chunked_prefill_size": 7},
        {"attention_backend": "torch", "state_snapshot_tokens": 16},
        {"state_snapshot_tokens": 16, "page_size": 16},
        {"state_snapshot_share": 0.0},
        {"disable_radix_cache": True},
        {"disable_overlap_schedule": True},
        {"max_running_requests": 2, "chunked_prefill_size": 12},
        {
            "max_total_tokens": 400,
            "schedule_conservativeness": 0.05,
            "state_snapshot_tokens": 16,
        },
    ],
    ids=str,
)
def test_engine_equals_transformers(
    reference: Callable[[str], Reference], stateful: str, flags: dict[str, object]
) -> None:
    ref = reference(stateful)
    prompts = prompts_of(random.Random(3), LENGTHS)
    want = ref.answers(prompts, STEPS)
    engine = make_engine(ref.path, **flags)
    assert answer(engine, prompts, greedy(STEPS)) == want
    again = answer(engine, prompts[::-1], greedy(STEPS), stagger=2)
    assert again == want[::-1], "slots have states of other sequences"
    hits = engine.sched.hit_tokens["device"]
    is_off = flags.get("disable_radix_cache") or flags.get("state_snapshot_share") == 0.0
    assert (hits == 0) == bool(is_off)
    if "max_total_tokens" in flags:
        assert engine.sched.report.counters()["retractions_total"] > 0
    engine.sched.ledger().check_idle(engine.sched.limits.num_pages)
    engine.close()


@pytest.mark.parametrize("mode", ["cache", "recompute"])
def test_suspended_and_resumed_the_tokens_are_transformers(
    reference: Callable[[str], Reference], stateful: str, mode: str
) -> None:
    ref = reference(stateful)
    prompts = prompts_of(random.Random(3), LENGTHS)
    want = ref.answers(prompts, STEPS)
    engine = make_engine(
        ref.path,
        page_size=16,
        chunked_prefill_size=64,
        preemption_mode=mode,
        state_snapshot_tokens=32,
    )
    assert answer(engine, prompts, greedy(STEPS), disturb=storm(engine, random.Random(4))) == want
    assert engine.sched.report.counters()["suspensions_total"] > 5
    assert engine.sched.hit_tokens["rematch"] > 0, "states are restored from snapshots"
    engine.sched.ledger().check_idle(engine.sched.limits.num_pages)
    engine.close()


def test_long_answers_equal_transformers(
    reference: Callable[[str], Reference], stateful: str
) -> None:
    ref = reference(stateful)
    prompts = prompts_of(random.Random(5), [9, 100])
    engine = make_engine(ref.path, chunked_prefill_size=48)
    want = ref.answers(prompts, LONG_ANSWER)
    assert answer(engine, prompts, greedy(LONG_ANSWER)) == want
    engine.close()


def check_next_turns(
    engine: EngineLoop,
    ref: Reference,
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
) -> None:
    """Ask on behind the answers: each prompt is found up to the last border of its answer."""
    turns = [
        prompt + tokens + more
        for prompt, tokens, more in zip(
            prompts, answers, prompts_of(random.Random(7), [5, 30]), strict=True
        )
    ]
    before = engine.sched.hit_tokens["device"]
    assert answer(engine, turns, greedy(STEPS)) == ref.answers(turns, STEPS)
    ends = [len(prompt + tokens) - 1 for prompt, tokens in zip(prompts, answers, strict=True)]
    want = sum(end // ROLLING_SNAPSHOT_TOKENS * ROLLING_SNAPSHOT_TOKENS for end in ends)
    assert engine.sched.hit_tokens["device"] - before == want


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_next_turn_begins_at_the_last_snapshot_of_the_answer(
    reference: Callable[[str], Reference], stateful: str, page_size: int
) -> None:
    ref = reference(stateful)
    prompts = prompts_of(random.Random(6), [9, 100])
    engine = make_engine(ref.path, page_size=page_size)
    answers = answer(engine, prompts, greedy(LONG_ANSWER))
    check_next_turns(engine, ref, prompts, answers)
    engine.sched.ledger().check_idle(engine.sched.limits.num_pages)
    engine.close()


@pytest.mark.parametrize(
    "right", [0.7, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.0, 1.0))]
)
@pytest.mark.parametrize(
    "flags",
    [
        {"page_size": 4, "state_snapshot_tokens": 8},
        {"page_size": 16, "chunked_prefill_size": 64, "state_snapshot_tokens": 32},
        {
            "max_total_tokens": 400,
            "schedule_conservativeness": 0.05,
            "state_snapshot_tokens": 16,
        },
    ],
    ids=str,
)
def test_states_of_drafts_that_were_not_drawn_are_taken_back(
    reference: Callable[[str], Reference], stateful: str, flags: dict[str, object], right: float
) -> None:
    """Snapshots stand at borders that rows with drafts pass, and answers are suspended there."""
    ref = reference(stateful)
    prompts = prompts_of(random.Random(3), LENGTHS)
    want = ref.answers(prompts, DRAFTED_ANSWER)
    script = {(tuple(p), 0): tokens for p, tokens in zip(prompts, want, strict=True)}
    engine = speculate(make_engine(ref.path, **flags), ScriptedDrafter(script, right, VOCAB))
    assert answer(engine, prompts, greedy(DRAFTED_ANSWER)) == want
    disturb = storm(engine, random.Random(5))
    assert answer(engine, prompts, greedy(DRAFTED_ANSWER), disturb=disturb) == want
    turns = [p + tokens + [7, 8, 9] for p, tokens in zip(prompts, want, strict=True)]
    rest = ref.answers(turns, STEPS)
    script |= {(tuple(p), 0): tokens for p, tokens in zip(turns, rest, strict=True)}
    before = engine.sched.hit_tokens["device"]
    assert answer(engine, turns, greedy(STEPS)) == rest
    assert engine.sched.hit_tokens["device"] > before or "max_total_tokens" in flags
    counters = engine.sched.stats.counters()
    assert counters["spec_decode_num_draft_tokens_total"] > 0
    assert (counters["spec_decode_num_accepted_tokens_total"] > 50) == (right > 0)
    assert engine.sched.report.counters()["suspensions_total"] > 5
    engine.sched.ledger().check_idle(engine.sched.limits.num_pages)
    engine.close()
