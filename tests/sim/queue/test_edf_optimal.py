"""Earliest deadline first is optimal on one machine: it meets every deadline whenever some order of service does."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from baton.sched.policies import PolicyParams
from baton.sched.setup.limits import Limits
from tests.support.effort import seeds
from tests.support.sched.sched_sim import Node, request

SECS_PER_TOKEN = 0.001


def some_order_meets_all(jobs: list[tuple[int, float]]) -> bool:
    """`jobs`: (tokens, deadline), all there at 0."""
    for order in itertools.permutations(jobs):
        ends = itertools.accumulate(tokens * SECS_PER_TOKEN for tokens, _ in order)
        if all(end <= due + 1e-9 for end, (_, due) in zip(ends, order, strict=True)):
            return True
    return False


def first_tokens(policy: str, jobs: list[tuple[int, float]]) -> list[float]:
    """When each prompt is done, if a step takes as long as it has tokens and holds one prompt's chunk."""
    params = PolicyParams(demote_hopeless=False)
    node = Node(
        Limits(800, 1, 8, 100, 8, policy=policy, policy_params=params, prefill_max_requests=1),
        depth=1,
    )
    for handle, (tokens, due) in enumerate(jobs):
        req = dataclasses.replace(
            request(handle, [handle % 5] * tokens, 1), arrival=0.0, ttft_deadline=due
        )
        node.sched.add(dataclasses.replace(req, namespace=b"%d" % handle))
    now, done = 0.0, {}
    while len(done) < len(jobs):
        plan = node.sched.plan(now)
        assert plan is not None
        now += plan.num_tokens * SECS_PER_TOKEN
        node.sched.commit(plan, node.device.execute(plan), now)
        node.absorb()
        done |= dict.fromkeys(node.finished.keys() - done.keys(), now)
    return [done[handle] for handle in range(len(jobs))]


@pytest.mark.parametrize("seed", seeds(40))
def test_edf_misses_nothing_that_any_order_could_meet(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 40) for _ in range(5)]
    total = sum(sizes) * SECS_PER_TOKEN
    jobs = [(tokens, rng.uniform(tokens * SECS_PER_TOKEN, total * 1.1)) for tokens in sizes]
    missed = [
        end > due + 1e-9 for end, (_, due) in zip(first_tokens("edf", jobs), jobs, strict=True)
    ]
    assert any(missed) is not some_order_meets_all(jobs)


def test_trial_has_both_kinds_and_fcfs_fails_it() -> None:
    jobs = [(40, 0.060), (10, 0.015)]
    assert some_order_meets_all(jobs)
    assert not some_order_meets_all([(40, 0.045), (10, 0.015)])
    ends = first_tokens("fcfs", jobs)
    assert ends == pytest.approx([0.040, 0.050])
    assert first_tokens("edf", jobs) == pytest.approx([0.050, 0.010])
