"""The record of each plan says what was decided and why."""

from __future__ import annotations

import dataclasses
import json

from baton.sched.metrics import step_log
from baton.sched.setup.limits import Limits
from baton.sched.types.plan import ForwardMode, StopReason
from baton.sched.types.priority import PriorityRule
from tests.sim.metrics.test_stats import Clocked

LIMITS = Limits(20, 4, 2, 100, 16)


def test_records_follow_the_plans() -> None:
    node = Clocked(LIMITS)
    heard: list[step_log.StepDecision] = []
    node.sched.decisions.sink = heard.append
    node.add(0, 0.0, 20, max_new=3)
    for now in (1.0, 2.0):
        node.step(now)
    node.add(1, 2.5, 5, max_new=2)
    node.add(2, 2.5, 5, max_new=2)
    for now in (3.0, 4.0, 5.0, 6.0):
        node.step(now)
    records = node.sched.decisions.recent()
    assert [(r["step"], r["now"], r["mode"], r["stopped_by"]) for r in records] == [
        (1, 1.0, "extend", "queue_empty"),
        (2, 2.0, "extend", "queue_empty"),
        (3, 3.0, "mixed", "no_slot"),
        (4, 4.0, "decode", "no_slot"),
        (5, 5.0, "extend", "queue_empty"),
        (6, 6.0, "decode", "queue_empty"),
    ]
    third = records[2]
    assert (third["decode_rows"], third["prefill_tokens"], third["prefill_requests"]) == (1, 5, 1)
    assert (third["token_budget"], third["request_budget"], third["slots_free"]) == (16, None, 0)
    assert (third["admitted"], third["queued"], third["policy"]) == ((1,), {"default": 1}, "fcfs")
    assert third["pages_available"] == 20 - 6 - 2, "21 and 5 tokens"
    assert (third["pages_reserved"], records[3]["pages_reserved"]) == (0, None)
    assert [decision._asdict() for decision in heard] == records
    assert json.loads(json.dumps(records))[0]["admitted"] == [0]
    assert sum(node.sched.decisions.steps.values()) == len(node.plans)
    assert (
        node.sched.decisions.counters()['steps_total{mode="decode",stopped_by="queue_empty"}'] == 1
    )
    assert node.sched.decisions.recent(2) == records[-2:]


def test_preempted_request_is_in_the_record_of_the_plan_that_preempted_it() -> None:
    rule = PriorityRule(enabled=True, preemption_threshold=1)
    node = Clocked(dataclasses.replace(LIMITS, max_running_requests=1, priority=rule))
    node.add(0, 0.0, 8, max_new=20, priority=0)
    node.step(0.0)
    node.add(1, 0.5, 4, max_new=2, priority=20)
    node.step(1.0)
    last = node.sched.decisions.recent(1)[0]
    assert (last["requeued"], last["admitted"]) == (((0, "slots"),), (1,))
    node.step(2.0)
    assert node.sched.decisions.recent(1)[0]["requeued"] == ()


def test_waiting_without_a_plan_is_recorded_once() -> None:
    node = Clocked(dataclasses.replace(LIMITS, role="decode"))
    state = node.probe.state
    node.add(0, 0.0, 4)
    state.slots.clear()
    for now in (1.0, 2.0, 3.0):
        assert node.step(now) is None
    records = node.sched.decisions.recent()
    assert [(r["mode"], r["stopped_by"], r["now"]) for r in records] == [("idle", "no_slot", 1.0)]
    assert not node.sched.decisions.steps


def test_ring_keeps_the_last_ones() -> None:
    node = Clocked(dataclasses.replace(LIMITS, num_pages=1000))
    node.add(0, 0.0, 4, max_new=step_log.RING + 50)
    for now in range(step_log.RING + 40):
        node.step(float(now))
    records = node.sched.decisions.recent()
    assert len(records) == step_log.RING
    assert records[-1]["step"] == step_log.RING + 40
    assert (
        node.sched.decisions.steps[ForwardMode.DECODE, StopReason.QUEUE_EMPTY] == step_log.RING + 39
    )
