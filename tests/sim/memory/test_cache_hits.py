"""Cached tokens are counted where they come from: scripted traces with exact numbers, and conservation under load."""

from __future__ import annotations

import random

import pytest

from baton.sched.policies import PolicyParams
from baton.sched.setup.limits import Limits
from tests.support.effort import seeds
from tests.support.sched.sched_sim import VOCAB, Node, chain, random_prompt, request

PAGE = 4
HEAD = [1, 2, 3, 4] * 4
"""A shared prefix of four pages."""


def hits(node: Node) -> dict[str, int]:
    """Sources that are not 0."""
    return {source: tokens for source, tokens in node.sched.hit_tokens.items() if tokens}


def make(depth: int = 1, **over: object) -> Node:
    values: dict[str, object] = {
        "num_pages": 64,
        "page_size": PAGE,
        "max_running_requests": 8,
        "max_queued_requests": 1000,
        "step_tokens": 256,
    }
    return Node(Limits(**(values | over)), depth)  # type: ignore[arg-type]


def test_later_request_hits_what_was_computed_before() -> None:
    node = make()
    node.sched.add(request(0, [*HEAD, 0, 1], 1, ignore_eos=True))
    node.run()
    assert hits(node) == {}
    node.sched.add(request(1, [*HEAD, 2, 3], 1, ignore_eos=True))
    node.run()
    assert hits(node) == {"device": 16}
    assert node.cached == {0: 0, 1: 16}


@pytest.mark.parametrize("depth", [1, 2])
def test_prompts_that_arrive_together_share_what_is_only_scheduled(depth: int) -> None:
    node = make(depth)
    for handle in range(3):
        node.sched.add(request(handle, [*HEAD, handle], 1, ignore_eos=True))
    node.run()
    assert node.steps == 1
    assert hits(node) == {"in_flight": 32}
    assert node.cached == {0: 0, 1: 16, 2: 16}


def test_with_overlap_the_step_before_may_still_be_in_flight() -> None:
    node = make(depth=3)
    node.sched.add(request(0, [*HEAD, 0], 4, ignore_eos=True))
    node.step()
    node.sched.add(request(1, [*HEAD, 1], 4, ignore_eos=True))
    node.step()
    assert hits(node) == {"in_flight": 16}
    node.run()
    node.sched.add(request(2, [*HEAD, 2], 4, ignore_eos=True))
    node.step()
    assert hits(node) == {"in_flight": 16, "device": 16}
    node.run()


def test_pages_that_another_prompt_computed_between_two_chunks_count() -> None:
    """The long prompt gets a chunk, the short one overtakes it and computes the rest of what they share."""
    node = make(policy="srpt-aging", policy_params=PolicyParams(srpt_aging=0.0), step_tokens=8)
    node.sched.add(request(0, HEAD + [0] * 20, 1, ignore_eos=True, is_length_known=False))
    node.step()
    node.sched.add(request(1, [*HEAD, 1], 1, ignore_eos=True, is_length_known=False))
    node.run()
    assert hits(node) == {"device": 16}
    assert node.cached == {1: 8, 0: 8}
    assert node.probe.computed_tokens == 36 + 17 - 16


def test_pages_a_retracted_request_finds_again_are_no_hit() -> None:
    node = make(num_pages=10, page_size=1, step_tokens=16, schedule_conservativeness=0.01)
    for handle in range(3):
        node.sched.add(request(handle, [handle + 1, 3], 6, ignore_eos=True, is_length_known=False))
    node.run()
    assert node.sched.report.counters()["retractions_total"] > 0
    assert set(hits(node)) == {"rematch"}
    assert node.cached == {0: 0, 1: 0, 2: 0}


def test_suspended_request_finds_its_own_pages_as_rematch() -> None:
    node = make()
    node.sched.add(request(0, HEAD, 8, ignore_eos=True))
    for _ in range(3):
        node.step()
    node.sched.suspend([0])
    node.sched.resume([0])
    node.run()
    assert hits(node) == {"rematch": 16}
    assert node.cached == {0: 0}


def test_d_counts_what_p_need_not_send() -> None:
    node = make(role="decode")
    for handle in range(2):
        node.sched.add(request(handle, [*HEAD, handle], 2, room=handle + 1, ignore_eos=True))
        node.step()
        grant = node.grants[handle + 1]
        assert (grant.start_page, len(grant.pages)) == ((0, 5) if handle == 0 else (4, 1))
        state = 1
        for offset, token in enumerate([*HEAD, handle]):  # what P would have written
            state = chain(state, token)
            page = offset // PAGE - grant.start_page
            if page >= 0:
                node.device.memory[grant.pages[page]][offset % PAGE] = state
        node.sched.transfer_committed(handle + 1, 3, 0, None)
        node.run()
    assert hits(node) == {"decode_tree": 16}


@pytest.mark.parametrize("seed", seeds(40))
def test_sources_add_up_to_the_reported_cached_tokens_and_the_work_saved(seed: int) -> None:
    rng = random.Random(seed)
    page = rng.choice([1, 2, 4])
    node = make(
        depth=rng.choice([1, 2, 3]),
        num_pages=rng.randint(200, 400) // page,
        page_size=page,
        step_tokens=page * rng.randint(1, 8),
        policy=rng.choice(["fcfs", "lpm", "srpt-aging"]),
        max_running_requests=rng.choice([1, 4]),
    )
    shared = [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 16))] for _ in range(3)]
    prompts = {}
    for handle in range(40):
        prompts[handle] = random_prompt(rng, shared, 24)
        node.sched.add(request(handle, prompts[handle], rng.randint(1, 10), ignore_eos=True))
        for _ in range(rng.randint(0, 4)):
            node.step()
    node.run()
    counted = node.sched.hit_tokens
    total = sum(node.cached.values())
    assert node.sched.report.counters()["retractions_total"] == 0, (
        "the pool is meant to be large enough"
    )
    assert counted["device"] + counted["in_flight"] == total > 0
    assert counted["rematch"] == counted["decode_tree"] == 0
    assert node.probe.computed_tokens == sum(map(len, prompts.values())) - total
