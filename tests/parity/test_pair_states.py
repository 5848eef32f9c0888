"""Models that keep a state per sequence, on two nodes: the state after the whole prompt goes to D, and the tokens are
transformers', whatever either node finds in its cache, and whatever interrupts a request."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from baton.errors import PromptTooLong
from baton.sched.types.request import Rendezvous, ValidatedRequest
from tests.parity.conftest import Reference
from tests.parity.test_preempted_tokens import storm
from tests.support.engines.engine_run import greedy
from tests.support.engines.scripted_drafter import ScriptedDrafter, speculate
from tests.support.models.checkpoints import VOCAB

pair_module = pytest.importorskip(
    "tests.support.engines.pair", reason="needs the native module: make setup", exc_type=ImportError
)

STEPS = 16
PAGE = 8
CHUNK = 48
SNAPSHOT = 32
"""Tokens: not the size of a chunk, so that snapshots are inside chunks and at their borders."""
BORDERS = [1, 7, 8, 9, 31, 32, 33, 47, 48, 49, 95, 96, 97]
"""Around pages, snapshots and chunks."""
FLAGS: dict[str, object] = {
    "page_size": PAGE,
    "chunked_prefill_size": CHUNK,
    "state_snapshot_tokens": SNAPSHOT,
}
FULL_POOL: dict[str, object] = {
    "max_total_tokens": 300,
    "schedule_conservativeness": 0.05,
    "num_reserved_decode_tokens": 0,
}


def prompts_of(rng: random.Random, lengths: list[int]) -> list[list[int]]:
    """Those of the same half of the lengths begin alike."""
    shared = [[rng.randrange(VOCAB) for _ in range(max(lengths))] for _ in range(2)]
    return [
        shared[place % 2][: n // 2] + [rng.randrange(VOCAB) for _ in range(n - n // 2)]
        for place, n in enumerate(lengths)
    ]


@contextmanager
def pair_of(ref: Reference, transport: str = "shm", /, **flags: object) -> Iterator[Any]:
    """A pair that is idle and whose ledgers balance at the end."""
    pair = pair_module.Pair(ref.path, transport, **{**FLAGS, **flags})
    try:
        yield pair
        for half in (pair.p, pair.d):
            sched = half.engine.sched
            sched.ledger().check_idle(sched.limits.num_pages)
            sched.flush_cache()
            assert sched.ledger().free == sched.limits.num_pages
    finally:
        pair.close()


@pytest.mark.parametrize(
    "transport", ["tcp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("shm", "gloo"))]
)
def test_prompts_around_every_border_equal_transformers_with_hits_on_either_node(
    reference: Callable[[str], Reference], stateful: str, transport: str
) -> None:
    ref = reference(stateful)
    prompts = prompts_of(random.Random(1), BORDERS)
    want = ref.answers(prompts, STEPS)
    with pair_of(ref, transport) as pair:
        p = pair.p.engine.sched
        d = pair.d.engine.sched
        assert pair.answer(prompts, greedy(STEPS)) == want
        for flushed in ((), (p,), (d,)):
            for sched in flushed:
                sched.flush_cache()
            on_p = p.hit_tokens["device"]
            on_d = d.hit_tokens["decode_tree"]
            assert pair.answer(prompts, greedy(STEPS)) == want, f"flushed: {flushed}"
            assert (p.hit_tokens["device"] > on_p) == (p not in flushed)
            assert (d.hit_tokens["decode_tree"] > on_d) == (d not in flushed)


@pytest.mark.parametrize(
    "flags",
    [
        {**FULL_POOL, "state_snapshot_tokens": 8},
        {"disable_radix_cache": True},
        *(
            pytest.param(flags, marks=pytest.mark.slow)
            for flags in (
                {"page_size": 1, "chunked_prefill_size": 7},
                {"page_size": 64, "chunked_prefill_size": 64},
                {"state_snapshot_share": 0.0},
                {"disable_overlap_schedule": True, "max_running_requests": 2},
            )
        ),
    ],
    ids=str,
)
def test_pair_equals_transformers_under_every_engine_setting(
    reference: Callable[[str], Reference], stateful: str, flags: dict[str, object]
) -> None:
    ref = reference(stateful)
    prompts = prompts_of(random.Random(2), [1, 15, 16, 17, 64, 65, 96, 130])
    want = ref.answers(prompts, STEPS)
    with pair_of(ref, **flags) as pair:
        for _ in range(2):
            assert pair.answer(prompts, greedy(STEPS)) == want
        if "max_total_tokens" in flags:
            assert pair.d.engine.sched.report.counters()["retractions_total"] > 0


@pytest.mark.parametrize(
    "flags",
    [{"chunked_prefill_size": 16}, pytest.param(FULL_POOL, marks=pytest.mark.slow)],
    ids=str,
)
def test_suspended_on_either_node_the_tokens_are_transformers(
    reference: Callable[[str], Reference], stateful: str, flags: dict[str, object]
) -> None:
    """A prompt whose pages D reads keeps them on P, and its state, which has lost its slot."""
    ref = reference(stateful)
    prompts = prompts_of(random.Random(4), [1, 15, 16, 17, 33, 64, 70, 130])
    want = ref.answers(prompts, STEPS)
    rng = random.Random(5)
    with pair_of(ref, **flags) as pair:
        for _ in range(2):
            answers = pair.answer(
                prompts, greedy(STEPS), lambda half, handles: storm(half.engine, rng)(handles)
            )
            assert answers == want
            pair.p.engine.sched.flush_cache()
        assert pair.p.engine.sched.report.counters()["suspensions_total"] > 0
        assert pair.d.engine.sched.report.counters()["suspensions_total"] > 0


def test_answer_resumed_by_another_pair_goes_on_as_it_would_have(
    reference: Callable[[str], Reference], stateful: str
) -> None:
    """What the router does when D dies: the prompt and the tokens that the client has, to P and another D."""
    ref = reference(stateful)
    (prompt,) = prompts_of(random.Random(6), [70])
    (want,) = ref.answers([prompt], 40)
    with pair_of(ref) as pair:
        p = pair.p.engine.sched
        for received in (0, 1, 2, 9, 10, 26, 39):
            known = prompt + want[:received]
            assert pair.answer([known], greedy(40 - received)) == [want[received:]]
            pair.d.engine.sched.flush_cache()
        assert p.hit_tokens["device"] >= 6 * 64, "P restarts from its snapshots"


def test_prompts_that_share_a_beginning_are_found_whole_on_the_prefill_node(
    reference: Callable[[str], Reference], stateful: str
) -> None:
    """Computed together: the tree has no snapshot where they part."""
    ref = reference(stateful)
    prompts = prompts_of(random.Random(10), [70, 90, 110])[::2]
    prompts.append(prompts[1][:60] + prompts[0][:50])
    want = ref.answers(prompts, 4)
    with pair_of(ref) as pair:
        assert pair.answer(prompts, greedy(4)) == want
        rooms = pair.submit(prompts, greedy(4))
        pair.until(lambda: pair.d.finished.issuperset(rooms))
        found = [pair.d.cached[room] for room in rooms]
        assert found == [(len(prompt) - 1) // PAGE * PAGE for prompt in prompts]
        pair.until(lambda: pair.p.engine.sched.is_idle and pair.d.engine.sched.is_idle)


def test_only_the_state_travels_where_the_decode_node_has_all_other_pages(
    reference: Callable[[str], Reference], stateful: str
) -> None:
    (prompt,) = prompts_of(random.Random(7), [64])
    with pair_of(reference(stateful), "tcp") as pair:
        pulled = []
        for _ in range(2):
            before = pair.pulled().get('kv_pull_bytes_total{transport="tcp"}', 0)
            pair.answer([prompt], greedy(4))
            pulled.append(pair.pulled()['kv_pull_bytes_total{transport="tcp"}'] - before)
        limits = pair.d.engine.sched.limits
        page_bytes = pair.d.native.page_bytes
        assert pulled == [
            (64 // PAGE + limits.state_pages) * page_bytes,
            limits.state_pages * page_bytes,
        ]


def test_longest_prompt_that_fits_with_its_state_is_served_and_a_longer_one_refused(
    reference: Callable[[str], Reference], stateful: str
) -> None:
    ref = reference(stateful)
    tokens = 96
    prompts = prompts_of(random.Random(8), [tokens - 1, tokens - 2, tokens])
    want = ref.answers(prompts[:2], 8)
    with pair_of(ref, max_total_tokens=tokens) as pair:
        for half in (pair.p, pair.d):
            limits = half.engine.sched.limits
            assert limits.room_capacity_tokens == tokens
            assert limits.num_pages == tokens // PAGE + limits.state_pages
        assert pair.answer(prompts[:2], greedy(8)) == want, "one at a time"
        for half, room in itertools.product((pair.p, pair.d), (1, 2)):
            meet = Rendezvous("127.0.0.1", pair.bootstrap.port, room)
            req = ValidatedRequest(room, "long", array("i", prompts[2]), greedy(8), rendezvous=meet)
            with pytest.raises(PromptTooLong, match=f"holds {tokens};"):
                half.engine.sched.add(req)


def test_decode_node_computes_prompts_without_a_room_itself(
    reference: Callable[[str], Reference], stateful: str
) -> None:
    """As where every P is gone."""
    ref = reference(stateful)
    prompts = prompts_of(random.Random(9), [9, 64, 100])
    want = ref.answers(prompts, STEPS)
    with pair_of(ref) as pair:
        assert pair.answer(prompts, greedy(STEPS)) == want
        engine = pair.d.engine
        for handle, prompt in enumerate(prompts, start=1):
            engine.submit(
                ValidatedRequest(handle, f"own{handle}", array("i", prompt), greedy(STEPS))
            )
        pair.until(lambda: pair.d.finished.issuperset(range(1, 4)))
        assert [pair.d.got[handle] for handle in range(1, 4)] == want


def test_decode_node_computes_the_next_turn_behind_its_answers_last_snapshot(
    reference: Callable[[str], Reference], stateful: str
) -> None:
    ref = reference(stateful)
    prompts = prompts_of(random.Random(11), [9, 100])
    with pair_of(ref, state_snapshot_tokens=256) as pair:
        answers = pair.answer(prompts, greedy(80))
        turns = [
            prompt + answer + [1, 2, 3] for prompt, answer in zip(prompts, answers, strict=True)
        ]
        engine = pair.d.engine
        for handle, turn in enumerate(turns, start=1):
            engine.submit(
                ValidatedRequest(handle, f"turn{handle}", array("i", turn), greedy(STEPS))
            )
        pair.until(lambda: pair.d.finished.issuperset((1, 2)))
        # Of 88 and 179 tokens that had rows.
        assert [pair.d.cached[handle] for handle in (1, 2)] == [64, 128]
        assert [pair.d.got[handle] for handle in (1, 2)] == ref.answers(turns, STEPS)
        # Rooms end with the states of both nodes as they do behind any other answer.
        assert pair.answer(turns, greedy(STEPS)) == ref.answers(turns, STEPS)


def test_decode_node_drafts_behind_the_state_of_the_prompt(
    reference: Callable[[str], Reference], stateful: str
) -> None:
    ref = reference(stateful)
    prompts = prompts_of(random.Random(12), [1, 15, 64, 65, 96])
    want = ref.answers(prompts, 70)
    with pair_of(ref, state_snapshot_tokens=16) as pair:
        script = {(tuple(p), 0): tokens for p, tokens in zip(prompts, want, strict=True)}
        speculate(pair.d.engine, ScriptedDrafter(script, 0.8, VOCAB))
        for _ in range(2):
            assert pair.answer(prompts, greedy(70)) == want
        counters = pair.d.engine.sched.stats.counters()
        assert counters["spec_decode_num_accepted_tokens_total"] > 100
