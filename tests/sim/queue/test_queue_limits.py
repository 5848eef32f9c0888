"""Admission control: which requests are refused when the queue is full, when they expire, and Retry-After."""

from __future__ import annotations

import dataclasses
import random
from array import array

import pytest

from baton.errors import DuplicateRoom, QueueFull
from baton.sched.queue.admission import AdmissionController, DrainRate
from baton.sched.setup.limits import Limits
from baton.sched.types.priority import PriorityRule
from baton.sched.types.request import FinishReason, ValidatedRequest
from baton.sched.types.sequence import Seq
from tests.support.effort import seeds
from tests.support.sched.sched_sim import Node, request

RULE = PriorityRule(enabled=True, preemption_threshold=5)


def limits(**over: object) -> Limits:
    values: dict[str, object] = {
        "num_pages": 100, "page_size": 2, "max_running_requests": 1, "max_queued_requests": 3, "step_tokens": 16,
        "priority": RULE,
    }  # fmt: skip
    return Limits(**(values | over))  # type: ignore[arg-type]


def ask(
    handle: int, priority: int | None = None, length: int = 5, **over: object
) -> ValidatedRequest:
    req = request(handle, [handle % 5] * length, 40, ignore_eos=True)
    return dataclasses.replace(req, priority=priority, **over)  # type: ignore[arg-type]


def full_node(*priorities: int | None, **over: object) -> Node:
    """Request 0 runs in the only slot; the others wait."""
    node = Node(limits(**over), depth=1)
    node.sched.add(ask(0, 9))
    node.step()
    for handle, priority in enumerate(priorities, 1):
        node.sched.add(ask(handle, priority))
    return node


@pytest.mark.parametrize("seed", seeds(25))
def test_victims_are_the_least_important_newest_first_and_only_if_strictly_worse(seed: int) -> None:
    rng = random.Random(seed)
    lim = limits(
        max_queued_requests=rng.randint(1, 12),
        max_queued_tokens=rng.choice([None, 40, 60]),
        priority=RULE,
    )
    admission = AdmissionController(lim)
    inside: dict[int, Seq] = {}
    for handle in range(300):
        now = handle / 4
        req = dataclasses.replace(
            request(handle, [1] * rng.randint(1, 25), 1),
            arrival=now,
            priority=rng.choice([None, 0, 1, 2]),
        )

        def excess(gone: list[Seq], req: ValidatedRequest = req) -> bool:
            tokens = sum(s.prompt_len for s in inside.values() if s not in gone)
            too_many = len(inside) - len(gone) + 1 > lim.max_queued_requests
            most = lim.max_queued_tokens or 10**9
            return too_many or (tokens > 0 and tokens + len(req.prompt) > most)

        worse = [
            s for s in inside.values() if not s.has_started and RULE.base(s) < RULE.base_of(req)
        ]
        worse.sort(key=lambda s: (RULE.base(s), -s.req.arrival))
        expected: list[Seq] = []
        while excess(expected) and len(expected) < len(worse):
            expected.append(worse[len(expected)])
        if excess(expected):
            with pytest.raises(QueueFull):
                admission.make_room(req, now, 100.0)
            assert len(admission._queued) == len(inside)
        else:
            assert admission.make_room(req, now, 100.0) == expected
            for gone in expected:
                admission.remove(gone, now)
                del inside[gone.handle]
            inside[handle] = Seq(req, req.prompt, 1, has_started=rng.random() < 0.2)
            admission.add(inside[handle], len(req.prompt), now)
        if inside and rng.random() < 0.3:
            gone = inside.pop(rng.choice(list(inside)))
            admission.remove(gone, now)
            admission.remove(gone, now)
        assert admission.queued_tokens == sum(s.prompt_len for s in inside.values())


def test_full_queue_gives_the_newest_of_the_least_important_up() -> None:
    node = full_node(1, 0, 0)
    node.sched.add(ask(4, 2))
    node.absorb()
    error = node.errors[3]
    assert error.code == "queue_full"
    assert "left the full queue for one of higher priority; retry after" in error.message
    assert node.sched.report.counters()['queue_turned_away_total{reason="evicted"}'] == 1
    with pytest.raises(QueueFull, match="3 requests are waiting, the limit is 3") as caught:
        node.sched.add(ask(5, 0))
    assert caught.value.retry_after_secs is not None
    node.run()
    assert sorted(node.finished) == [0, 1, 2, 3, 4]
    assert [h for h, why in node.finished.items() if why is FinishReason.ERROR] == [3]


