"""The order inside a step: whose are the pages and the chunk tokens, who is sent back last, whose token comes first."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from baton.sched.fairness.fair_queue import FairnessRules
from baton.sched.scheduler import Scheduler
from baton.sched.setup.limits import Limits
from baton.sched.types.events import EmittedTokens
from baton.sched.types.plan import StepPlan, StepResult
from baton.sched.types.priority import PriorityRule
from baton.sched.types.request import ValidatedRequest
from tests.support.probes import SchedulerProbe
from tests.support.sched.scenarios import FAIR
from tests.support.sched.sched_sim import VOCAB, Node, random_prompt, reference, request

PRIORITY = PriorityRule(enabled=True)


def limits(**changes: object) -> Limits:
    return dataclasses.replace(Limits(400, 4, 8, 100, 64, priority=PRIORITY), **changes)  # type: ignore[arg-type]


def important(
    handle: int, priority: int | None, prompt_tokens: int = 4, max_new: int = 50
) -> ValidatedRequest:
    prompt = [handle % VOCAB, *[1] * (prompt_tokens - 1)]
    req = request(handle, prompt, max_new, ignore_eos=True, is_length_known=False)
    return dataclasses.replace(req, priority=priority)


def turn(sched: Scheduler, now: float = 0.0) -> StepPlan:
    plan = sched.plan(now)
    assert plan is not None
    sched.commit(plan, StepResult([1] * sum(row.sample for row in plan.rows)), now)
    return plan


def rows(plan: StepPlan) -> list[int]:
    return [row.handle for row in plan.rows]


def test_decode_rows_and_their_tokens_stand_by_priority_then_arrival() -> None:
    sched = Scheduler(limits())
    for handle, priority in ((0, None), (1, 5), (2, 0), (3, 5), (4, 9)):
        sched.add(important(handle, priority))
        turn(sched)  # admitted one by one
    sched.drain_events()
    assert rows(turn(sched)) == [4, 1, 3, 2, 0]
    assert [e.handle for e in sched.drain_events() if isinstance(e, EmittedTokens)] == [
        4,
        1,
        3,
        2,
        0,
    ]
    sched.abort(1)
    sched.suspend([4])
    assert rows(turn(sched)) == [3, 2, 0]
    sched.resume([4])
    turn(sched)
    assert rows(turn(sched)) == [4, 3, 2, 0]


def test_without_priorities_decode_rows_stand_by_arrival_whatever_the_policy() -> None:
    sched = Scheduler(limits(policy="lof", priority=PriorityRule(), step_tokens=4))
    for handle in range(3):
        sched.add(important(handle, 10 * handle, max_new=50 + handle))
    assert [rows(turn(sched))[-1] for _ in range(3)] == [2, 1, 0], (
        "lof admits the longest answer first"
    )
    assert rows(turn(sched)) == [0, 1, 2]


def test_aging_orders_decode_rows_until_its_maximum_is_reached() -> None:
    rule = PriorityRule(enabled=True, aging_rate=1.0, aging_max=10.0)
    sched = Scheduler(limits(priority=rule))
    for handle, priority, arrival in ((0, 0, 0.0), (1, 4, 8.0)):
        sched.add(dataclasses.replace(important(handle, priority), arrival=arrival))
    turn(sched, 8.0)
    assert rows(turn(sched, 8.0)) == [0, 1], "8 units of waiting against 4 of priority"
    assert rows(turn(sched, 13.9)) == [0, 1], "10, the most, against 4 + 5.9"
    assert rows(turn(sched, 14.1)) == [1, 0], "10 against 4 + 6.1"


def test_priority_adjusted_while_it_runs_moves_its_row() -> None:
    sched = Scheduler(limits())
    for handle in range(3):
        sched.add(important(handle, 0))
    turn(sched)
    sched.adjust_priorities({2: 1.0})
    assert rows(turn(sched)) == [2, 0, 1]
    sched.adjust_priorities({2: None})
    assert rows(turn(sched)) == [0, 1, 2]


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "lof", "hrrn", "srpt-aging"])
@pytest.mark.parametrize("fairness", [FairnessRules(), FAIR], ids=["plain", "classes"])
def test_chunk_tokens_go_to_the_more_important_prompt_first(
    policy: str, fairness: FairnessRules
) -> None:
    sched = Scheduler(limits(policy=policy, step_tokens=16, fairness=fairness))
    sched.add(important(0, 0, 100))
    assert rows(turn(sched)) == [0]
    sched.add(important(1, 1, 24))
    sched.add(important(2, 0, 24))
    assert rows(turn(sched)) == [1], (
        "the prompt under way has to wait: no preemption, it keeps its pages"
    )
    assert [(row.handle, row.n) for row in turn(sched).rows] == [(1, 8), (0, 8)]
    if policy in ("fcfs", "lof", "hrrn"):
        assert rows(turn(sched)) == [1, 0], "among equals the prompt under way goes on"
    assert sched.report.counters()["preemptions_total"] == 0


def test_cap_on_unfinished_prompts_never_delays_a_more_important_one() -> None:
    sched = Scheduler(limits(step_tokens=16, max_partial_prefills=2))
    for handle in range(4):
        sched.add(important(handle, handle, 100))
        assert rows(turn(sched)) == [handle]


@pytest.mark.parametrize(("length", "starts"), [(8, True), (100, False)])
def test_behind_too_many_unfinished_prompts_only_what_one_step_completes_may_start(
    length: int, starts: bool
) -> None:
    """Each prompt gets 16 tokens of a step's 64, so there is budget for others behind the two under way."""
    sched = Scheduler(
        limits(step_tokens=64, max_partial_prefills=2, long_prefill_token_threshold=16)
    )
    for handle in range(2):
        sched.add(important(handle, 5, 100))
    assert rows(turn(sched)) == [0, 1]
    sched.add(important(2, 5, length))
    assert rows(turn(sched)) == ([0, 1, 2] if starts else [0, 1])


