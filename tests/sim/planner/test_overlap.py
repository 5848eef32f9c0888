"""Overlap: step n+1 is planned and launched before the results of step n are known, with the same results.

The first half scripts what arrives one step late; the second runs the production engine loop with its device thread on
a pretend device that takes a random amount of work per step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import threading

import pytest

from baton.errors import EngineDead
from baton.runtime.engine_loop import EngineLoop
from baton.sched.scheduler import Scheduler
from baton.sched.setup.limits import Limits
from baton.sched.types.plan import StepPlan, StepResult
from baton.sched.types.priority import PriorityRule
from baton.sched.types.request import FinishReason, ValidatedRequest
from tests.support.probes import SchedulerProbe
from tests.support.sched.sched_sim import (
    EOS,
    VOCAB,
    Device,
    Node,
    random_prompt,
    reference,
    request,
)


def ending_with_eos(length: int) -> list[int]:
    """A prompt whose answer is `length` tokens long, the last of them EOS."""
    for seed in range(10_000):
        prompt = random.Random(seed).choices(range(VOCAB), k=4)
        answer = reference(request(0, prompt, 50).prompt, 50, False)
        if len(answer) == length and answer[-1] == EOS:
            return prompt
    raise AssertionError("no such prompt")


def node(**over: object) -> Node:
    values: dict[str, object] = {
        "num_pages": 60, "page_size": 2, "max_running_requests": 2, "max_queued_requests": 100, "step_tokens": 16
    }  # fmt: skip
    return Node(Limits(**(values | over)), depth=2)  # type: ignore[arg-type]


def rows_in_flight(at: Node) -> list[int]:
    return [row.handle for plan in at.flight for row in plan.rows]


def test_eos_is_noticed_a_step_late_and_the_extra_token_is_dropped() -> None:
    at = node()
    prompt = ending_with_eos(5)
    at.sched.add(request(0, prompt, 50))
    while 0 not in at.finished:
        at.step()
    assert rows_in_flight(at) == [0], "one row too many is on its way"
    at.run()
    assert at.outputs[0] == reference(request(0, prompt, 50).prompt, 50, False)
    assert at.finished[0] is FinishReason.STOP
    at.sched.ledger().check_idle(60)


def test_last_allowed_token_is_known_ahead_so_no_row_is_wasted() -> None:
    at = node()
    at.sched.add(request(0, [1, 2, 3], 5, ignore_eos=True))
    while 0 not in at.finished:
        at.step()
    assert rows_in_flight(at) == []
    assert at.steps == 5


def test_stop_string_is_an_abort_that_comes_a_step_late() -> None:
    """The front finds the stop string in token 3 and aborts; token 4 is being computed and is never heard of."""
    at = node()
    at.sched.add(request(0, [1, 2, 3], 40, ignore_eos=True))
    while len(at.outputs.get(0, [])) < 3:
        at.step()
    assert rows_in_flight(at) == [0]
    at.sched.abort(0)
    at.run()
    assert at.outputs[0] == reference(request(0, [1, 2, 3], 40).prompt, 3, True)
    at.sched.ledger().check_idle(60)


def test_pages_of_an_aborted_row_in_flight_may_be_reused_by_the_next_step() -> None:
    at = node(num_pages=12, radix_cache=False, schedule_conservativeness=0.05)
    at.sched.add(request(0, [1] * 8, 10, ignore_eos=True))
    for _ in range(4):
        at.step()
    assert rows_in_flight(at) == [0]
    held = {page for seq in at.probe.seqs.values() for page in seq.pages}
    at.sched.abort(0)
    at.sched.add(request(1, [2] * 20, 3, ignore_eos=True))
    at.step()
    assert held & set(at.flight[-1].new_pages), "the next request waits for no commit"
    at.run()
    assert at.outputs[1] == reference(request(1, [2] * 20, 3).prompt, 3, True)


def test_row_preempted_in_flight_keeps_the_token_it_was_computing() -> None:
    at = node(max_running_requests=1, priority=PriorityRule(enabled=True, preemption_threshold=0))
    at.sched.add(dataclasses.replace(request(0, [1, 2, 3], 30, ignore_eos=True), priority=0))
    for _ in range(5):
        at.step()
    known = len(at.outputs[0])
    assert rows_in_flight(at) == [0]
    at.sched.add(dataclasses.replace(request(1, [3, 2, 1], 3, ignore_eos=True), priority=9))
    at.step()
    assert at.sched.report.counters()["preemptions_total"] == 1
    assert len(at.outputs[0]) == known + 1, "the step in flight was committed after the preemption"
    at.run()
    assert at.outputs == {
        h: reference(request(h, p, n).prompt, n, True)
        for h, p, n in [(0, [1, 2, 3], 30), (1, [3, 2, 1], 3)]
    }


class RandomDevice:
    """The pretend device behind the production runner's face; every step burns a random amount of CPU first."""

    def __init__(self, limits: Limits, seed: int) -> None:
        self.device = Device(limits)
        self.rng = random.Random(seed)

    def execute(self, plan: StepPlan) -> StepResult:
        blob = b"x" * 4096
        for _ in range(self.rng.choice([0, 0, 3, 30, 300])):
            blob = hashlib.sha256(blob).digest() * 128
        return self.device.execute(plan)