def test_without_priorities_the_new_request_is_refused() -> None:
    node = full_node(1, 0, 0, priority=PriorityRule())
    with pytest.raises(QueueFull):
        node.sched.add(ask(4, 9))


def test_too_few_victims_are_none_and_a_long_prompt_may_wait_alone() -> None:
    node = full_node(0, 0, 3, max_queued_tokens=15)
    with pytest.raises(QueueFull):
        node.sched.add(ask(4, 3, length=11))
    node.absorb()
    assert not node.errors, "without 1 and 2 there would be room for 10 tokens"
    node.sched.add(ask(5, 4, length=40))
    node.absorb()
    assert sorted(node.errors) == [1, 2, 3]
    with pytest.raises(
        QueueFull, match="40 prompt tokens are waiting and this request brings 1, the limit is 15"
    ):
        node.sched.add(ask(6, 4, length=1))


def test_another_reason_to_refuse_costs_no_other_request_its_place() -> None:
    node = Node(limits(role="decode", max_queued_requests=1), depth=1)
    node.sched.add(dataclasses.replace(request(1, [1] * 5, 4, room=7), priority=0))
    with pytest.raises(DuplicateRoom):
        node.sched.add(dataclasses.replace(request(2, [1] * 5, 4, room=7), priority=9))
    node.absorb()
    assert not node.errors


def test_preempted_request_keeps_its_place_in_a_full_queue() -> None:
    node = full_node(max_queued_requests=1)
    node.sched.add(ask(1, 20))
    node.step()
    assert node.sched.report.counters()["preemptions_total"] == 1
    with pytest.raises(QueueFull):
        node.sched.add(ask(2, 15))
    node.run()
    assert node.finished[0] is FinishReason.LENGTH


def test_request_that_entered_twice_times_out_once() -> None:
    """An admission that is undone, or a new priority, puts a request in again."""
    admission = AdmissionController(limits(queue_timeout_secs=10.0))
    req = ask(1)
    seq = Seq(req, req.prompt, 40)
    for _ in range(2):
        admission.add(seq, 5, 0.0)
        admission.remove(seq, 0.0)
    admission.add(seq, 5, 0.0)
    assert admission.pop_overdue(req.arrival + 11) == [seq]
    assert admission.turned_away["timeout"] == 1


@pytest.mark.parametrize("role", ["null", "decode"])
def test_request_not_started_in_time_ends_with_queue_timeout(role: str) -> None:
    room = 7 if role == "decode" else None
    node = Node(limits(role=role, queue_timeout_secs=10.0), depth=1)
    node.sched.add(ask(0, arrival=0.0))
    node.sched.plan(0.0)
    waiting = dataclasses.replace(request(1, [1] * 5, 4, room=room), arrival=2.0)
    node.sched.add(waiting)
    node.sched.plan(2.5)
    assert node.sched.next_deadline() in (10.0, 12.0)
    node.sched.expire(11.9)
    node.absorb()
    assert not node.errors, "request 0 runs"
    assert node.sched.next_deadline() == 12.0
    node.sched.expire(12.0)
    node.absorb()
    assert node.errors[1][0] == "queue_timeout"
    assert "waited 10 s and had not started" in node.errors[1][1]
    assert node.sched.next_deadline() is None
    assert node.sched.report.counts()["waiting" if role == "null" else "opening"] == 0
    assert [a.code for a in node.aborts] == (["NO_CAPACITY"] if room else [])


def test_retracted_requests_wait_as_long_as_they_must() -> None:
    node = full_node(max_queued_requests=3, queue_timeout_secs=1.0)
    node.sched.add(ask(1, 20, arrival=0.5))
    node.step()
    node.sched.expire(100.0)
    node.absorb()
    assert not node.errors, "0 was preempted, 1 runs"
    assert node.sched.report.counts()["waiting"] == 1


def test_suspended_request_is_never_refused() -> None:
    node = full_node(0, 0, queue_timeout_secs=1.0, max_queued_requests=2)
    node.sched.suspend([1])
    node.sched.expire(50.0)
    node.absorb()
    assert sorted(node.errors) == [2]
    node.sched.resume([1])
    node.sched.expire(99.0)
    node.sched.add(ask(3, 5))
    with pytest.raises(QueueFull):
        node.sched.add(ask(4, 5))
    node.absorb()
    assert sorted(node.errors) == [2]


def test_no_timeout_by_default() -> None:
    node = full_node(0)
    assert node.sched.next_deadline() is None
    node.sched.expire(1e9)
    node.absorb()
    assert not node.errors


