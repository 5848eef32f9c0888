"""Choice of preemption victims, and its bounds: victims against brute force, then storms on the pretend device."""

from __future__ import annotations

import dataclasses
import random
import statistics
from itertools import combinations

import pytest

from baton.config.simulated import PRESETS
from baton.errors import QueueFull
from baton.runtime.simulated.device import step_seconds
from baton.sched.memory.preemption import may_preempt, priority_victims, retraction_victim
from baton.sched.scheduler import Scheduler
from baton.sched.setup.limits import Limits
from baton.sched.types.plan import StepResult
from baton.sched.types.priority import PriorityRule
from baton.sched.types.request import ValidatedRequest
from baton.sched.types.sequence import Seq
from tests.support.effort import seeds
from tests.support.sched.fake_transfer import FakeTransfer
from tests.support.sched.sched_sim import VOCAB, Node, random_prompt, reference, request

PRIORITY = PriorityRule(enabled=True, preemption_threshold=3)


def asked(handle: int, prompt: list[int], max_new: int, priority: int | None) -> ValidatedRequest:
    return dataclasses.replace(request(handle, prompt, max_new, ignore_eos=True), priority=priority)


def busy_node(rng: random.Random) -> Node:
    """A node with several running requests of mixed priority that share some prefixes."""
    page = rng.choice([1, 2, 4])
    node = Node(
        Limits(400, page, 8, 100, 8 * page, priority=PRIORITY, max_preemptions_per_request=2),
        depth=1,
    )
    shared = [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 16))] for _ in range(2)]
    for handle in range(8):
        prompt = random_prompt(rng, shared, 24)
        node.sched.add(asked(handle, prompt, rng.randint(4, 40), rng.choice([None, 0, 2, 5])))
        for _ in range(rng.randint(0, 3)):
            node.step()
    return node


@pytest.mark.parametrize("seed", seeds(40))
def test_victims_are_a_cheap_set_of_eligible_rows_that_is_enough_and_no_more(seed: int) -> None:
    rng = random.Random(seed)
    node = busy_node(rng)
    state = node.probe.state
    running = list(state.running.values())
    head = Seq(asked(99, [1, 2], 4, rng.choice([3, 6, 9])), request(99, [1, 2], 4).prompt, 4)
    freed = {s.handle: state.memory.freed_by(s) for s in running}
    short = rng.randint(-2, 60)
    chosen = priority_victims(
        head, short, running, node.limits, state.memory.freed_by, PRIORITY.sort_key(head, 0.0)
    )

    below = PRIORITY.base(head) - PRIORITY.preemption_threshold
    eligible = [s for s in running if PRIORITY.base(s) < below and may_preempt(s, node.limits)]
    assert set(chosen) <= set(eligible)
    enough = [
        sum(freed[s.handle][1] for s in some)
        for k in range(1, len(eligible) + 1)
        for some in combinations(eligible, k)
        if sum(freed[s.handle][0] for s in some) >= short
    ]
    if not enough:
        assert chosen == []
        return
    assert sum(freed[s.handle][0] for s in chosen) >= short, "all or nothing"
    assert min(enough) <= sum(freed[s.handle][1] for s in chosen) <= 2 * min(enough)
    spare = sum(freed[s.handle][0] for s in chosen) - short
    assert len(chosen) == 1 or all(freed[s.handle][0] > spare for s in chosen), (
        "one gives way for nothing"
    )


@pytest.mark.parametrize("seed", seeds(20))
def test_suspending_frees_what_was_promised(seed: int) -> None:
    rng = random.Random(seed)
    node = busy_node(rng)
    state = node.probe.state
    while state.running:
        seq = rng.choice(list(state.running.values()))
        promised = state.memory.freed_by(seq)[0] - state.memory.growth(seq)
        before = state.memory.available
        state.preempt(seq)
        assert state.memory.available - before == promised
        node.sched.ledger()


def test_cheap_row_goes_before_a_less_important_dear_one() -> None:
    node = Node(Limits(400, 4, 3, 100, 64, priority=PRIORITY), depth=1)
    node.sched.add(asked(0, [1] * 100, 40, 0))
    node.sched.add(asked(1, [2] * 8, 40, 2))
    node.sched.add(asked(2, [3] * 4, 40, 8))
    for _ in range(4):
        node.step()
    node.sched.add(asked(3, [4] * 4, 4, 10))
    node.step()
    assert set(node.probe.running) == {0, 2, 3}, "1 costs 8 tokens, 0 costs 100"


