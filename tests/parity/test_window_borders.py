"""Families with windows or chunks answer prompts at their borders as transformers does: in one
process and in a pair, whatever page size, chunking, prefix hit or preemption."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest

from tests.parity.conftest import Reference
from tests.parity.test_engine import prompts_of
from tests.parity.test_preempted_tokens import flip_bits, storm
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.models.checkpoints import VARIANTS

pair_module = pytest.importorskip(
    "tests.support.engines.pair", reason="needs the native module: make setup", exc_type=ImportError
)

STEPS = 12
BORDERS = {"gpt-oss": "sliding_window", "llama4": "attention_chunk_size"}
"""The field of config.json that says where tokens go out of sight."""
WIDE = {"gemma2": "sliding_window", "gemma3": "sliding_window", "mistral-window": "sliding_window"}
VARIANT_CASES = [
    *BORDERS,
    *(pytest.param(variant, marks=pytest.mark.slow) for variant in WIDE),
]
PAGE_SIZES = [16, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4, 64))]


@pytest.fixture(scope="module")
def cases(
    reference: Callable[[str], Reference],
) -> Callable[[str], tuple[Reference, list[list[int]], list[list[int]]]]:
    """cases(variant): the checkpoint, prompts around one and two widths, transformers' tokens."""

    @cache
    def make(variant: str) -> tuple[Reference, list[list[int]], list[list[int]]]:
        ref = reference(variant)
        width = VARIANTS[variant][1][(BORDERS | WIDE)[variant]]
        lengths = [width - 1, width, width + 1, 2 * width - 1, 2 * width, 2 * width + 1, 50]
        prompts = prompts_of(random.Random(4), lengths)
        return ref, prompts, ref.answers(prompts, STEPS)

    return make


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("variant", VARIANT_CASES)
def test_engine_equals_transformers_chunked_cached_and_preempted(
    cases, variant: str, page_size: int
) -> None:
    ref, prompts, want = cases(variant)
    engine = make_engine(ref.path, page_size=page_size, chunked_prefill_size=max(page_size, 8))
    assert answer(engine, prompts, greedy(STEPS)) == want
    assert answer(engine, prompts[::-1], greedy(STEPS), stagger=2) == want[::-1]
    if page_size <= 16:
        assert sum(engine.sched.hit_tokens.values()) > 0, "the second round was meant to hit"
    disturb = storm(engine, random.Random(page_size))
    assert answer(engine, prompts, greedy(STEPS), disturb=disturb) == want
    assert engine.sched.report.counters()["suspensions_total"] > 2
    engine.sched.ledger().check_idle(engine.sched.limits.num_pages)
    engine.close()


@pytest.mark.parametrize("variant", BORDERS)
def test_engine_with_too_few_pages_equals_transformers(cases, variant: str) -> None:
    ref, prompts, want = cases(variant)
    engine = make_engine(ref.path, max_total_tokens=68, schedule_conservativeness=0.05)
    assert answer(engine, prompts, greedy(STEPS)) == want
    assert engine.sched.report.counters()["retractions_total"] > 0
    engine.close()


HOST_CASES = ["gpt-oss", "gemma3", pytest.param("llama4", marks=pytest.mark.slow)]


@pytest.mark.parametrize("is_damaged", [False, True], ids=["", "damaged"])
@pytest.mark.parametrize("variant", HOST_CASES)
def test_engine_through_the_host_pool_equals_transformers(
    cases, variant: str, is_damaged: bool
) -> None:
    """Pages of every group leave a pool too small for all and come back; damaged ones are computed again."""
    ref, prompts, want = cases(variant)
    engine = make_engine(
        ref.path, max_total_tokens=68, host_kv_gib=0.001, preemption_mode="offload",
        schedule_conservativeness=0.05,
    )  # fmt: skip
    assert engine.sched.limits.page_groups, "the model was meant to have several groups"
    rng = random.Random(1)
    for repeat in range(2):
        disturb = storm(engine, random.Random(repeat))

        def damage(handles: list[int], disturb: Callable[[list[int]], None] = disturb) -> None:
            if is_damaged:
                flip_bits(engine, rng)
            disturb(handles)

        assert answer(engine, prompts, greedy(STEPS), disturb=damage) == want, f"round {repeat}"
    assert engine.counters['kv_host_copies_total{direction="in"}'] > 50
    assert (engine.counters["kv_host_checksum_failures_total"] > 0) == is_damaged
    assert engine.sched.hit_tokens["host"] + engine.sched.hit_tokens["rematch"] > 0
    engine.sched.flush_cache()
    engine.sched.ledger().check_idle(engine.sched.limits.num_pages)
    engine.close()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("variant", VARIANT_CASES)
def test_pair_equals_transformers(cases, variant: str, page_size: int) -> None:
    ref, prompts, want = cases(variant)
    pair = pair_module.Pair(ref.path, "shm", page_size=page_size)
    try:
        assert pair.answer(prompts, greedy(STEPS)) == want
        assert pair.answer(prompts[::-1], greedy(STEPS)) == want[::-1]
    finally:
        pair.close()
