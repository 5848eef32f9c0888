"""A request preempted in the middle of its answer gets the same tokens: on the real engine, alone and as a pair."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch

from baton.errors import WrongState
from baton.runtime.engine_loop import EngineLoop
from baton.sched.types.request import SamplingParams
from tests.parity.conftest import Reference
from tests.parity.test_engine import prompts_of
from tests.support.engines.engine_run import answer, greedy, make_engine

STEPS = 20
LENGTHS = [1, 4, 15, 16, 17, 33, 64, 70]
SEEDED = SamplingParams(max_new_tokens=STEPS, temperature=0.9, top_p=0.9, seed=11, ignore_eos=True)


def storm(engine: EngineLoop, rng: random.Random) -> Callable[[list[int]], None]:
    """Suspends a request in every second turn, whatever its state, and resumes others."""

    def disturb(handles: list[int]) -> None:
        if rng.random() < 0.5:
            handle = rng.choice(handles)
            before = engine.sched.report.counts()
            try:
                engine.sched.suspend([handle])
            except WrongState:
                assert engine.sched.report.counts() == before, "a refusal suspends nothing"
        engine.sched.resume(rng.sample(handles, rng.randint(0, len(handles))))
        engine.sched.ledger()

    return disturb


def flip_bits(engine: EngineLoop, rng: random.Random) -> None:
    """Changes a bit in one of ten pages of the host pool, used or not, as a bad memory module might."""
    pool = engine.runner._host  # type: ignore[attr-defined]
    pages = pool.memory.view(torch.uint8).view(len(pool.memory), -1)
    for slot in rng.sample(range(len(pages)), len(pages) // 10):
        pages[slot, rng.randrange(pages.shape[1])] ^= 1 << rng.randrange(8)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("overlap", [True, False])
def test_suspended_at_random_steps_the_tokens_are_transformers(
    reference: Callable[[str], Reference], page_size: int, overlap: bool
) -> None:
    ref = reference("llama")
    prompts = prompts_of(random.Random(3), LENGTHS)
    engine = make_engine(
        ref.path, page_size=page_size, chunked_prefill_size=64, disable_overlap_schedule=not overlap
    )  # fmt: skip
    want = ref.answers(prompts, STEPS)
    assert (
        answer(engine, prompts, greedy(STEPS), disturb=storm(engine, random.Random(page_size)))
        == want
    )
    assert engine.sched.report.counters()["suspensions_total"] > 10
    plain = answer(engine, prompts, SEEDED)
    assert answer(engine, prompts, SEEDED, disturb=storm(engine, random.Random(page_size))) == plain
    engine.sched.ledger().check_idle(engine.sched.limits.num_pages)
    engine.close()


MODES = ["offload", "auto", "cache", "recompute"]
QUICK = {(16, mode) for mode in MODES} | {(1, "offload"), (64, "recompute")}
"""Page sizes with modes of preemption that the fast suite tries: each of both."""


@pytest.mark.parametrize(
    ("page_size", "mode"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in itertools.product([1, 16, 64], MODES)
    ],
)
def test_through_the_host_pool_and_back_the_tokens_are_transformers(
    reference: Callable[[str], Reference], page_size: int, mode: str
) -> None:
    """A device pool too small for all: pages are evicted to the host, sequences retracted, and suspended on top."""
    ref = reference("llama")
    prompts = prompts_of(random.Random(3), LENGTHS)
    want = ref.answers(prompts, STEPS)
    engine = make_engine(
        ref.path, page_size=page_size, chunked_prefill_size=64, max_total_tokens=192, host_kv_gib=0.002,
        preemption_mode=mode, schedule_conservativeness=0.05,
    )  # fmt: skip
    for repeat in range(2):
        disturb = storm(engine, random.Random(repeat))
        assert answer(engine, prompts, greedy(STEPS), disturb=disturb) == want, f"round {repeat}"
    plain = answer(engine, prompts, SEEDED)
    assert answer(engine, prompts, SEEDED, disturb=storm(engine, random.Random(5))) == plain
    assert engine.counters['kv_host_copies_total{direction="out"}'] > 0
    assert engine.counters['kv_host_copies_total{direction="in"}'] > 0
    engine.gauges()
    assert engine.not_accepting_reason is None
    engine.sched.flush_cache()
    host = engine.sched.host_ledger()
    assert host is not None
    assert host.free == engine.sched.limits.host_pages
    engine.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_damaged_in_the_host_pool_the_tokens_are_transformers(
    reference: Callable[[str], Reference], overlap: bool
) -> None:
    """Bytes of the host pool change under preempted and evicted sequences: they are computed again."""
    ref = reference("llama")
    prompts = prompts_of(random.Random(3), LENGTHS)
    want = ref.answers(prompts, STEPS)
    engine = make_engine(
        ref.path, page_size=4, chunked_prefill_size=64, max_total_tokens=192, host_kv_gib=0.0005,
        preemption_mode="offload", schedule_conservativeness=0.05, disable_overlap_schedule=not overlap,
    )  # fmt: skip
    rng = random.Random(7)
    for repeat in range(3):
        disturb = storm(engine, random.Random(repeat))

        def damage(handles: list[int], disturb: Callable[[list[int]], None] = disturb) -> None:
            flip_bits(engine, rng)
            disturb(handles)

        assert answer(engine, prompts, greedy(STEPS), disturb=damage) == want, f"round {repeat}"
    assert engine.counters["kv_host_checksum_failures_total"] > 5
    engine.sched.flush_cache()
    host = engine.sched.host_ledger()
    assert host is not None
    assert host.free == engine.sched.limits.host_pages
    engine.close()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    "flags", [{}, {"host_kv_gib": 0.002, "preemption_mode": "offload", "max_total_tokens": 256}]
)
def test_suspended_on_either_node_of_a_pair_the_tokens_are_transformers(
    reference: Callable[[str], Reference], page_size: int, flags: dict[str, object]
) -> None:
    pair_module = pytest.importorskip(
        "tests.support.engines.pair",
        reason="needs the native module: make setup",
        exc_type=ImportError,
    )
    ref = reference("llama")
    prompts = prompts_of(random.Random(4), LENGTHS)
    rng = random.Random(page_size)
    pair = pair_module.Pair(ref.path, "shm", page_size=page_size, chunked_prefill_size=16, **flags)

    def disturb(half: object, handles: list[int]) -> None:
        storm(half.engine, rng)(handles)  # type: ignore[attr-defined]

    try:
        for _ in range(2):
            want = ref.answers(prompts, STEPS)
            assert pair.answer(prompts, greedy(STEPS), disturb) == want
        assert pair.p.engine.sched.report.counters()["suspensions_total"] > 0
        assert pair.d.engine.sched.report.counters()["suspensions_total"] > 0
        if flags:
            assert pair.d.engine.counters['kv_host_copies_total{direction="in"}'] > 0
    finally:
        pair.close()