@pytest.mark.parametrize("scarce", ["slots", "pages"])
def test_on_a_decode_node_an_important_transfer_preempts_running_requests(scarce: str) -> None:
    pages, slots = (400, 2) if scarce == "slots" else (24, 8)
    limits = Limits(pages, 4, slots, 100, 64, priority=PRIORITY)
    p = Node(dataclasses.replace(limits, role="prefill", num_pages=400), depth=1)
    d = Node(dataclasses.replace(limits, role="decode"), depth=1)
    transfer = FakeTransfer(p, d, random.Random(0), break_rate=0.0)
    asks = [(0, 40, 0), (1, 40, 2), (2, 5, 5), (3, 5, 9)]
    for handle, answer, priority in asks:
        if handle >= 2:
            assert set(d.probe.running) == {0, 1}
        req = request(handle, [handle] * 6, answer, ignore_eos=True, room=100 + handle)
        req = dataclasses.replace(req, priority=priority)
        p.sched.add(req)
        d.sched.add(req)
        if handle == 2:
            continue
        while handle not in d.probe.running:
            p.step()
            d.step()
            transfer.tick()
    assert not set(d.probe.running) >= {0, 1}, "one was sent back"
    assert not d.finished.keys() & {0, 1}, "and no request waited for its end"
    assert d.sched.report.counters()["preemptions_total"] >= 1
    while not d.sched.is_idle:
        p.step()
        d.step()
        transfer.tick()
    for handle, answer, _ in asks:
        assert d.outputs[handle] == reference([handle] * 6, answer, True)


def test_retraction_spares_the_more_important_and_the_oldest_of_them() -> None:
    def seq(handle: int, priority: int | None) -> Seq:
        req = asked(handle, [1] * (50 - handle), 9, priority)
        made = Seq(req, req.prompt, 9, computed=50 - handle)
        made.pages.extend(range(3))
        return made

    rows = [seq(0, 1), seq(1, 5), seq(2, 5), seq(3, None)]
    order = []
    while (
        victim := retraction_victim(rows, rows[-1] if len(rows) == 1 else rows[0], PRIORITY)
    ) is not None:
        order.append(victim.handle)
        rows.remove(victim)
    assert order == [3, 2, 0]
    plain = PriorityRule()
    rows = [seq(0, 1), seq(1, 5), seq(2, 5)]
    assert retraction_victim(rows, rows[0], plain) is rows[2], "priority off: the cheapest"
    assert retraction_victim(rows[:1], rows[0], plain) is None


@pytest.mark.parametrize("seed", seeds(30))
def test_priority_storms_are_bounded_and_exact(seed: int) -> None:
    """No request is preempted more often than allowed, and each preempts only less important ones."""
    rng = random.Random(500 + seed)
    page = rng.choice([1, 2])
    most = rng.choice([1, 3])
    node = Node(
        Limits(
            rng.randint(20, 60), page, rng.choice([1, 2, 4]), 1000, 8 * page, priority=PRIORITY,
            max_preemptions_per_request=most, preemption_mode=rng.choice(["recompute", "cache", "offload", "auto"]),
            host_pages=rng.choice([0, 5, 40]),
            schedule_conservativeness=rng.choice([0.1, 1.0]),
        ),
        depth=rng.choice([1, 2]),
    )  # fmt: skip
    want, seqs = {}, []
    for handle in range(40):
        prompt = random_prompt(rng, [], min(16, node.limits.capacity_tokens - 1))
        req = asked(handle, prompt, rng.randint(1, 20), rng.choice([None, 0, 4, 8, 20]))
        node.sched.add(req)
        seqs.append(node.probe.seqs[handle])
        room = node.limits.capacity_tokens - len(prompt)
        want[handle] = reference(req.prompt, min(req.params.max_new_tokens, room), True)
        for _ in range(rng.randint(0, 3)):
            node.step()
    node.run()
    assert node.outputs == want
    assert all(s.preemptions <= most for s in seqs)
    assert node.sched.report.counters()["preemptions_total"] == sum(s.preemptions for s in seqs)
    node.sched.ledger().check_idle(node.limits.num_pages)


