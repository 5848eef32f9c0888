"""The host tier under the real scheduler on the pretend device: what comes back, what is freed when, who waits."""

from __future__ import annotations

import random

import pytest

from baton.cache.group_pages import GroupRule
from baton.sched.setup.limits import Limits
from baton.sched.types.plan import ForwardMode, StepPlan
from baton.sched.types.priority import PriorityRule
from tests.support.effort import seeds
from tests.support.sched.sched_sim import (
    VOCAB,
    Node,
    add_random_request,
    chain,
    reference,
    request,
)


def run_one(node: Node, handle: int, prompt: list[int], max_new: int = 2) -> int:
    """Runs a request alone; returns how many tokens of its prompt and answer went through the model."""
    before = node.probe.computed_tokens
    node.sched.add(request(handle, prompt, max_new, ignore_eos=True))
    node.run()
    assert node.outputs[handle] == reference(request(handle, prompt, 1).prompt, max_new, True)
    return node.probe.computed_tokens - before


def test_evicted_prompt_comes_back_without_being_computed() -> None:
    for host_pages, again in ((0, 30), (40, 2)):
        node = Node(Limits(10, 4, 4, 100, 64, host_pages=host_pages), depth=1)
        prompt = [1] * 30
        assert run_one(node, 0, prompt) == 30
        run_one(node, 1, [2] * 36)
        assert run_one(node, 2, prompt) == again, "whole pages of all but the last token"
        node.sched.ledger().check_idle(10)


def test_pages_that_gave_nan_do_not_come_back_from_the_host() -> None:
    node = Node(Limits(10, 4, 4, 100, 64, host_pages=40), depth=1)
    prompt = [1] * 30
    run_one(node, 0, prompt)
    node.device.spoil_all()
    run_one(node, 1, [2] * 36)  # the spoiled pages go to the host
    node.sched.add(request(2, prompt, 2, ignore_eos=True))
    node.run()
    assert node.errors[2][0] == "nonfinite_logits"
    assert run_one(node, 3, prompt) == 30
    node.sched.ledger().check_idle(10)


def test_block_that_was_evicted_alone_comes_back_alone() -> None:
    """The window of a cached prompt went to the host; group 0's pages never left the device."""
    window = GroupRule("window", 6, 2)
    node = Node(Limits(60, 4, 4, 100, 64, host_pages=40, page_groups=(window,)), depth=1)
    prompt = [1] * 32
    run_one(node, 0, prompt)
    cache = node.probe.memory.cache
    (group,) = cache.groups
    blocks = group.evictable_pages
    passed = cache._evict_blocks(blocks, passed=True, for_good=False)
    assert 0 < passed < blocks
    assert passed + cache._evict_blocks(blocks, passed=False, for_good=False) == blocks
    node.run()
    assert node.device.copied == blocks
    assert run_one(node, 1, [*prompt, 2, 2]) == 2
    assert node.device.copied == blocks + 2 * window.width, "a row at 32 sees positions 27 to 31"
    node.sched.ledger().check_idle(60)


@pytest.mark.parametrize(("slots", "again"), [(120, 4), (40, 32)])
def test_window_at_the_end_of_a_prompt_is_kept_while_slots_are_free(slots: int, again: int) -> None:
    """Its own answer has left it behind, so that it takes the place of nothing."""
    window = GroupRule("window", 6, 2)
    node = Node(Limits(60, 4, 4, 100, 64, host_pages=slots, page_groups=(window,)), depth=1)
    prompt = [1] * 32
    run_one(node, 0, prompt, 40)
    for handle in range(1, 5):
        run_one(node, handle, [handle + 1] * 32, 40)
    assert run_one(node, 5, prompt) == again
    node.sched.ledger().check_idle(60)


