"""How long one unlucky request waits behind an endless stream of luckier ones: the bound of every aging rule.

Each rule is also run without its aging, where the request starves for all of LIMIT_SECS: the bound comes from the rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from baton.sched.policies import PolicyParams
from baton.sched.setup.limits import Limits
from baton.sched.types.priority import PriorityRule
from baton.sched.types.request import ValidatedRequest
from tests.support.sched.sched_sim import Node, request
from tests.support.sched.watched import WatchedScheduler

STEP = 0.05
"""Seconds per step."""
LIMIT_SECS = 30.0
"""Simulated time after which a request counts as starved."""
QUEUED = 5
"""Lucky requests that may stand in the queue already when the bound is reached, and the step under way."""
HEAD = [1, 2, 3, 4] * 10


def one_at_a_time(**over: object) -> Limits:
    values = {
        "num_pages": 400, "page_size": 4, "max_running_requests": 1, "max_queued_requests": 100, "step_tokens": 400,
        "role": "prefill",
    }  # fmt: skip
    return Limits(**(values | over))  # type: ignore[arg-type]


def wait_of(
    unlucky: ValidatedRequest,
    lucky: Callable[[int], ValidatedRequest],
    limits: Limits,
    *,
    warm: list[int],
) -> float:
    """Seconds until `unlucky`, arriving at 0, is in a step, with never fewer than three lucky ones in the queue."""
    node = Node(limits, depth=1)
    sched = node.sched = WatchedScheduler(limits)
    if warm:
        sched.add(request(1, warm, 1, room=1))
        node.run()
        sched.release(1)
    sched.add(dataclasses.replace(unlucky, arrival=0.0))
    handle = 1000
    while sched.clock < LIMIT_SECS:
        while sched.report.counts()["waiting"] < 4:
            sched.add(dataclasses.replace(lucky(handle), arrival=sched.clock))
            handle += 1
        plan = sched.plan()
        assert plan is not None
        if any(row.handle == unlucky.handle for row in plan.rows):
            return sched.clock
        sched.clock += STEP
        sched.commit(plan, node.device.execute(plan))
        node.absorb()
        for room in node.done.keys() & {row.handle for row in plan.rows}:
            sched.release(room)
    return LIMIT_SECS


def hit(handle: int) -> ValidatedRequest:
    return request(handle, [*HEAD, handle % 5, handle // 5 % 5], 1, room=handle)


def short(handle: int) -> ValidatedRequest:
    return request(handle, [handle % 5, handle // 5 % 5, handle // 25 % 5], 1, room=handle)


def important(handle: int) -> ValidatedRequest:
    return dataclasses.replace(short(handle), priority=7)


COLD = request(500, [0] * 42, 1, room=500)
LONG = request(500, [0] * 350, 1, room=500)
MINOR = dataclasses.replace(short(500), priority=2)


@pytest.mark.parametrize("rate", [9.7, 41.3])
def test_cold_prompt_under_lpm_waits_for_its_lack_of_hits_at_the_aging_rate(rate: float) -> None:
    limits = one_at_a_time(policy="lpm", policy_params=PolicyParams(lpm_aging_tokens_per_s=rate))
    waited = wait_of(COLD, hit, limits, warm=HEAD)
    assert 0 < waited <= len(HEAD) / rate + QUEUED * STEP
    assert wait_of(COLD, hit, one_at_a_time(policy="lpm"), warm=HEAD) == LIMIT_SECS


@pytest.mark.parametrize("rate", [29.3, 101.7])
def test_long_prompt_under_short_first_waits_for_its_length_at_the_aging_rate(
    rate: float,
) -> None:
    limits = one_at_a_time(
        policy="short-first", policy_params=PolicyParams(short_first_aging_tokens_per_s=rate)
    )
    assert 0 < wait_of(LONG, short, limits, warm=[]) <= len(LONG.prompt) / rate + QUEUED * STEP
    limits = one_at_a_time(
        policy="short-first", policy_params=PolicyParams(short_first_aging_tokens_per_s=0)
    )
    assert wait_of(LONG, short, limits, warm=[]) == LIMIT_SECS


def test_long_prompt_under_srpt_waits_for_its_length_at_a_share_of_the_prefill_rate() -> None:
    limits = one_at_a_time(policy="srpt-aging", policy_params=PolicyParams(srpt_aging=0.05))
    assert (
        0
        < wait_of(LONG, short, limits, warm=[])
        <= len(LONG.prompt) / (0.05 * 2000) + QUEUED * STEP
    )
    limits = one_at_a_time(policy="srpt-aging", policy_params=PolicyParams(srpt_aging=0.0))
    assert wait_of(LONG, short, limits, warm=[]) == LIMIT_SECS


@pytest.mark.parametrize("rate", [0.51, 2.03])
def test_low_priority_request_waits_for_the_difference_at_the_aging_rate(rate: float) -> None:
    limits = one_at_a_time(priority=PriorityRule(enabled=True, aging_rate=rate))
    assert 0 < wait_of(MINOR, important, limits, warm=[]) <= (7 - 2 + 1) / rate + QUEUED * STEP
    limits = one_at_a_time(priority=PriorityRule(enabled=True))
    assert wait_of(MINOR, important, limits, warm=[]) == LIMIT_SECS


def test_long_prompt_under_hrrn_waits_until_the_work_done_since_outgrows_its_own() -> None:
    """The ratio is the work done since over 350; a new request's at most four steps' work of 3 over its own 3."""
    late = dataclasses.replace(LONG, handle=10**6)  # ties at the start go to the others
    waited = wait_of(late, short, one_at_a_time(policy="hrrn"), warm=[])
    assert 5.0 < waited <= (len(LONG.prompt) * 4 / 3 + QUEUED) * STEP


def test_request_without_a_deadline_under_edf_has_the_default_one() -> None:
    def urgent(handle: int) -> ValidatedRequest:
        # Due a second after it was sent: always before one that is due in five seconds, until those have passed.
        return dataclasses.replace(short(handle), ttft_deadline=(handle - 1000) * STEP + 1.0)

    limits = one_at_a_time(
        policy="edf", policy_params=PolicyParams(default_deadline_secs=5.0, demote_hopeless=False)
    )
    assert 3.5 < wait_of(short(500), urgent, limits, warm=[]) <= 5.0 + QUEUED * STEP


def test_no_request_overtakes_under_fcfs() -> None:
    assert wait_of(COLD, hit, one_at_a_time(policy="fcfs"), warm=HEAD) == 0.0