def test_aged_request_preempts_no_other() -> None:
    """Aging puts it before all that wait, but only the stated priority decides whether others give way for it."""
    rule = PriorityRule(enabled=True, aging_rate=1000.0, preemption_threshold=2)
    sched = Scheduler(Limits(100, 4, 1, 100, 64, priority=rule))
    for handle, priority in ((0, 3), (1, 5), (2, 5)):
        plain = request(handle, [handle] * 4, 50, ignore_eos=True)
        sched.add(dataclasses.replace(plain, priority=priority, arrival=float(handle)))
        plan = sched.plan(900.0)
        assert plan is not None
        assert [row.handle for row in plan.rows] == [0]
        sched.commit(plan, StepResult([1]), 900.0)
    assert sched.report.counters()["preemptions_total"] == 0, (
        "5 against 3 is no more than the threshold, however long it has waited"
    )


@pytest.mark.parametrize("lacks", ["slots", "pages", "queue"])
@pytest.mark.parametrize("ends", ["finish", "abort", "suspend"])
def test_nothing_stays_full_when_room_was_made(lacks: str, ends: str) -> None:
    """Every step asks again if a request may start, whatever it was that ended."""
    slots, pages = (1, 100) if lacks == "slots" else (8, 6)
    sched = Scheduler(
        Limits(pages, 4, slots, 1 if lacks == "queue" else 100, 64, radix_cache=False)
    )

    def turn() -> list[int]:
        plan = sched.plan()
        if plan is None:
            return []
        sched.commit(plan, StepResult([1] * sum(row.sample for row in plan.rows)))
        return [row.handle for row in plan.rows]

    sched.add(request(0, [1] * 9, 10, ignore_eos=True))  # all that there is, at its end
    assert turn() == [0]
    sched.add(request(1, [2] * 9, 10, ignore_eos=True))
    if lacks == "queue":
        with pytest.raises(QueueFull):
            sched.add(request(2, [3] * 9, 2, ignore_eos=True))
    for _ in range(5):
        assert turn() == [0]
    if ends == "finish":
        while 0 in turn():
            pass
    elif ends == "abort":
        sched.abort(0)
    else:
        sched.suspend([0])
    assert 1 in turn()
    if lacks == "queue":
        sched.add(request(2, [3] * 9, 2, ignore_eos=True))


def test_request_preempts_no_other_that_precedes_it_in_the_order() -> None:
    """Aging put the victim first; preempting it would only admit it again before the other."""
    rule = PriorityRule(enabled=True, aging_rate=1.0, preemption_threshold=2)
    sched = Scheduler(Limits(100, 4, 1, 100, 64, priority=rule))
    for handle, priority, arrival in ((0, 0, 0.0), (1, 5, 90.0)):
        plain = request(handle, [handle] * 4, 50, ignore_eos=True)
        sched.add(dataclasses.replace(plain, priority=priority, arrival=arrival))
    for _ in range(5):
        plan = sched.plan(100.0)
        assert plan is not None
        assert [row.handle for row in plan.rows] == [0], "100 against 5 + 10"
        sched.commit(plan, StepResult([1]), 100.0)
    assert sched.report.counters()["preemptions_total"] == 0


def test_first_request_that_may_preempt_gets_the_slot_it_makes_free() -> None:
    """An aged request that may not preempt is first in the order; it does not take what another one gets."""
    rule = PriorityRule(enabled=True, aging_rate=1.0, preemption_threshold=2)
    sched = Scheduler(Limits(100, 4, 1, 100, 64, priority=rule))
    for handle, priority, arrival in ((0, 1, 80.0), (1, 0, 0.0), (2, 9, 85.0)):
        plain = request(handle, [handle] * 4, 50, ignore_eos=True)
        sched.add(dataclasses.replace(plain, priority=priority, arrival=arrival))
        if handle == 0:
            plan = sched.plan(90.0)
            assert plan is not None
            sched.commit(plan, StepResult([1]), 90.0)
    plan = sched.plan(90.0)
    assert plan is not None
    assert [row.handle for row in plan.rows] == [2]
    assert sched.report.counters()["preemptions_total"] == 1


