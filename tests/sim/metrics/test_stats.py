"""Scheduler metrics: exact on scripted traces, and by definition on random ones."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from baton.sched.metrics import collector
from baton.sched.policies import PolicyParams
from baton.sched.scheduler import Scheduler
from baton.sched.setup.limits import Limits
from baton.sched.types.plan import StepPlan
from baton.sched.types.priority import PriorityRule
from baton.sched.types.request import Rendezvous
from baton.sched.types.request_timeline import PulledPages
from baton.sched.types.sequence import Seq
from tests.support.effort import seeds
from tests.support.probes import SchedulerProbe
from tests.support.sched.sched_sim import Device, request

LIMITS = Limits(100, 4, 4, 100, 16)


class Clocked:
    """A scheduler with its pretend device; every step begins at the time given and takes `takes` seconds."""

    def __init__(self, limits: Limits) -> None:
        self.sched = Scheduler(limits)
        self.device = Device(limits)
        self.admissions: list[int] = []
        self.plans: list[StepPlan] = []

    @property
    def probe(self) -> SchedulerProbe:
        return SchedulerProbe(self.sched)

    def add(
        self, handle: int, arrival: float, prompt: int, max_new: int = 2, **fields: object
    ) -> None:
        tokens = [handle % 5, *(handle // 5**i % 5 for i in range(1, prompt))]
        plain = request(handle, tokens, max_new, ignore_eos=True)
        self.sched.add(dataclasses.replace(plain, arrival=arrival, **fields))  # type: ignore[arg-type]

    def step(self, now: float, takes: float = 0.5) -> StepPlan | None:
        plan = self.sched.plan(now)
        if plan is not None:
            self.plans.append(plan)
            self.admissions += [adm.handle for adm in plan.admitted]
            self.sched.commit(plan, self.device.execute(plan), now + takes)
        self.sched.drain_events()
        return plan

    @property
    def stats(self):  # type: ignore[no-untyped-def]
        return self.sched.stats


def test_waiting_time_and_overtaking_on_a_scripted_trace() -> None:
    """One slot, shortest first: 1 is overtaken by 2 and 3 and starves from its tenth second on."""
    short_first = PolicyParams(short_first_aging_tokens_per_s=0.0)
    node = Clocked(
        dataclasses.replace(
            LIMITS, max_running_requests=1, policy="short-first", policy_params=short_first
        )
    )
    node.add(0, 0.0, 4)
    node.add(1, 0.0, 30)
    node.step(0.0)
    node.add(2, 1.0, 4)
    node.step(1.0)
    for now in (2.0, 3.0):
        node.step(now)
    node.add(3, 4.0, 4)
    assert (node.stats.gauges(), node.stats.starved.total()) == ({}, 0)
    node.step(10.0)
    assert node.stats.starved.total() == 0, "exactly the threshold is not longer"
    node.step(10.5)
    assert node.stats.gauges() == {'starving_requests{class="default"}': 1.0}
    for now in (11.0, 12.0, 13.0, 14.0):
        node.step(now)
    assert node.admissions == [0, 2, 3, 1]
    assert node.sched.is_idle
    assert node.stats.gauges() == {'starving_requests{class="default"}': 0.0}
    assert node.stats.counters()['priority_starvation_total{class="default"}'] == 1
    assert node.stats.overtaken.counts[:4] == [3, 0, 1, 0], "0, 2 and 3 by none, 1 by two"
    assert node.stats.overtaken.sum == 2
    waits = node.stats.waiting_time["default"]
    assert sum(waits.counts) == 4
    assert waits.sum == pytest.approx(0.0 + (2.0 - 1.0) + (10.0 - 4.0) + 11.0)


def test_long_wait_begins_to_starve_with_the_first_one_that_overtakes() -> None:
    node = Clocked(
        dataclasses.replace(LIMITS, max_running_requests=1, priority=PriorityRule(enabled=True))
    )
    node.add(0, 0.0, 4, max_new=8, priority=9)
    node.add(1, 0.0, 4, priority=1)
    for now in (0.0, 20.0, 21.0):
        node.step(now)
    assert node.stats.starved.total() == 0, "it waits for long, but no request came later"
    node.add(2, 21.5, 4, max_new=1, priority=5)
    for now in range(22, 29):
        node.step(float(now))
    assert node.admissions == [0, 2, 1]
    assert node.stats.counters()['priority_starvation_total{class="1"}'] == 1
    assert set(node.stats.waiting_time) == {"1", "4"}, "bands of powers of four"


def test_burst_that_waits_too_long_is_counted_over_several_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collector, "MAX_DUE_PER_PLAN", 4)
    node = Clocked(dataclasses.replace(LIMITS, max_running_requests=1, policy="lof"))
    for handle in range(10):
        node.add(handle, 0.0, 1, max_new=1)
    node.add(10, 0.5, 1, max_new=100)
    node.step(1.0)
    assert node.admissions == [10], "it has overtaken all others"
    starving = []
    for _ in range(4):
        node.step(20.0)
        starving.append(node.stats.starving.total())
    assert starving == [4, 8, 10, 10]


def test_aborted_requests_leave_nothing_behind() -> None:
    node = Clocked(dataclasses.replace(LIMITS, max_running_requests=1, policy="lof"))
    node.add(0, 0.0, 4, max_new=2)
    node.add(1, 0.5, 4, max_new=9)
    node.add(2, 0.6, 4, max_new=8)
    for now in (1.0, 12.0, 13.0):
        node.step(now)
    assert node.stats.starving["default"] == 1, "0 is behind the longer answer of 1"
    for handle in (0, 1, 2):
        node.sched.abort(handle)
    assert (node.stats.starving["default"], node.stats.queued["default"]) == (0, 0)
    assert sum(node.stats.overtaken.counts) == 1


def test_preemption_is_counted_by_both_classes_and_reason_with_its_recompute_tax() -> None:
    rule = PriorityRule(enabled=True, preemption_threshold=1)
    node = Clocked(
        dataclasses.replace(
            LIMITS, max_running_requests=1, priority=rule, preemption_mode="recompute"
        )
    )
    node.add(0, 0.0, 16, max_new=20, priority=0)
    for now in (0.0, 1.0, 2.0):
        node.step(now)
    node.add(1, 2.5, 4, max_new=2, priority=20)
    for now in (3.0, 4.0, 5.0):
        node.step(now)
    counters = node.stats.counters()
    assert counters['priority_preemption_total{class="0",by="16",reason="slots"}'] == 1
    assert counters['request_retraction_reasons_total{reason="slots"}'] == 1
    published = 16  # the prompt's pages were published when scheduled; the two decode steps' tokens are lost
    assert counters["recomputed_tokens_total"] == 18 - published
    assert sum(node.stats.waiting_time["0"].counts) == 1, "waiting again is not a second admission"


def test_suspended_request_does_not_wait_and_counts_as_sent_back_by_the_operator_if_it_ran() -> (
    None
):
    node = Clocked(dataclasses.replace(LIMITS, max_running_requests=1))
    node.add(0, 0.0, 4, max_new=9)
    node.add(1, 0.0, 4, max_new=9)
    node.step(0.0)
    state = node.probe.state
    for handle in (0, 1):
        state.suspend(state.seqs[handle])
    assert node.stats.queued.total() == 0
    assert (
        node.stats.counters()['priority_preemption_total{class="default",by="",reason="admin"}']
        == 1
    )
    node.step(30.0)
    assert node.stats.starved.total() == 0
    state.resume(state.seqs[1])
    assert node.stats.queued.total() == 1
    node.step(31.0)
    assert node.admissions == [0, 1]


def test_decode_stalls_are_the_gaps_with_other_work() -> None:
    node = Clocked(dataclasses.replace(LIMITS, prefill_first=True))
    node.add(0, 0.0, 4, max_new=9)
    node.step(0.0)
    node.step(1.0)
    node.step(2.0)
    assert sum(node.stats.decode_stall.counts) == 0, "decode steps alone stall no request"
    node.add(1, 2.5, 40, max_new=2)
    stalled = [node.step(now) for now in (3.0, 4.0, 5.0)]
    assert [plan.num_decode for plan in stalled if plan] == [0, 1, 0]
    assert sum(node.stats.decode_stall.counts) == 1
    assert node.stats.decode_stall.sum == pytest.approx(4.5 - 2.5), (
        "the chunk went before, from token to token"
    )
    mixed = Clocked(LIMITS)
    mixed.add(0, 0.0, 4, max_new=9)
    mixed.step(0.0)
    mixed.add(1, 0.5, 8, max_new=2)
    mixed.step(1.0, takes=2.0)
    assert (sum(mixed.stats.decode_stall.counts), mixed.stats.decode_stall.sum) == (
        1,
        pytest.approx(3.0 - 0.5),
    )


def test_deadline_slack_and_misses() -> None:
    node = Clocked(dataclasses.replace(LIMITS, max_running_requests=1))
    node.add(0, 0.0, 4, max_new=1, ttft_deadline=2.0)
    node.add(1, 0.0, 4, max_new=1, ttft_deadline=2.0)
    node.add(2, 0.0, 4, max_new=1, deadline=2.5)
    node.step(0.0)
    node.step(2.0, takes=1.0)
    node.sched.expire(3.0)
    assert node.stats.deadlines_missed == {"ttft": 1, "total": 1}
    assert (sum(node.stats.deadline_slack.counts), node.stats.deadline_slack.sum) == (
        2,
        pytest.approx(1.5 - 1.0),
    )


@pytest.mark.parametrize("seed", seeds(30))
def test_random_traces_follow_the_definitions(seed: int) -> None:
    """Retraction, preemption, aborts and priorities at random, checked against the admissions seen from outside."""
    rng = random.Random(seed)
    rule = PriorityRule(enabled=seed % 3 > 0, preemption_threshold=2)
    policy = rng.choice(["fcfs", "short-first", "lof", "random"])
    node = Clocked(
        Limits(
            24,
            4,
            4,
            1000,
            16,
            policy=policy,
            priority=rule,
            starvation_secs=5.0,
            schedule_conservativeness=0.1,
        )
    )
    arrivals: dict[int, float] = {}
    first: dict[int, float] = {}
    handle, now = 0, 0.0
    while handle < 60 or not node.sched.is_idle:
        now += 1.0
        for _ in range(rng.randrange(3) if handle < 60 else 0):
            arrivals[handle] = now - rng.random()
            node.add(
                handle,
                arrivals[handle],
                rng.randint(1, 30),
                rng.randint(1, 30),
                priority=rng.choice((None, 0, 9)),
            )
            handle += 1
        if rng.random() < 0.1 and handle:
            node.sched.abort(rng.randrange(handle))
        seen = len(node.admissions)
        node.step(now, takes=0.25)
        # The last one admitted may have found no budget for its first row.
        for admitted in [*node.admissions[seen:], *node.probe.running]:
            first.setdefault(admitted, now)
        waits = [s for s in node.probe.seqs.values() if s in node.probe.state.waiting]
        assert node.stats.queued.total() == len(waits)
        assert node.stats.starving.total() <= len(waits)
    order = list(first)
    overtaken: Counter[int] = Counter()
    for i, later in enumerate(order):
        for other in order[i + 1 :]:
            overtaken[other] += (arrivals[other], other) < (arrivals[later], later) and arrivals[
                other
            ] < first[later]
    # A request admitted in the step in which its rival arrived was never passed while both waited.
    assert sum(node.stats.overtaken.counts) == len(first)
    assert node.stats.overtaken.sum == sum(overtaken[h] for h in first)
    assert sum(sum(h.counts) for h in node.stats.waiting_time.values()) == len(first)
    assert sum(h.sum for h in node.stats.waiting_time.values()) == pytest.approx(
        sum(first[h] - arrivals[h] for h in first)
    )
    by_outside = {h for h in first if overtaken[h] and first[h] - arrivals[h] > 5.0}
    assert len(by_outside) <= node.stats.starved.total() <= len(arrivals)
    assert node.stats.starving.total() == node.stats.queued.total() == 0
    reasons = [
        n
        for name, n in node.stats.counters().items()
        if name.startswith("request_retraction_reasons")
    ]
    classes = [
        n for name, n in node.stats.counters().items() if name.startswith("priority_preemption")
    ]
    sent_back = node.sched.report.counters()
    assert (
        sum(reasons)
        == sum(classes)
        == sent_back["retractions_total"] + sent_back["preemptions_total"]
    )
    assert node.stats._request_stats == node.stats._last_token_at == {}


def test_decode_node_waits_until_its_pages_are_reserved() -> None:
    node = Clocked(dataclasses.replace(LIMITS, role="decode", num_pages=12, max_running_requests=2))
    for handle in range(3):
        node.add(handle, float(handle), 8, rendezvous=Rendezvous("p", 1, handle))
    assert node.stats.queued.total() == 3
    node.step(5.0)
    assert node.stats.queued.total() == 1
    assert node.stats.waiting_time["default"].sum == pytest.approx(5.0 + 4.0)
    node.sched.abort(2)
    assert node.stats.queued.total() == 0


def test_admission_taken_back_keeps_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate said yes and allocation said no: the request waits on as if nothing had been."""
    node = Clocked(LIMITS)
    node.add(0, 0.0, 8)
    memory = node.probe.memory
    monkeypatch.setattr(type(memory), "extend", lambda self, seq, tokens: False)
    assert node.step(1.0) is None
    monkeypatch.undo()
    assert (node.stats.queued.total(), sum(node.stats.overtaken.counts)) == (1, 0)
    node.step(2.0)
    assert node.stats.waiting_time["default"].sum == 2.0
    assert isinstance(node.probe.seqs[0], Seq)