def test_retry_after_is_the_time_until_the_queue_has_moved_far_enough() -> None:
    admission = AdmissionController(limits(max_queued_requests=100, max_queued_tokens=None))
    seqs = []
    for handle in range(40):
        req = ask(handle, length=20)
        seqs.append(Seq(req, req.prompt, 1))
        admission.add(seqs[-1], 20, 0.0)
    assert admission.retry_after(0.0, prefill_rate=10.0) == 2, (
        "nothing has moved: 20 tokens at 10/s"
    )
    for i, seq in enumerate(seqs[:30]):
        admission.remove(seq, 4.0 * (i + 1))
    assert 3 < admission.retry_after(120.0, 10.0) <= 5, "one in 4 s"
    assert 18 < admission.retry_after(120.0, 10.0, requests=5) < 22
    assert 37 < admission.retry_after(120.0, 10.0, tokens=200) < 43
    assert admission.retry_after(120.0, 10.0, requests=1000) == 60, "bounded"
    assert AdmissionController(limits()).retry_after(0.0, 1e6) == 1, "bounded"


def test_request_without_a_priority_ages_past_important_ones_in_bounded_time() -> None:
    """The priority starts one unit below the least important priority stated, whatever that is, in both directions."""
    for low_first in (False, True):
        rule = PriorityRule(enabled=True, aging_rate=1.0, low_values_first=low_first)
        node = Node(limits(max_queued_requests=100, priority=rule), depth=1)
        node.sched.add(ask(0, priority=2, arrival=0.0))
        node.sched.add(ask(1, priority=8, arrival=0.0))
        node.sched.add(ask(2, arrival=0.0))
        node.sched.add(ask(3, priority=2, arrival=30.0))
        node.sched.add(ask(4, priority=8, arrival=30.0))
        order = [seq.handle for seq in node.probe.state.waiting.in_order()]
        assert order.index(2) == 2, (
            "after what was stated before it came, before what comes much later"
        )


def test_moving_rate_forgets_the_past() -> None:
    rate = DrainRate(horizon_secs=10.0)
    assert rate.per_second(5.0) == (0.0, 0.0)
    rate.start_clock(0.0)
    for second in range(1, 101):
        for _ in range(8):
            rate.on_left(100, float(second))
    requests, tokens = rate.per_second(100.0)
    assert requests == pytest.approx(8.0, rel=0.06)
    assert tokens == pytest.approx(800.0, rel=0.06)
    for second in range(101, 201):
        rate.on_left(100, float(second))
    assert rate.per_second(200.0)[0] == pytest.approx(1.0, rel=0.06)


@pytest.mark.parametrize("idle_secs", [0.0, 1.0, 60.0, 3600.0, 21_500.0, 22_200.0, 86_400.0, 1e9])
def test_queue_that_was_empty_for_long_takes_requests_and_is_measured_afresh(
    idle_secs: float,
) -> None:
    """Sums that faded for six hours are denormal: 1 / rate is infinite, which no Retry-After may be."""
    node = Node(limits(max_queued_requests=2), depth=1)
    for handle in range(3):
        node.sched.add(ask(handle))
        node.run()
    for handle in range(3, 6):
        node.sched.add(ask(handle, arrival=idle_secs))
        if handle == 3:
            node.step()
    with pytest.raises(QueueFull) as caught:
        node.sched.add(ask(6, arrival=idle_secs))
    assert caught.value.retry_after_secs is not None
    assert 1 <= caught.value.retry_after_secs <= 60

    admission = AdmissionController(limits())
    first, second = (Seq(req, array("i", req.prompt), 1) for req in (ask(0), ask(1, length=20)))
    admission.add(first, 5, 0.0)
    admission.remove(first, 1.0)
    admission.add(second, 20, 1.0 + idle_secs)
    if idle_secs > 30.0:
        assert admission.retry_after(1.0 + idle_secs, prefill_rate=10.0) == 2, (
            "20 tokens at 10/s: nothing has moved"
        )
    assert 1 <= admission.retry_after(1.0 + 2 * idle_secs, prefill_rate=10.0) <= 60, (
        "stuck for as long"
    )


