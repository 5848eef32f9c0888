"""Prefill on one engine, pages over shm, tcp or gloo, decode on another: transformers' tokens, for every length."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import baton.models
from baton.sched.types.request import Rendezvous, SamplingParams, ValidatedRequest
from tests.parity.conftest import Reference
from tests.parity.test_engine import prompts_of
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.models.allowed_ids import pack_ids
from tests.support.models.checkpoints import (
    VARIANTS,
    reference_greedy,
    reference_model,
)

pair_module = pytest.importorskip(
    "tests.support.engines.pair", reason="needs the native module: make setup", exc_type=ImportError
)
Pair = pair_module.Pair

DEMO = Path(baton.models.__file__).parent / "demo"
STEPS = 16
TRANSPORTS = ["shm", "tcp", "gloo"]
KINDS_OF_PAGES = {"llama", "gemma3", "deepseek-v3"}
"""Heads in one page group, heads in two, and latents, over each transport in the fast suite. (States:
test_pair_states.)"""
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65, 70, 130]
"""Page boundaries (4) and chunk boundaries (64), one less and one more, and several chunks."""


@pytest.mark.parametrize(
    ("variant", "transport"),
    [
        (variant, transport)
        if transport == "shm" or variant in KINDS_OF_PAGES
        else pytest.param(variant, transport, marks=pytest.mark.slow)
        for variant in sorted(VARIANTS)
        for transport in TRANSPORTS
    ],
)
def test_pair_equals_transformers(
    reference: Callable[[str], Reference], variant: str, transport: str
) -> None:
    ref = reference(variant)
    lengths = LENGTHS if variant == "llama" else [1, 4, 9, 64, 70]
    prompts = prompts_of(random.Random(5), lengths)
    want = ref.answers(prompts, STEPS)
    pair = Pair(ref.path, transport)
    try:
        assert pair.answer(prompts, greedy(STEPS)) == want
        bytes_before = pair.pulled()[f'kv_pull_bytes_total{{transport="{transport}"}}']
        assert bytes_before > 0
        assert pair.answer(prompts[::-1], greedy(STEPS)) == want[::-1], (
            "second round: prefixes are in both caches"
        )
        assert (
            pair.pulled()[f'kv_pull_bytes_total{{transport="{transport}"}}'] - bytes_before
            < bytes_before
        )
    finally:
        pair.close()


FULL_POOL = {
    "max_total_tokens": 240,
    "schedule_conservativeness": 0.05,
    "num_reserved_decode_tokens": 0,
}


@pytest.mark.parametrize(
    ("variant", "flags"),
    [
        ("llama", {"page_size": 1, "chunked_prefill_size": 5}),
        ("llama", {"page_size": 16, "chunked_prefill_size": 16, "disable_overlap_schedule": True}),
        ("llama", {"disable_radix_cache": True}),
        ("llama", FULL_POOL),
        ("llama", {"max_running_requests": 2}),
        ("gemma3", {"page_size": 1, "chunked_prefill_size": 5}),
        ("gemma3", FULL_POOL),
        ("gpt-oss", {"disable_radix_cache": True, "chunked_prefill_size": 16}),
    ],
    ids=str,
)
def test_pair_equals_one_process_under_every_engine_setting(
    reference: Callable[[str], Reference], variant: str, flags: dict[str, object]
) -> None:
    """Gemma 3 and gpt-oss have two page groups: P leaves pages behind while D pulls."""
    ref = reference(variant)
    prompts = prompts_of(random.Random(6), [1, 15, 16, 17, 33, 65, 40, 41])
    want = ref.answers(prompts, STEPS)
    pair = Pair(ref.path, "shm", **flags)
    try:
        assert pair.answer(prompts, greedy(STEPS)) == want
        assert pair.answer(prompts, greedy(STEPS)) == want
    finally:
        pair.close()


RESTRICTED: dict[str, Any] = {
    "allowed_tokens": pack_ids(range(50, 56)),
    "bad_words": ((50,), (51, 52), (52, 51, 53)),
}


@pytest.mark.parametrize("restrictions", [{}, RESTRICTED], ids=["free", "restricted"])
def test_sampling_and_logprobs_are_transferred_unchanged(
    reference: Callable[[str], Reference], restrictions: dict[str, Any]
) -> None:
    ref = reference("llama")
    prompts = prompts_of(random.Random(7), [5, 30])
    params = SamplingParams(
        max_new_tokens=STEPS,
        temperature=0.8,
        top_p=0.9,
        seed=3,
        ignore_eos=True,
        logprobs=2,
        **restrictions,
    )
    engine = make_engine(ref.path)
    pair = Pair(ref.path, "tcp")
    try:
        assert pair.answer(prompts, params) == answer(engine, prompts, params)
    finally:
        pair.close()
        engine.close()


@pytest.mark.parametrize(
    "transport", ["shm", *(pytest.param(name, marks=pytest.mark.slow) for name in TRANSPORTS[1:])]
)
def test_demo_model_answers_alike_in_transformers_in_one_process_and_in_a_pair(
    transport: str,
) -> None:
    model = reference_model(DEMO)
    rng = random.Random(8)
    prompts = [[rng.randrange(3000) for _ in range(n)] for n in (1, 15, 16, 17, 64, 65, 150)]
    want = [reference_greedy(model, p, STEPS) for p in prompts]
    engine = make_engine(DEMO, page_size=16)
    pair = Pair(DEMO, transport, page_size=16)
    try:
        assert answer(engine, prompts, greedy(STEPS)) == want
        assert pair.answer(prompts, greedy(STEPS)) == want
        assert pair.answer(prompts[::-1], greedy(STEPS)) == want[::-1], (
            "second round, with prefix hits"
        )
    finally:
        pair.close()
        engine.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_two_pools_that_hold_one_prompt_each_serve_many(
    reference: Callable[[str], Reference], overlap: bool
) -> None:
    """P computes the shortest first, D sets pages aside for the oldest: pages must be taken back, and no room fails."""
    ref = reference("llama")
    prompts = prompts_of(random.Random(9), [24, 23, 22, 21, 20, 19, 18, 17])
    want = ref.answers(prompts, 4)
    flags = {"num_reserved_decode_tokens": 0, "disable_overlap_schedule": not overlap}
    pair = Pair(ref.path, "shm", max_total_tokens=36, **flags)
    try:
        assert pair.answer(prompts, greedy(4)) == want
    finally:
        pair.close()


def test_prompt_that_no_decode_node_fetches_is_released_on_request(
    reference: Callable[[str], Reference],
) -> None:
    pair = Pair(reference("llama").path, "shm")
    try:
        p = pair.p.engine
        meet = Rendezvous("127.0.0.1", pair.bootstrap.port, 77)
        p.submit(
            ValidatedRequest(1, "orphan", array("i", range(1, 20)), greedy(4), rendezvous=meet)
        )
        while not p.sched.report.counts()["leased"]:
            pair.p.turn()
        assert p.abort_where([], "another", all_leases=False) == 0
        assert p.abort_where([77], None, all_leases=False) == 1
        pair.until(lambda: p.sched.is_idle)  # long before the lease is over
        p.gauges()
        assert p.not_accepting_reason is None
    finally:
        pair.close()
