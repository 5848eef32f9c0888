"""Suspension by an operator: nothing lost, nothing leaked, place and deadline kept; on one node and on a pair."""

from __future__ import annotations

import dataclasses
import random

import pytest

from baton.cache.eviction import EVICTION_POLICIES
from baton.errors import QueueFull, WrongState
from baton.sched.policies import POLICIES
from baton.sched.setup.limits import Limits
from baton.sched.types.priority import PriorityRule
from baton.sched.types.request import FinishReason
from baton.sched.types.sequence import SeqState
from tests.support.effort import seeds
from tests.support.sched.fake_transfer import FakeTransfer
from tests.support.sched.sched_sim import (
    VOCAB,
    Node,
    add_random_request,
    random_prompt,
    reference,
    request,
)


def storm(node: Node, rng: random.Random, handles: list[int]) -> None:
    """Suspend or resume some requests, whatever their state."""
    for handle in rng.sample(handles, min(len(handles), rng.randint(0, 3))):
        if rng.random() < 0.5:
            try:
                node.sched.suspend([handle])
            except WrongState:
                assert node.probe.seqs[handle].state in (
                    SeqState.OPENING, SeqState.TRANSFER, SeqState.LEASED, SeqState.ABORTING,
                )  # fmt: skip
        else:
            node.sched.resume([handle])
        node.sched.ledger()


def settle(node: Node) -> None:
    node.sched.resume(list(node.probe.state.suspended))
    node.run()


@pytest.mark.parametrize("seed", seeds(80))
def test_storms_of_suspend_resume_abort_and_preempt_change_no_token(seed: int) -> None:
    rng = random.Random(seed)
    page = rng.choice([1, 2, 4])
    node = Node(
        Limits(
            rng.randint(12, 60) * (4 // page), page, rng.choice([1, 2, 6]), 1000, page * rng.randint(1, 6),
            policy=rng.choice(sorted(POLICIES)),
            priority=PriorityRule(enabled=rng.random() < 0.5, preemption_threshold=rng.choice([0, 3])),
            preemption_mode=rng.choice(["recompute", "cache", "offload", "auto"]),
            host_pages=rng.choice([0, 3, 20, 100]),
            radix_eviction_policy=rng.choice(sorted(EVICTION_POLICIES)),
            schedule_conservativeness=rng.choice([0.1, 1.0]),
            radix_cache=rng.random() < 0.8,
        ),
        depth=rng.choice([1, 2]),
    )  # fmt: skip
    shared = [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 16))] for _ in range(3)]
    want, aborted = {}, set()
    for handle in range(40):
        want[handle] = add_random_request(node, rng, handle, shared)
        for _ in range(rng.randint(0, 5)):
            storm(node, rng, list(want))
            node.step()
        if rng.random() < 0.1 and (victim := rng.randrange(handle + 1)) not in node.finished:
            aborted.add(victim)
            node.sched.abort(victim)
    settle(node)
    for handle, tokens in want.items():
        got = node.outputs.get(handle, [])
        assert got == (tokens[: len(got)] if handle in aborted else tokens), (
            f"seed {seed} request {handle}"
        )
    assert node.sched.is_idle
    assert node.sched.report.counters()["suspensions_total"] > 0
    node.sched.ledger().check_idle(node.limits.num_pages)


@pytest.mark.parametrize("seed", seeds(60))
def test_storms_on_both_nodes_of_a_pair_change_no_token(seed: int) -> None:
    """P holds what it has announced, so D never reads a page that was reused; D refuses until it decodes."""
    rng = random.Random(7000 + seed)
    page = rng.choice([1, 2, 4])

    def half(role: str) -> Node:
        lim = Limits(
            1000 // page, page, rng.choice([1, 2, 6]), 1000, page * rng.randint(1, 6), role=role,
            num_reserved_decode_tokens=rng.choice([0, 8]), radix_cache=rng.random() < 0.8,
            policy=rng.choice(["fcfs", "srpt-aging"]), preemption_mode=rng.choice(["cache", "offload"]),
            host_pages=rng.choice([0, 50]),
        )  # fmt: skip
        return Node(lim, depth=rng.choice([1, 2]))

    p, d = half("prefill"), half("decode")
    transfer = FakeTransfer(p, d, rng, break_rate=0.0)
    shared = [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 16))] for _ in range(3)]
    want: dict[int, list[int]] = {}

    def turn() -> None:
        for each in (p, d):
            storm(each, rng, list(want))
            each.step()
        transfer.tick()

    for handle in range(20):
        req = request(
            handle,
            random_prompt(rng, shared, 40),
            rng.randint(1, 20),
            ignore_eos=True,
            room=1000 + handle,
        )
        for each in rng.sample([p, d], 2):
            each.sched.add(req)
        want[handle] = reference(req.prompt, req.params.max_new_tokens, True)
        for _ in range(rng.randint(0, 4)):
            turn()
    for _ in range(40):
        turn()
    for _ in range(3000):
        for each in (p, d):
            each.sched.resume(list(want))
        p.step()
        d.step()
        transfer.tick()
        if d.sched.is_idle and p.sched.is_idle:
            break
    d.absorb()
    assert d.outputs == want
    assert (
        p.sched.report.counters()["suspensions_total"]
        + d.sched.report.counters()["suspensions_total"]
        > 0
    )
    for each in (p, d):
        each.sched.ledger().check_idle(each.limits.num_pages)