@pytest.mark.parametrize("mode", ["offload", "cache"])
def test_offload_frees_the_pages_at_once_and_keeps_them_for_their_request(mode: str) -> None:
    node = Node(Limits(40, 4, 4, 100, 64, host_pages=20, preemption_mode=mode), depth=1)
    node.sched.add(request(0, [1] * 30, 20, ignore_eos=True))
    for _ in range(5):
        node.step()
    computed = node.probe.computed_tokens
    node.sched.suspend([0])
    host = node.sched.host_ledger()
    assert host is not None
    free = node.sched.ledger().free
    assert (free, host.pinned) == ((40, 8) if mode == "offload" else (32, 0))
    plan = node.sched.plan()
    if mode == "offload":
        assert plan is not None
        assert (plan.mode, plan.rows, len(plan.copies)) == (ForwardMode.IDLE, (), 1), (
            "a step for the copies alone"
        )
        node.sched.commit(plan, node.device.execute(plan))
    assert node.sched.plan() is None
    for handle in range(1, 11):  # more than device and host hold, each asked for twice
        node.sched.add(request(handle, [handle // 2 + 2] * 100, 2, ignore_eos=True))
        node.run()
    before = node.probe.computed_tokens
    node.sched.resume([0])
    node.run()
    assert node.outputs[0] == reference(request(0, [1] * 30, 1).prompt, 20, True)
    tail = node.probe.computed_tokens - before
    assert tail < 5 if mode == "offload" else tail > computed
    host = node.sched.host_ledger()
    assert host is not None
    host.check_idle(20)


def test_offload_without_room_leaves_the_pages_in_the_cache() -> None:
    node = Node(Limits(40, 4, 4, 100, 64, host_pages=8, preemption_mode="offload"), depth=1)
    node.sched.add(request(0, [1] * 30, 20, ignore_eos=True))
    node.step()
    node.sched.suspend([0])
    assert node.sched.ledger().cached == 7, "8 slots, of which 6 may be pinned"
    assert node.sched.plan() is None


@pytest.mark.parametrize(("copy_seconds", "offloads"), [(0.0001, True), (10.0, False)])
def test_auto_offloads_where_copying_is_faster_than_computing(
    copy_seconds: float, offloads: bool
) -> None:
    node = Node(
        Limits(40, 4, 4, 100, 64, host_pages=40, host_pages_per_s=600.0, preemption_mode="auto"),
        depth=1,
    )

    def observe(plan: StepPlan, seconds: float, copying: float) -> None:
        for _ in range(60):
            node.sched.observe(plan, seconds, copying)

    node.sched.add(request(0, [1] * 30, 20, ignore_eos=True))
    plan = node.sched.plan()
    assert plan is not None
    observe(plan, 0.03, 0.0)  # 1000 tokens/s = 250 pages/s
    node.sched.commit(plan, node.device.execute(plan))
    node.sched.suspend([0])
    copying = node.sched.plan()
    assert copying is not None, "600 pages/s are assumed"
    node.sched.commit(copying, node.device.execute(copying))
    observe(copying, copy_seconds, copy_seconds)
    node.sched.resume([0])
    node.step()
    node.sched.suspend([0])
    host = node.sched.host_ledger()
    assert host is not None
    assert (host.pinned > 0) == offloads


@pytest.mark.parametrize("depth", [1, 2])
def test_answer_behind_a_damaged_page_is_computed_again(depth: int) -> None:
    """The page is forgotten with all that was computed from it; other prompts keep theirs."""
    node = Node(Limits(20, 4, 4, 100, 64, host_pages=40, kv_event_batches=100), depth=depth)
    prompt = [1] * 30
    run_one(node, 0, prompt)
    run_one(node, 1, [2] * 30)
    run_one(node, 2, [3] * 70)
    assert node.sched.kv_events is not None
    node.sched.kv_events.take_batch(0.0)
    for slot, page in enumerate(node.device.host):
        if page[0] == chain(1, 1):
            node.device.host[slot][2] ^= 1
    # Both begin on the damaged page, before the step that finds it out has committed.
    node.sched.add(request(3, prompt, 6, ignore_eos=True))
    node.sched.add(request(4, [*prompt[:25], 4, 4], 6, ignore_eos=True))
    node.run()
    for handle, tokens in ((3, prompt), (4, [*prompt[:25], 4, 4])):
        assert node.outputs[handle] == reference(request(handle, tokens, 1).prompt, 6, True)
    assert node.device.damaged == 1
    assert node.sched.report.counters()["kv_quarantined_pages_total"] > 0
    assert run_one(node, 5, [2] * 30) == 2, "another branch, and back from the host"
    node.sched.ledger().check_idle(20)


def test_rows_in_flight_behind_a_damaged_page_give_no_token() -> None:
    """Two steps read the page before the first one commits; neither of their tokens is believed."""
    node = Node(Limits(40, 4, 4, 100, 64, host_pages=40, preemption_mode="offload"), depth=2)
    node.sched.add(request(0, [1] * 30, 20, ignore_eos=True))
    for _ in range(6):
        node.step()
    node.sched.suspend([0])
    node.run()
    answered = list(node.outputs[0])
    node.sched.resume([0])
    first = node.sched.plan()
    second = node.sched.plan()
    assert first is not None
    assert second is not None
    assert len(first.rows) == len(second.rows) == 1
    node.sched.suspend([0])
    (run,) = first.copies
    node.device.host[run.slots[-1]][-1] ^= 1 << 7
    result = node.device.execute(first)
    assert result.damaged_pages == (len(run.slots) - 1,)
    answer = reference(request(0, [1] * 30, 1).prompt, 20, True)
    assert result.tokens != answer[len(answered) : len(answered) + 1], "the page matters"
    node.sched.commit(first, result)
    node.sched.commit(second, node.device.execute(second))
    node.absorb()
    assert node.outputs[0] == answered
    node.sched.ledger()
    node.sched.resume([0])
    node.run()
    assert node.outputs[0] == answer
    node.sched.ledger().check_idle(40)


THREE_GROUPS = (GroupRule("window", 5, 2), GroupRule("chunk", 4, 1))


@pytest.mark.parametrize("groups", [(), THREE_GROUPS], ids=["one", "three"])
@pytest.mark.parametrize("damage", [0.0, 0.1])
@pytest.mark.parametrize("seed", seeds(60))
def test_storms_under_priority_and_tiny_memory_with_a_host_tier(
    groups: tuple[GroupRule, ...], damage: float, seed: int
) -> None:
    """Tokens, both ledgers after every step, nothing held at the end, and no circle of preemptions.

    With `damage`, that share of what the host keeps has changed when it comes back.
    """
    rng = random.Random(9000 + seed)
    page = rng.choice([1, 2, 4])
    per_block = 1 + sum(rule.width for rule in groups)
    node = Node(
        Limits(
            rng.randint(8, 40) * (4 // page) * per_block, page, rng.choice([1, 2, 6]), 1000, page * rng.randint(1, 8),
            priority=PriorityRule(enabled=rng.random() < 0.7, preemption_threshold=1),
            preemption_mode=rng.choice(["recompute", "cache", "offload", "auto"]),
            host_pages=rng.choice([1, 4, 16, 64]) * per_block, host_pages_per_s=rng.choice([1.0, 1e6]),
            page_groups=groups,
            schedule_conservativeness=rng.choice([0.05, 1.0]), prefill_first=rng.random() < 0.2,
        ),
        depth=rng.choice([1, 2]),
    )  # fmt: skip
    damage_rng = random.Random(seed)
    if damage:
        node.device.damage = lambda: damage_rng.random() < damage
    shared = [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 16))] for _ in range(3)]
    want, aborted = {}, set()
    for handle in range(50):
        want[handle] = add_random_request(node, rng, handle, shared)
        for _ in range(rng.randint(0, 5)):
            node.step()
            if rng.random() < 0.2:
                node.sched.suspend([rng.randrange(handle + 1)])
            if rng.random() < 0.2:
                node.sched.resume(list(want))
        if rng.random() < 0.1 and (victim := rng.randrange(handle + 1)) not in node.finished:
            aborted.add(victim)
            node.sched.abort(victim)
        if rng.random() < 0.03:
            node.sched.flush_cache()
    node.sched.resume(list(want))
    node.run()
    for handle, tokens in want.items():
        got = node.outputs.get(handle, [])
        assert got == (tokens[: len(got)] if handle in aborted else tokens), (
            f"seed {seed} request {handle}"
        )
    assert node.device.copied > 0
    node.sched.ledger().check_idle(node.limits.num_pages)
    host = node.sched.host_ledger()
    assert host is not None
    host.check_idle(node.limits.host_pages)


def test_decode_node_takes_evicted_pages_from_its_host_and_grants_the_rest_after_the_copies() -> (
    None
):
    d = Node(
        Limits(10, 4, 4, 100, 64, role="decode", num_reserved_decode_tokens=0, host_pages=40),
        depth=2,
    )
    prompt = [1] * 24
    run_one(d, 0, prompt)
    run_one(d, 1, [2] * 36)
    d.sched.add(request(2, [*prompt, *[3] * 8], 2, ignore_eos=True, room=7))
    plan = d.sched.plan()
    d.absorb()
    assert plan is not None
    assert plan.mode is ForwardMode.IDLE
    assert {run.to_host for run in plan.copies} == {True, False}
    assert not d.grants, "the pages to be granted still hold what has to be copied out"
    d.sched.commit(plan, d.device.execute(plan))
    d.absorb()
    assert (d.grants[7].start_page, len(d.grants[7].pages)) == (6, 2), (
        "P is asked for the new part only"
    )
