"""Timelines of traced requests: exact on scripted lives, true to what happened on random ones."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from baton.errors import KvTransferFailed, RequestTimeout
from baton.sched.setup.limits import Limits
from baton.sched.types import request_timeline
from baton.sched.types.priority import PriorityRule
from baton.sched.types.request import FinishReason, ValidatedRequest
from baton.sched.types.request_timeline import FirstTokenStages, PulledPages, RequestTimeline
from tests.support.effort import seeds
from tests.support.sched.fake_transfer import FakeTransfer
from tests.support.sched.sched_sim import VOCAB, Node, random_prompt, request

LIMITS = Limits(100, 4, 4, 100, 16)


def traced(handle: int, prompt: int, max_new: int, room: int | None = None) -> ValidatedRequest:
    tokens = [(handle + i) % VOCAB for i in range(prompt)]
    plain = request(handle, tokens, max_new, ignore_eos=True, room=room)
    return dataclasses.replace(plain, arrival=0.0, trace=b"t%d" % handle)


class Timed(Node):
    """Each look at its clock is a second later."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        ticks = itertools.count(1)
        super().__init__(limits, 1, lambda: float(next(ticks)))

    def only_timeline(self) -> RequestTimeline:
        self.absorb()
        (timeline,) = self.timelines
        return timeline


def test_prompt_in_chunks_and_its_answer() -> None:
    node = Timed()
    node.sched.add(traced(7, 40, 3))
    node.run()
    timeline = node.only_timeline()
    assert (timeline.handle, timeline.trace, timeline.prompt_tokens) == (7, b"t7", 40)
    # A step looks at the clock twice: chunks of 16 are planned at 1, 3, 5 and done at 2, 4, 6.
    assert (timeline.admitted_at, timeline.first_token_at, timeline.ended_at) == (1.0, 6.0, 10.0)
    assert timeline.events == [(2.0, "computed", 16), (4.0, "computed", 16), (6.0, "computed", 8)]
    assert (timeline.steps, timeline.computed_tokens, timeline.cached_tokens) == (3, 40, 0)
    assert (
        timeline.output_tokens,
        timeline.finish,
        timeline.error,
        timeline.recomputed_tokens,
    ) == (3, "length", "", 0)
    assert not timeline.is_transfer
    assert not timeline.leased_pages


def test_second_of_two_equal_prompts_reports_its_cached_tokens() -> None:
    node = Timed()
    node.sched.add(traced(1, 40, 1))
    node.run()
    node.sched.add(dataclasses.replace(traced(2, 40, 1), prompt=traced(1, 40, 1).prompt))
    node.run()
    timeline = node.timelines[1]
    assert (timeline.cached_tokens, timeline.computed_tokens, timeline.steps) == (36, 4, 1)


def test_untraced_request_has_no_timeline() -> None:
    node = Timed()
    node.sched.add(dataclasses.replace(traced(1, 40, 3), trace=b""))
    node.run()
    assert not node.timelines


def test_first_token_of_an_untraced_request_carries_its_wait_for_a_slot() -> None:
    node = Timed(dataclasses.replace(LIMITS, max_running_requests=1))
    for handle in (1, 2):
        node.sched.add(dataclasses.replace(traced(handle, 16, 3), trace=b""))
    node.run()
    first, second = (node.stages[handle].queue_seconds for handle in (1, 2))
    # Plans are made at 1, 3, 5 and committed at 2, 4, 6; the second request begins when the first one has ended.
    assert (first, second) == (1.0, 7.0)
    assert all(stages.pulled is None for stages in node.stages.values())


def test_preempted_request_reports_when_and_the_recomputed_tokens() -> None:
    rule = PriorityRule(enabled=True, preemption_threshold=0)
    node = Timed(
        dataclasses.replace(
            LIMITS, max_running_requests=1, priority=rule, preemption_mode="recompute"
        )
    )
    node.sched.add(dataclasses.replace(traced(1, 8, 12), priority=1))
    for _ in range(4):
        node.step()
    node.sched.add(dataclasses.replace(traced(2, 8, 2), priority=5))
    node.run()
    first = next(timeline for timeline in node.timelines if timeline.handle == 1)
    assert first.preemptions == 1
    kinds = [what for _, what, _ in first.events]
    assert kinds == ["computed", "preempted", "admitted", "computed"]
    assert first.recomputed_tokens == first.events[-1][2] > 0
    assert first.computed_tokens == 8


def test_suspended_while_it_runs() -> None:
    node = Timed()
    node.sched.add(traced(1, 8, 6))
    node.step()
    node.sched.suspend([1])
    node.run()
    node.sched.resume([1])
    node.run()
    timeline = node.only_timeline()
    assert [what for _, what, _ in timeline.events][:3] == ["computed", "suspended", "admitted"]
    assert timeline.output_tokens == 6


def test_end_of_one_that_never_ran() -> None:
    node = Timed(dataclasses.replace(LIMITS, max_running_requests=1))
    node.sched.add(dataclasses.replace(traced(1, 8, 30), trace=b""))
    node.step()
    node.sched.add(traced(2, 8, 30))
    node.sched.stats.now = 9.0
    node.sched.fail(2, RequestTimeout("too late"))
    timeline = node.only_timeline()
    assert (timeline.admitted_at, timeline.ended_at, timeline.finish, timeline.error) == (
        None,
        9.0,
        "error",
        "timeout",
    )