def test_broken_page_ledger_ends_the_requests_and_not_the_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = Limits(30, 2, 4, 1000, 8)
    device = RandomDevice(limits, 0)
    engine = EngineLoop(Scheduler(limits), device, None, overlap=True, clock=lambda: 0.0)  # type: ignore[arg-type]
    try:
        engine.submit(request(1, [1, 2, 3], 5, ignore_eos=True))
        engine.step(0.0)
        lost = SchedulerProbe(engine.sched).memory.allocator.alloc(1)
        assert lost is not None
        assert not any(name.startswith("kv_pages") for name in engine.gauges())
        assert engine.not_accepting_reason is not None
        assert "sums to 29 of 30" in engine.not_accepting_reason
        assert engine.gauges()["page_ledger_healthy"] == 0
        (record,) = caplog.records
        assert '"rid": "r1"' in record.message
        with pytest.raises(EngineDead, match="sums to 29 of 30") as refused:
            engine.submit(request(2, [1, 2, 3], 5))
        assert refused.value.retry_after_secs == 5
        said, busy = engine.step(0.0)
        while busy:
            more, busy = engine.step(0.0)
            said += more
        assert engine.sched.is_idle
        (ended,) = said
        assert (ended.finish, ended.handle, ended.retry_after_secs) == (FinishReason.ERROR, 1, 5)
        assert ended.error is not None
        assert ended.error[0] == "engine_dead"
    finally:
        engine.close()


def answers(
    seed: int, overlap: bool
) -> tuple[dict[int, list[int]], dict[int, FinishReason], set[int]]:
    """Outputs and ends of a scripted crowd; aborts are bound to what was heard, so that they mean the same anywhere."""
    rng = random.Random(seed)
    limits = Limits(
        rng.randint(14, 60), 2, rng.choice([1, 2, 4]), 1000, 2 * rng.randint(1, 6),
        schedule_conservativeness=rng.choice([0.05, 1.0]),
        priority=PriorityRule(enabled=rng.random() < 0.5, preemption_threshold=0),
    )  # fmt: skip
    device = RandomDevice(limits, seed)
    engine = EngineLoop(Scheduler(limits), device, None, overlap=overlap, clock=lambda: 0.0)  # type: ignore[arg-type]
    heads = [[rng.randrange(VOCAB) for _ in range(9)] for _ in range(2)]
    crowd: list[ValidatedRequest] = []
    for handle in range(25):
        prompt = random_prompt(rng, heads, min(20, limits.capacity_tokens - 1))
        req = request(handle, prompt, rng.randint(1, 12), ignore_eos=rng.random() < 0.5)
        crowd.append(dataclasses.replace(req, priority=rng.choice([0, 5])))
    abort_after = {handle: rng.randint(1, 4) for handle in range(25) if rng.random() < 0.2}
    got: dict[int, list[int]] = {req.handle: [] for req in crowd}
    ends: dict[int, FinishReason] = {}
    todo = list(crowd)
    try:
        busy = True
        while busy or todo:
            for _ in range(rng.choice([0, 0, 1, 3])):
                if todo:
                    engine.submit(todo.pop(0))
            outputs, busy = engine.step(0.0)
            for out in outputs:
                if out.handle in ends:
                    raise AssertionError("output after the end")
                got[out.handle].extend(out.tokens)
                if out.finish is not None:
                    ends[out.handle] = out.finish
                elif len(got[out.handle]) >= abort_after.get(out.handle, 1000):
                    engine.sched.abort(out.handle)
                    ends[out.handle] = FinishReason.ABORT
        assert engine.gauges()["max_running_requests"] == limits.max_running_requests
        assert engine.not_accepting_reason is None
        assert engine.sched.is_idle
    finally:
        engine.close()
    return got, ends, set(abort_after)