def test_age_of_the_oldest_lease_follows_leases_that_begin_and_end() -> None:
    node = Clocked(dataclasses.replace(LIMITS, role="prefill"))
    assert node.stats.oldest_lease_seconds(9.0) == 0
    for handle, now in ((1, 10.0), (2, 20.0)):
        node.sched.add(request(handle, [handle] * 4, 2, room=handle))
        node.step(now)
    ended = [10.5, 20.5]
    assert node.stats.oldest_lease_seconds(30.0) == 30.0 - ended[0]
    node.sched.release(1, "DONE")
    assert node.stats.oldest_lease_seconds(30.0) == 30.0 - ended[1]
    node.sched.release(2, "LEASE_EXPIRED")
    assert node.stats.oldest_lease_seconds(30.0) == 0


def test_pull_durations_are_counted_by_transport() -> None:
    node = Clocked(dataclasses.replace(LIMITS, role="decode"))
    pulls = [
        PulledPages("tcp", 1, 64, 0.25, 0.5),
        PulledPages("tcp", 1, 64, 2.0, 2.5),
        PulledPages("none", 0, 0, 0.0, 0.1),
    ]
    for room, pulled in enumerate(pulls, 1):
        node.sched.add(request(room, [room] * 4, 1, room=room))
        node.step(float(room))
        node.sched.transfer_committed(room, 3, 0, None, pulled)
        node.step(room + 0.5)
    rendered = node.stats.histograms()
    tcp = rendered['kv_pull_duration_seconds{transport="tcp"}']
    assert (sum(tcp.counts), tcp.sum) == (2, 2.25)
    assert sum(rendered['kv_pull_duration_seconds{transport="none"}'].counts) == 1