def test_deadline_abort_ends_what_has_no_first_token_in_time() -> None:
    node = Node(limits(max_running_requests=2, aborts_missed_deadlines=True), depth=1)
    node.sched.add(ask(0, ttft_deadline=5.0))
    node.step()
    node.sched.add(ask(1, length=100, ttft_deadline=6.0))
    node.sched.add(ask(2, ttft_deadline=90.0))
    assert node.sched.next_deadline() == 5.0
    node.sched.expire(5.5)
    node.absorb()
    assert not node.errors, "request 0 has its first token"
    node.sched.expire(6.0)
    node.absorb()
    assert node.errors[1][0] == "deadline"
    node.run()
    assert node.finished[2] is FinishReason.LENGTH
    assert node.sched.report.counters()['queue_turned_away_total{reason="deadline"}'] == 1


@pytest.mark.parametrize(
    ("aborts", "length", "asked_after", "refused"),
    [
        pytest.param(True, 60, 1.0, True, id="60 tokens take 30 s"),
        pytest.param(False, 60, 1.0, False, id="not asked to abort"),
        pytest.param(True, 8, 1.0, False, id="8 tokens take 4 s"),
        pytest.param(True, 90, 1.0, False, id="no prompt half as long was computed"),
        pytest.param(True, 60, 11.0, False, id="the evidence is too old"),
    ],
)
def test_missed_deadline_is_predicted_only_from_a_comparable_recent_prompt(
    aborts: bool, length: int, asked_after: float, refused: bool
) -> None:
    node = Node(
        limits(max_running_requests=4, step_tokens=4, aborts_missed_deadlines=aborts), depth=1
    )
    node.sched.add(ask(0, length=40))
    now = 0.0
    while 0 not in node.finished:
        plan = node.sched.plan(now)
        assert plan is not None
        now += 2.0  # a step of 4 prompt tokens takes 2 s
        node.sched.commit(plan, node.device.execute(plan), now)
        node.sched.observe(plan, 2.0)
        node.absorb()
        if node.outputs.get(0):
            node.sched.abort(0)
            break
    now += asked_after
    node.sched.add(ask(1, length=length, arrival=now, ttft_deadline=now + 10.0))
    node.sched.plan(now)
    node.absorb()
    assert (1 in node.errors) == refused


def test_deadline_passes_in_the_opening_queue_too() -> None:
    node = Node(limits(role="decode", aborts_missed_deadlines=True), depth=1)
    node.sched.add(dataclasses.replace(request(0, [1] * 5, 4, room=3), ttft_deadline=2.0))
    node.sched.expire(2.0)
    node.absorb()
    assert node.errors[0][0] == "deadline"
    assert [a.code for a in node.aborts] == ["DEADLINE"]


def test_admission_controller_keeps_no_records_of_requests_that_left() -> None:
    admission = AdmissionController(limits(max_queued_requests=10, queue_timeout_secs=1e6))
    for handle in range(20_000):
        req = dataclasses.replace(
            request(0, [1], 1), handle=handle, priority=0, prompt=array("i", [1])
        )
        seq = Seq(req, req.prompt, 1)
        admission.add(seq, 1, 0.0)
        admission.remove(seq, 0.0)
    assert max(len(admission._eviction_heap), len(admission._due)) <= 1025


def test_request_that_entered_twice_without_having_started_is_refused_once() -> None:
    """A request that was given a slot but found no page goes back to the queue."""
    admission = AdmissionController(limits(max_queued_requests=2, queue_timeout_secs=5.0))
    seqs = [Seq(ask(handle, handle, arrival=0.0), array("i", [1]), 1) for handle in range(2)]
    for seq in seqs:
        admission.add(seq, 1, 0.0)
    admission.remove(seqs[0], 1.0)
    admission.add(seqs[0], 1, 1.0)
    assert admission.make_room(ask(7, 99), 2.0, 1000.0) == [seqs[0]]

    again = AdmissionController(limits(queue_timeout_secs=5.0))
    for _ in range(3):
        again.add(seqs[1], 1, 0.0)
        again.remove(seqs[1], 0.0)
    again.add(seqs[1], 1, 0.0)
    assert again.pop_overdue(5.0) == [seqs[1]]
    assert again.turned_away["timeout"] == 1


def test_two_victims_are_two_requests() -> None:
    admission = AdmissionController(limits(max_queued_requests=2, max_queued_tokens=10))
    seqs = [Seq(ask(handle, handle, arrival=0.0), array("i", [1] * 5), 1) for handle in range(2)]
    for seq in (*seqs, seqs[0]):
        if seq is seqs[0]:
            admission.remove(seq, 0.0)
        admission.add(seq, 5, 0.0)
    assert admission.make_room(ask(7, 99, length=10), 1.0, 1000.0) == seqs