@pytest.mark.parametrize("seed", range(12))
def test_engine_loop_gives_the_same_answers_with_and_without_overlap(seed: int) -> None:
    with_overlap, without = answers(seed, True), answers(seed, False)
    assert with_overlap == without
    got, ends, _ = with_overlap
    assert ends.keys() == got.keys()


class GoesOn:
    """A device that computes by itself: while the loop holds a later step, a step does not end before that one has been
    launched. Fails after 10 s if launching waits for results."""

    def __init__(self, limits: Limits, fails_at: int = -1) -> None:
        self.device = Device(limits)
        self.engine: EngineLoop | None = None
        self.launched = -1
        self.ahead = 0
        self.fails_at = fails_at
        self.changed = threading.Condition()

    def execute(self, plan: StepPlan) -> Going:
        result = self.device.execute(plan)
        with self.changed:
            self.launched = plan.step
            self.changed.notify_all()
        return Going(self, plan.step, result)


@dataclasses.dataclass
class Going:
    device: GoesOn
    step: int
    result: StepResult

    def wait(self) -> tuple[StepResult, float]:
        device = self.device
        assert device.engine is not None
        if self.step == device.fails_at:
            raise ValueError("an illegal memory access was encountered")
        if device.engine._flight:
            with device.changed:
                assert device.changed.wait_for(lambda: device.launched > self.step, timeout=60), (
                    "launching waits"
                )
            device.ahead += 1
        return self.result, 0.25


def going_on(overlap: bool, fails_at: int = -1) -> tuple[EngineLoop, GoesOn]:
    limits = Limits(60, 2, 4, 100, 16)
    device = GoesOn(limits, fails_at)
    device.engine = EngineLoop(Scheduler(limits), device, None, overlap=overlap, clock=lambda: 0.0)
    return device.engine, device


@pytest.mark.parametrize("overlap", [True, False])
def test_device_that_goes_on_by_itself_has_its_next_step_before_the_last_one_ends(
    overlap: bool,
) -> None:
    engine, device = going_on(overlap)
    asked = [request(handle, [handle, 1, 2], 12, ignore_eos=True) for handle in range(3)]
    got: dict[int, list[int]] = {req.handle: [] for req in asked}
    for req in asked:
        engine.submit(req)
    busy = True
    while busy:
        outputs, busy = engine.step(0.0)
        for out in outputs:
            got[out.handle].extend(out.tokens)
    assert got == {req.handle: reference(req.prompt, 12, True) for req in asked}
    steps = engine.counters["engine_steps_total"]
    assert device.ahead == (steps - 1 if overlap else 0)
    assert engine.counters["engine_step_seconds_total"] == 0.25 * steps, (
        "as the device says, not as launching took"
    )
    engine.close()


def test_error_after_the_launch_names_the_step() -> None:
    engine, _ = going_on(overlap=True, fails_at=2)
    engine.submit(request(0, [1, 2, 3], 12, ignore_eos=True))
    for _ in range(2):
        engine.step(0.0)  # the second turn plans step 2 and collects step 1
    with pytest.raises(
        RuntimeError, match="step 2 failed on the device: ValueError: an illegal memory access"
    ):
        engine.step(0.0)
    engine.close()