def test_lease_lasts_until_it_is_released_and_reports_why() -> None:
    node = Timed(dataclasses.replace(LIMITS, role="prefill"))
    node.sched.add(traced(1, 20, 9, room=5))
    node.run()
    assert not node.timelines
    node.sched.stats.now = 50.0
    node.sched.release(5, "LEASE_EXPIRED")
    timeline = node.only_timeline()
    assert (timeline.first_token_at, timeline.ended_at) == (4.0, 50.0)
    assert (timeline.leased_pages, timeline.output_tokens, timeline.finish) == (
        5,
        1,
        "LEASE_EXPIRED",
    )


def test_transfer_reports_how_its_pages_came() -> None:
    node = Timed(dataclasses.replace(LIMITS, role="decode"))
    node.sched.add(traced(1, 20, 3, room=5))
    node.step()
    node.sched.stats.now = 7.0
    node.sched.transfer_announced(5)
    pulled = PulledPages("tcp", 5, 4096, 0.25, 1.5)
    node.sched.stats.now = 8.0
    node.sched.transfer_committed(5, 1, 12, None, pulled)
    node.run()
    timeline = node.only_timeline()
    assert timeline.is_transfer
    assert (timeline.admitted_at, timeline.announced_at, timeline.first_token_at) == (1.0, 7.0, 8.0)
    assert (timeline.pulled, timeline.cached_tokens, timeline.computed_tokens) == (pulled, 12, 0)
    assert node.stages == {1: FirstTokenStages(1.0, pulled)}
    assert (timeline.output_tokens, timeline.finish) == (3, "length")


def test_broken_transfer_ends_with_its_code() -> None:
    node = Timed(dataclasses.replace(LIMITS, role="decode"))
    node.sched.add(traced(1, 20, 3, room=5))
    node.step()
    node.sched.transfer_failed(5, KvTransferFailed("PEER_LOST: gone"))
    timeline = node.only_timeline()
    assert (timeline.first_token_at, timeline.finish, timeline.error) == (
        None,
        "error",
        "kv_transfer_failed",
    )


def test_events_of_a_timeline_are_bounded() -> None:
    node = Timed(Limits(1000, 1, 4, 2000, 1))
    node.sched.add(traced(1, 100, 2))
    node.run()
    timeline = node.only_timeline()
    assert len(timeline.events) == request_timeline.MAX_EVENTS
    assert timeline.lost_events == 100 - request_timeline.MAX_EVENTS
    assert (timeline.steps, timeline.computed_tokens) == (100, 100)


@pytest.mark.parametrize("seed", seeds(30))
def test_timelines_agree_with_the_results_of_requests(seed: int) -> None:
    """Pairs with random aborts, broken transfers and tight memory: one true timeline per traced request and node."""
    rng = random.Random(seed)
    page = rng.choice([1, 4])
    ticks = itertools.count()

    def node(role: str) -> Node:
        pages = rng.randint(14, 50) * (4 // page)
        limits = Limits(
            pages, page, rng.choice([2, 6]), 1000, page * rng.randint(1, 6), role=role, schedule_conservativeness=0.1,
            num_reserved_decode_tokens=0,
        )  # fmt: skip
        return Node(limits, rng.choice([1, 2]), lambda: float(next(ticks)))

    p, d = node("prefill"), node("decode")
    transfer = FakeTransfer(p, d, rng, break_rate=rng.choice([0.0, 0.05]))
    longest = min(20, p.limits.capacity_tokens - 1, d.limits.capacity_tokens - 1)
    requests = {}
    aborted = set()

    def turn() -> None:
        p.step()
        d.step()
        transfer.tick()

    for handle in range(30):
        prompt = random_prompt(rng, [[1, 2, 3, 4, 0, 1, 2, 3]], longest)
        req = request(handle, prompt, rng.randint(1, 20), room=1000 + handle)
        req = requests[handle] = dataclasses.replace(
            req, arrival=0.0, trace=b"t" if handle % 2 else b""
        )
        for each in rng.sample([p, d], 2):
            each.sched.add(req)
            turn()
        if rng.random() < 0.15:
            victim = rng.randrange(handle + 1)
            if victim not in d.finished:
                aborted.add(victim)
                d.sched.abort(victim)
                p.sched.abort(victim)
    for _ in range(5000):
        turn()
        if d.sched.is_idle and p.sched.is_idle:
            break
    for room in list(p.done):
        p.sched.release(room)
    for each in (p, d):
        each.absorb()
        assert each.sched.is_idle
        assert sorted(timeline.handle for timeline in each.timelines) == [
            h for h in requests if h % 2
        ]
        for timeline in each.timelines:
            assert timeline.prompt_tokens == len(requests[timeline.handle].prompt)
            times = [timeline.admitted_at, timeline.first_token_at, timeline.ended_at]
            assert sorted(at for at in times if at is not None) == [
                at for at in times if at is not None
            ]
            assert timeline.first_token_at is None or timeline.admitted_at is not None
            assert timeline.output_tokens == len(each.outputs.get(timeline.handle, []))
            assert (timeline.handle in each.errors) == bool(timeline.error)
            if timeline.handle in each.errors:
                assert timeline.error == each.errors[timeline.handle][0]
    for timeline in d.timelines:
        if timeline.handle in d.finished:
            assert timeline.finish == d.finished[timeline.handle].name.lower()
        else:
            assert timeline.handle in aborted
            assert timeline.finish == FinishReason.ABORT.name.lower()
        assert not timeline.leased_pages
    for timeline in p.timelines:
        if timeline.first_token_at is not None and not timeline.retractions:
            assert timeline.cached_tokens + timeline.computed_tokens == timeline.prompt_tokens
            # Decode gave up before the prompt was computed: its pages went from the step into the cache.
            assert (
                timeline.leased_pages or timeline.handle in aborted or timeline.handle in d.errors
            )