def test_suspended_request_keeps_its_place_and_passes_a_full_queue() -> None:
    node = Node(Limits(200, 4, 1, 2, 64), depth=1)
    for handle in range(2):
        node.sched.add(request(handle, [1] * 5, 6, ignore_eos=True))
    node.step()
    assert node.sched.suspend([0, 1]) == 2
    assert not node.step() or node.sched.report.counts()["suspended"] == 2
    for handle in (2, 3):
        node.sched.add(request(handle, [1] * 5, 6, ignore_eos=True))
    with pytest.raises(QueueFull):
        node.sched.add(request(4, [1] * 5, 6))
    assert node.sched.resume([0, 1]) == 2, "the limit is for new requests"
    node.run()
    assert list(node.finished) == [0, 1, 2, 3], "by arrival"


def test_suspended_requests_rest_until_their_deadline_and_then_end() -> None:
    node = Node(Limits(200, 4, 4, 9, 64), depth=2)
    node.sched.add(dataclasses.replace(request(0, [1] * 9, 50, ignore_eos=True), deadline=5.0))
    for _ in range(6):
        node.step()
    node.sched.suspend([0])
    node.run()
    heard = list(node.outputs[0])
    assert not node.step(), "no busy loop"
    assert node.sched.ledger().held == 0, "its pages are free for others"
    node.sched.expire(5.0)
    node.run()
    assert node.errors[0][0] == "timeout"
    assert (
        node.outputs[0]
        == heard
        == reference(request(0, [1] * 9, 50).prompt, 50, True)[: len(heard)]
    )
    node.sched.ledger().check_idle(200)


def test_states_in_which_a_request_cannot_be_suspended_change_nothing() -> None:
    d = Node(Limits(64, 4, 4, 100, 64, role="decode"), depth=1)
    d.sched.add(request(0, [1] * 6, 4, room=1))
    d.sched.add(request(1, [1] * 6, 4, ignore_eos=True))
    d.step()
    with pytest.raises(WrongState, match="request r0 is transfer"):
        d.sched.suspend([1, 0])
    assert d.sched.report.counts()["suspended"] == 0, "all or none"
    assert (d.sched.suspend([77]), d.sched.resume([77])) == (0, 0)
    assert d.sched.resume([0, 1]) == 2, "not suspended: nothing to do"
    p = Node(Limits(64, 4, 4, 100, 64, role="prefill"), depth=1)
    p.sched.add(request(0, [1] * 6, 4, room=1))
    p.run()
    with pytest.raises(WrongState, match="is leased"):
        p.sched.suspend([0])


def test_last_step_of_a_suspended_prompt_still_leases_it() -> None:
    """P: the whole prompt was in flight when it was suspended, and resumed or not, its first token goes to D."""
    for resumed in (False, True):
        p = Node(Limits(64, 4, 4, 100, 64, role="prefill"), depth=2)
        p.sched.add(request(0, [1] * 6, 4, room=1))
        p.step()
        p.sched.suspend([0])
        if resumed:
            p.sched.resume([0])
        p.run()
        assert p.done[1].total_pages == 2
        assert sorted(p.final_pages[1]) == [0, 1]
        p.sched.release(1)
        p.sched.ledger().check_idle(64)


def test_suspended_prompts_release_pages_when_nothing_else_can() -> None:
    p = Node(Limits(12, 4, 4, 100, 8, role="prefill"), depth=1)
    p.sched.add(request(0, [1] * 40, 4, room=1))
    for _ in range(3):
        p.step()
    p.sched.suspend([0])
    assert p.sched.ledger().held >= 6, "announced pages stay"
    p.sched.add(request(1, [2] * 40, 4, room=2))
    p.run()
    assert 2 in p.done, "the other prompt is not held up by it"
    p.sched.release(2)
    p.sched.resume([0])
    p.run()
    assert p.done[1].token == reference(request(0, [1] * 40, 1).prompt, 1, True)[0]
    assert p.finished == {0: FinishReason.LENGTH, 1: FinishReason.LENGTH}
