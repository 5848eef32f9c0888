"""Metamorphic parity: whatever page size, chunking, overlap, batching, cache hit or retraction, the same tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from baton.sched import recording
from baton.sched.types.request import SamplingParams
from tests.parity.conftest import Reference
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.models.checkpoints import VOCAB

STEPS = 24


def prompts_of(rng: random.Random, lengths: list[int]) -> list[list[int]]:
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    return [shared[: n // 2] + [rng.randrange(VOCAB) for _ in range(n - n // 2)] for n in lengths]


SMALL_POOL = {"max_total_tokens": 120, "schedule_conservativeness": 0.05}
FLAGS: list[dict[str, object]] = [
    {},
    {"page_size": 1, "chunked_prefill_size": 7},
    {"page_size": 16, "chunked_prefill_size": 16},
    {"disable_overlap_schedule": True},
    {"disable_radix_cache": True, "chunked_prefill_size": 8},
    {"prefill_first": True, "schedule_policy": "lpm"},
    {"max_running_requests": 2, "chunked_prefill_size": 12},
    SMALL_POOL,
]


def with_backends(flags: list[dict[str, object]], *often: int) -> list[Any]:
    """Each setting with both backends. With `torch`, those at other places than `often` are slow
    tests, because no backend reads what they change: it gets batches and pages."""
    return [
        pytest.param(
            backend,
            each,
            id=f"{backend}-{each}",
            marks=pytest.mark.slow if backend == "torch" and at not in often else [],
        )
        for at, each in enumerate(flags)
        for backend in ("torch", "cpu")
    ]


@pytest.mark.parametrize(("backend", "flags"), with_backends(FLAGS, 0, 1, 7))
def test_engine_equals_transformers(
    reference: Callable[[str], Reference], backend: str, flags: dict[str, object]
) -> None:
    ref = reference("llama")
    prompts = prompts_of(random.Random(3), [1, 3, 4, 5, 15, 16, 17, 33, 64, 70])
    want = ref.answers(prompts, STEPS)
    engine = make_engine(ref.path, attention_backend=backend, **flags)
    assert answer(engine, prompts, greedy(STEPS)) == want
    assert answer(engine, prompts[::-1], greedy(STEPS), stagger=2) == want[::-1], (
        "second round, with prefix hits"
    )
    if "max_total_tokens" in flags:
        assert engine.sched.report.counters()["retractions_total"] > 0, (
            "the pool was meant to be too small"
        )
    engine.sched.ledger().check_idle(engine.sched.limits.num_pages)
    engine.close()


GROUPED_FLAGS: list[dict[str, object]] = [
    {"page_size": 4, "chunked_prefill_size": 8},
    {"page_size": 1, "chunked_prefill_size": 7},
    {"disable_radix_cache": True, "chunked_prefill_size": 16},
    {**SMALL_POOL, "page_size": 4},
]


@pytest.mark.parametrize("variant", ["qwen2-window", "gemma3", "gpt-oss", "llama4"])
@pytest.mark.parametrize(("backend", "flags"), with_backends(GROUPED_FLAGS, 0))
def test_engine_with_several_page_groups_equals_transformers(
    reference: Callable[[str], Reference], backend: str, variant: str, flags: dict[str, object]
) -> None:
    """Prompts end around the window's border; the second round begins behind pages that the first one left."""
    ref = reference(variant)
    engine = make_engine(ref.path, attention_backend=backend, **flags)
    (rule,) = engine.sched.limits.page_groups
    lengths = [1, 3, rule.size - 1, rule.size, rule.size + 1, 33, 64, 70]
    prompts = prompts_of(random.Random(3), lengths)
    # Of the last prompt's beginning, which leaves its own window behind.
    prompts.append(prompts[-1][:40] + prompts[0] * 5)
    want = ref.answers(prompts, STEPS)
    assert answer(engine, prompts, greedy(STEPS)) == want
    assert answer(engine, prompts[::-1], greedy(STEPS), stagger=2) == want[::-1]
    hits = engine.sched.hit_tokens["device"]
    assert (hits == 0) == bool(flags.get("disable_radix_cache"))
    if "max_total_tokens" in flags:
        assert engine.sched.report.counters()["retractions_total"] > 0
    engine.sched.ledger().check_idle(engine.sched.limits.num_pages)
    engine.close()


def test_sampled_tokens_do_not_depend_on_batch_chunk_or_overlap(
    reference: Callable[[str], Reference],
) -> None:
    ref = reference("llama")
    prompts = prompts_of(random.Random(4), [5, 17, 33])
    params = SamplingParams(
        max_new_tokens=STEPS,
        temperature=0.9,
        top_p=0.9,
        seed=11,
        ignore_eos=True,
        frequency_penalty=0.4,
    )
    plain = make_engine(ref.path, disable_overlap_schedule=True)
    alone = [answer(plain, [p], params)[0] for p in prompts]
    together = make_engine(ref.path, chunked_prefill_size=8, page_size=8)
    assert answer(together, prompts, params) == alone
    assert len({tuple(a) for a in alone}) == 3


def test_real_engines_trace_replays_to_the_same_plans(
    reference: Callable[[str], Reference],
) -> None:
    """Times, sampled tokens and overlap of a real run: nothing that decides is missing in --scheduler-trace."""
    lines: list[str] = []
    engine = make_engine(
        reference("llama").path, trace=lines.append, max_total_tokens=120, schedule_conservativeness=0.05,
        schedule_policy="srpt-aging", chunked_prefill_size=16, step_target_ms=5.0,
    )  # fmt: skip
    prompts = prompts_of(random.Random(4), [3, 17, 33, 64, 5, 40])
    answer(engine, prompts, greedy(STEPS), stagger=2)
    engine.close()
    planned = sum(engine.sched.decisions.steps.values())
    done = recording.replay(lines)
    assert (done.difference, done.requests, done.plans) == (None, len(prompts), planned)
    assert engine.sched.report.counters()["retractions_total"] > 0, (
        "the pool was meant to be too small"
    )