@pytest.mark.parametrize(("under_way", "preempts"), [(200, False), (0, True)])
def test_request_preempts_only_if_the_step_has_tokens_for_it(
    under_way: int, preempts: bool
) -> None:
    sched = Scheduler(Limits(400, 4, 2, 100, 16, priority=PRIORITY))

    def step() -> None:
        plan = sched.plan()
        assert plan is not None
        sched.commit(plan, StepResult([1] * sum(row.sample for row in plan.rows)))

    sched.add(asked(0, [1] * 4, 50, 0))
    sched.add(asked(1, [2] * (under_way or 4), 50, 9))
    step()
    sched.add(asked(2, [3] * 4, 50, 5))
    step()
    assert sched.report.counters()["preemptions_total"] == preempts, (
        "the prompt of priority 9 takes every step's tokens while it is under way"
    )


def test_nothing_is_preempted_for_a_request_that_a_reservation_keeps_out() -> None:
    """Request 2 waits for 71 pages; those that passed it have used up the rest, so a victim's slot would stay empty."""
    rule = PriorityRule(enabled=True, preemption_threshold=0)
    node = Node(Limits(100, 4, 3, 100, 512, radix_cache=False, priority=rule), depth=1)
    node.sched.add(asked(0, [1] * 4, 156, 9))
    node.sched.add(asked(1, [1] * 4, 120, 0))
    node.step()
    node.sched.add(asked(2, [1] * 280, 4, 5))
    for passes in (3, 4, 5):
        node.sched.add(asked(passes, [1] * 80, 4, 5))
        while passes not in node.finished:
            node.step()
            assert node.steps < 50, f"request {passes} did not pass"
    node.sched.add(asked(6, [1] * 60, 20, 5))
    node.step()
    assert set(node.probe.running) == {0, 1, 6}, "every slot is taken"
    node.sched.add(asked(7, [1] * 60, 4, 5))
    while 6 not in node.finished:
        node.step()
        assert node.sched.report.counters()["preemptions_total"] == 0
        assert 1 in node.probe.running
        assert node.steps < 100
    while not {1, 2, 7} <= node.finished.keys():
        node.step()
        assert node.steps < 400


def median_wait_of_the_important(threshold: int) -> tuple[float, int]:
    """(median seconds to a first token of the important half, preemptions), at 1.2 times the load a node can carry."""
    rule = PriorityRule(enabled=True, preemption_threshold=threshold, aging_rate=2.0)
    sched = Scheduler(
        Limits(12_500, 16, 16, 10_000, step_tokens=512, priority=rule, radix_cache=False)
    )
    rng = random.Random(3)
    now, arrival, handle, first, begun = 0.0, 0.0, 0, {}, {}
    while now < 300.0:
        while arrival <= now:
            priority = rng.choice([0, 100])
            req = request(handle, [rng.randrange(VOCAB) for _ in range(2000)], 150, ignore_eos=True)
            sched.add(dataclasses.replace(req, priority=priority, arrival=arrival))
            begun.update({handle: arrival} if priority else {})
            handle += 1
            arrival += rng.expovariate(1.2 * 3.6)
        plan = sched.plan(now)
        if plan is None:
            now = arrival
            continue
        seconds = step_seconds(PRESETS["reference"], plan, 1)
        now += seconds
        sampled = [row.handle for row in plan.rows if row.sample]
        sched.commit(plan, StepResult([7] * len(sampled)), now)
        sched.observe(plan, seconds)
        sched.drain_events()
        for sample in sampled:
            first.setdefault(sample, now)
    waits = [first[h] - at for h, at in begun.items() if h in first]
    return statistics.median(waits), sched.report.counters()["preemptions_total"]


def test_preemption_without_a_cache_does_not_make_the_important_wait_longer() -> None:
    """Work that is repeated delays everybody: preempt only where that takes less time than it saves."""
    without, none = median_wait_of_the_important(1000)
    median, preemptions = median_wait_of_the_important(10)
    assert none == 0 < preemptions
    assert median <= without


def test_request_short_of_pages_beside_its_own_prefix_preempts() -> None:
    """Evicting its cached prefix would free enough pages, and would leave it more to compute."""
    node = Node(Limits(100, 4, 8, 100, 256, priority=PRIORITY), depth=1)
    node.sched.add(asked(0, [2] * 200, 1, 0))
    node.run()
    node.sched.add(asked(1, [1] * 8, 100, 0))
    node.step()
    node.sched.add(asked(2, [2] * 392, 4, 9))
    node.step()
    assert set(node.probe.running) == {2}
    node.run()
    assert node.sched.hit_tokens["device"] == 200