def test_reserved_request_goes_before_less_important_prompts_under_way() -> None:
    """The reserved request fits once 1 has ended; but 4, first in the order, uses up what a step may pass over."""
    sched = Scheduler(limits(num_pages=60, step_tokens=16, policy="lof", admission_skip_ahead=0,
                             priority=PriorityRule(enabled=True, preemption_threshold=100)))  # fmt: skip

    def add(handle: int, priority: int, prompt_tokens: int, max_new: int) -> None:
        prompt = [handle] * prompt_tokens
        sched.add(
            dataclasses.replace(
                request(handle, prompt, max_new, ignore_eos=True), priority=priority
            )
        )

    add(0, 5, 4, 60)
    turn(sched)
    add(1, 5, 60, 30)
    while rows(turn(sched)) != [0, 1] or SchedulerProbe(sched).seqs[1].computed < 60:
        pass
    add(2, 0, 60, 4)
    assert rows(turn(sched)) == [0, 1, 2]
    add(3, 5, 60, 4)
    assert rows(turn(sched)) == [0, 1, 2], "no pages for 3"
    sched.abort(1)
    add(4, 5, 60, 120)
    assert rows(turn(sched)) == [0, 3]


def test_most_important_row_gets_the_last_page_and_is_sent_back_last() -> None:
    sched = Scheduler(limits(num_pages=8, radix_cache=False, schedule_conservativeness=0.01))
    for handle, priority in ((0, 1), (1, 2), (2, 9), (3, 0)):
        sched.add(important(handle, priority, 4, 20))
        turn(sched)
    gone: list[int] = []
    while sched.report.counts()["running"] > 1:
        plan = turn(sched)
        running = set(SchedulerProbe(sched).running)
        gone += [h for h in (0, 1, 2, 3) if h not in running and h not in gone]
        assert rows(plan) == sorted(rows(plan), key=lambda h: [2, 1, 0, 3].index(h))
    assert gone == [3, 0, 1]
    assert set(SchedulerProbe(sched).running) == {2}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("depth", [1, 2])
def test_place_of_a_row_changes_no_token(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    heads = [[rng.randrange(VOCAB) for _ in range(12)] for _ in range(2)]
    prompts = [random_prompt(rng, heads, 30) for _ in range(4)]
    for order in itertools.permutations(range(4)):
        node = Node(limits(num_pages=40, step_tokens=rng.choice([8, 64])), depth)
        for handle, prompt in enumerate(prompts):
            node.sched.add(dataclasses.replace(request(handle, prompt, 12), priority=order[handle]))
        node.run()
        for handle, prompt in enumerate(prompts):
            assert node.outputs[handle] == reference(request(handle, prompt, 12).prompt, 12, False)
