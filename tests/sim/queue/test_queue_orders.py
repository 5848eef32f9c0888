"""The waiting queue keeps its order up to date by insertion; the definition sorts everything afresh: they agree."""

from __future__ import annotations

import dataclasses
import math
import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.cache.pages import PageAllocator
from baton.cache.radix import RadixCache
from baton.sched.fairness.sharing import SharingStrategy
from baton.sched.policies import POLICIES, Policy, PolicyContext, PolicyParams
from baton.sched.policies.dfs_weight import ROOT
from baton.sched.queue import waiting_queue
from baton.sched.queue.waiting_queue import EXACT_UP_TO, KEYS_PER_LOOK, WaitingQueue
from baton.sched.types.priority import PriorityRule
from baton.sched.types.sequence import Seq
from tests.sim.queue.test_policies import Plain
from tests.support.effort import examples
from tests.support.probes import RadixCacheProbe
from tests.support.sched.sched_sim import duplicates, ordered, ranks, request

PARAMS = PolicyParams(
    lpm_degrade_threshold=0, lpm_aging_tokens_per_s=0.5, short_first_aging_tokens_per_s=2.0
)


class World:
    """A queue, its members as a plain list, a real radix tree and everything else that a view shows."""

    def __init__(self, policy: str, rule: PriorityRule, seed: int) -> None:
        self.rng = random.Random(seed)
        self.allocator = PageAllocator(60)
        self.cache = RadixCache(2, self.allocator)
        self.now, self.step, self.rate, self.computed, self.ratio = 0.0, 0, 1000.0, 0, 0.5
        self.name, self.rule = policy, rule
        self.queue = WaitingQueue(POLICIES[policy](PARAMS), rule, self.view, SharingStrategy())
        self.members: list[Seq] = []
        self.made = 0

    def view(self) -> PolicyContext:
        return PolicyContext(self.now, self.step, self.cache, self.rate, self.computed, self.ratio)

    def prompt(self) -> list[int]:
        return [self.rng.randrange(2) for _ in range(self.rng.randint(1, 14))]

    def new(self) -> Seq:
        rng, self.made = self.rng, self.made + 1
        req = dataclasses.replace(
            request(self.made, self.prompt(), rng.randint(1, 9)),
            # Halves and quarters: sums are exact, so that equal ranks are equal however they are computed.
            arrival=self.now - rng.randrange(8) / 4,
            priority=rng.choice([None, 0, 1, 5]),
            namespace=rng.choice([b"", b"t"]),
            ttft_deadline=rng.choice([None, self.now + rng.randrange(16) / 4]),
        )
        return Seq(
            req,
            array("i", req.prompt),
            req.params.max_new_tokens,
            tokens_computed_at_arrival=self.computed,
        )

    def publish(self) -> None:
        tokens = array("i", self.prompt())
        pages = self.allocator.alloc(len(tokens) // 2)
        if pages is not None:
            done = self.cache.insert(tokens.tobytes(), pages, self.rng.choice([b"", b"t"]))
            self.allocator.free(duplicates(pages, done))

    def change(self) -> None:
        """One thing of all that happen to a queue."""
        rng = self.rng
        what = rng.randrange(9)
        if what <= 2 or not self.members:
            self.members.append(self.new())
            self.queue.add(self.members[-1])
        elif what == 3:
            gone = self.members.pop(rng.randrange(len(self.members)))
            self.queue.discard(gone)
            self.queue.discard(gone)
        elif what == 4:
            self.publish()
        elif what == 5:
            self.cache.evict(rng.randint(1, 3))
        elif what == 6:
            self.now += rng.randrange(9) / 4
        elif what == 7:
            self.step += 1
            self.computed += rng.choice([0, 8])
            self.rate = rng.choice([1.0, 4.0, 1000.0])
            self.ratio = rng.choice([0.25, 0.5, 1.0])
        else:
            seq = rng.choice(self.members)
            if rng.random() < 0.5:
                seq.adjusted_priority = rng.choice([None, -2.0, 0.5, 3.0])
                self.queue.reprioritize(seq)
            else:  # it ran for a while and came back with more tokens
                self.queue.discard(seq)
                self.members.remove(seq)
                seq.tokens.append(1)
                self.members.append(seq)
                self.queue.add(seq)

    def defined(self, under_way: list[Seq]) -> list[int]:
        policy: Policy = POLICIES[self.name](PARAMS)
        view = self.view()
        if policy.reorders_partial_prefills:
            return [s.handle for s in ordered(self.members + under_way, policy, self.rule, view)]
        entries = ranks(
            self.members, policy, self.rule, view, policy.cache_key(len(self.members), view)
        )
        entries += [
            (self.rule.key(s, self.now), -math.inf, s.req.arrival, s.handle) for s in under_way
        ]
        return [entry[3] for entry in sorted(entries)]


RULES = (
    PriorityRule(),
    PriorityRule(enabled=True, low_values_first=True, default=2),
    PriorityRule(enabled=True, aging_rate=0.5),
    PriorityRule(enabled=True, aging_rate=0.5, aging_max=1.5),
    PriorityRule(enabled=True, aging_rate=2.0, aging_max=0.0),
)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("rule", range(len(RULES)))
def test_kept_order_equals_a_sort_from_scratch(policy: str, rule: int) -> None:
    for seed in range(6):
        world = World(policy, RULES[rule], seed)
        for _ in range(120):
            world.change()
            running = (
                [world.new() for _ in range(world.rng.choice([0, 0, 2]))]
                if world.queue.policy.keys_are_independent
                else []
            )
            assert [s.handle for s in world.queue.in_order(running)] == world.defined(running), (
                f"seed {seed}"
            )
            assert len(world.queue) == len(world.members)


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "srpt-aging"])
def test_request_that_leaves_during_a_look_is_not_given_and_none_is_given_twice(
    policy: str,
) -> None:
    for seed in range(40):
        world = World(policy, RULES[3], seed)
        for _ in range(60):
            world.change()
        expected = world.defined([])
        given: list[int] = []
        for seq in world.queue.in_order():
            given.append(seq.handle)
            world.members.remove(seq)
            world.queue.discard(seq)
            if world.rng.random() < 0.3 and world.members:
                other = world.rng.choice(world.members)
                world.members.remove(other)
                world.queue.discard(other)
                if other.handle not in given:
                    expected.remove(other.handle)
            if world.rng.random() < 0.3:
                world.publish()
            if world.rng.random() < 0.2:  # it did not fit after all
                world.queue.add(seq)
                world.members.append(seq)
        assert given == expected, f"seed {seed}"
        assert [s.handle for s in world.queue.in_order()] == world.defined([])


@pytest.mark.parametrize(
    "policy", ["fcfs", "lof", "lpm", "dfs-weight", "short-first", "srpt-aging", "edf", "hrrn"]
)
def test_blocked_queue_computes_no_key_again(policy: str) -> None:
    """While requests only decode, the clock and the step number go on; edf looks again when a deadline is lost."""
    world = World(policy, PriorityRule(), 3)
    for _ in range(50):
        world.change()
    calls = 0
    keys = world.queue.policy.sort_keys

    def counted(queue: list[Seq], view: PolicyContext, cache_key: object) -> object:
        nonlocal calls
        calls += 1
        return keys(queue, view, cache_key)

    world.queue.policy.sort_keys = counted  # type: ignore[method-assign, assignment]
    list(world.queue.in_order())
    calls = 0
    for _ in range(20):
        world.now += 1e-6
        world.step += 1
        world.rate *= 1.002  # noise
        list(world.queue.in_order())
    assert calls == 0
    gone = world.members.pop()
    world.queue.discard(gone)
    list(world.queue.in_order())
    assert calls == (policy == "dfs-weight"), "leaving changes only weights of the walk"


@given(st.integers(0, 2**32), st.integers(0, len(RULES) - 1))
@settings(max_examples=examples(60), deadline=None)
def test_dfs_weight_follows_the_tree_from_look_to_look(seed: int, rule: int) -> None:
    """Requests come and go, edges are cut, pages evicted; looks are rare, so that much changes between two of them."""
    world = World("dfs-weight", RULES[rule], seed)
    for _ in range(60):
        world.change()
        if world.rng.random() < 0.6:
            continue
        paths: dict[int, tuple[int, ...]] = {}
        for s in world.members:
            probe = world.cache.probe(s.tokens.tobytes(), s.req.namespace, len(s.tokens) - 1, None)
            paths[s.handle] = tuple(world.cache.path_of(probe))
        walk = Plain(list(paths.values())).nodes()

        def rank(
            s: Seq, walk: list[int] = walk, paths: dict[int, tuple[int, ...]] = paths
        ) -> tuple[float, ...]:
            end = (ROOT, *paths[s.handle])[-1]
            return (world.rule.key(s, world.now), walk.index(end), s.req.arrival, s.handle)

        assert list(world.queue.in_order()) == sorted(world.members, key=rank)


def test_edf_demotes_at_the_moment_a_deadline_is_lost() -> None:
    world = World("edf", PriorityRule(), 1)
    world.rate = 4.0
    for handle, deadline in ((1, 5.0), (2, 6.0)):
        req = dataclasses.replace(request(handle, [1] * 8, 1), ttft_deadline=deadline, arrival=0.0)
        world.queue.add(Seq(req, array("i", req.prompt), 1))
    seen = []
    for now in (0.0, 3.0, 3.25, 4.0, 4.25):
        world.now = now
        seen.append([s.handle for s in world.queue.in_order()])
    assert seen == [[1, 2], [1, 2], [2, 1], [2, 1], [1, 2]], (
        "2 s of work each; both lost: by deadline again"
    )


def test_page_published_elsewhere_compares_no_prompt_again() -> None:
    world = World("lpm", PriorityRule(), 2)
    for _ in range(80):
        world.change()
    list(world.queue.in_order())
    walks = 0

    def count_walk() -> None:
        nonlocal walks
        walks += 1

    pages = world.allocator.alloc(2)
    assert pages is not None
    world.cache.insert(array("i", [7, 7, 7, 7]).tobytes(), pages, b"")
    RadixCacheProbe(world.cache).watch_walks(count_walk)
    assert [s.handle for s in world.queue.in_order()] == world.defined([])
    assert walks == 0


def test_lpm_above_its_threshold_is_exactly_fcfs_and_does_not_flap() -> None:
    world = World("lpm", PriorityRule(), 4)
    policy = POLICIES["lpm"](PolicyParams(lpm_degrade_threshold=40))
    world.queue = WaitingQueue(policy, PriorityRule(), world.view, SharingStrategy())
    for _ in range(6):
        world.publish()
    while len(world.members) < 41:
        world.now += 0.25
        world.members.append(world.new())
        world.queue.add(world.members[-1])
        if len(world.members) == 40:
            assert policy.active == "lpm"
            by_match = [s.handle for s in world.queue.in_order()]
    by_arrival = sorted(world.members, key=lambda s: (s.req.arrival, s.handle))
    assert list(world.queue.in_order()) == by_arrival
    assert by_match != [s.handle for s in by_arrival if s.handle in by_match]
    switches = []
    for size in [*range(40, 29, -1), *range(30, 41), 41, 40]:  # down to 3/4, and up again
        while len(world.members) > size:
            world.queue.discard(world.members.pop())
        while len(world.members) < size:
            world.members.append(world.new())
            world.queue.add(world.members[-1])
        list(world.queue.in_order())
        switches.append(policy.active)
    assert switches == ["fcfs"] * 10 + ["lpm"] * 12 + ["fcfs"] * 2
    assert policy.degraded_total == 2


def crowd(policy: str, rule: PriorityRule, count: int) -> tuple[World, list[int]]:
    """A queue of many and a list that grows by the number of keys of each call of the policy."""
    world = World(policy, rule, 5)
    made: list[int] = []
    keys = world.queue.policy.sort_keys

    def counted(queue: list[Seq], view: PolicyContext, cache_key: object) -> object:
        made.append(len(queue))
        return keys(queue, view, cache_key)

    world.queue.policy.sort_keys = counted  # type: ignore[method-assign, assignment]
    for _ in range(count):
        world.members.append(world.new())
        world.queue.add(world.members[-1])
    return world, made


@pytest.mark.parametrize("rule", [0, 3])
@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"dfs-weight"}))
def test_long_queue_costs_a_look_a_bounded_number_of_keys(policy: str, rule: int) -> None:
    """A burst that joins, the tree, the clock, the rates and the members change: no look does more than its share."""
    world, made = crowd(policy, RULES[rule], 1500)
    for _ in range(300):
        made.clear()
        next(world.queue.in_order())
        assert sum(made) <= 2 * KEYS_PER_LOOK, "each in the order in force, and in the next one"
        world.queue.discard(world.members.pop(0))
        world.members.append(world.new())
        world.queue.add(world.members[-1])
        world.publish()
        world.cache.evict(world.rng.randint(0, 3))
        world.now += 0.25
        world.step += 1
        world.computed += 8
        world.rate *= 1.01
    for _ in range(1500):  # nothing changes any more
        next(world.queue.in_order())
    assert [s.handle for s in world.queue.in_order()] == world.defined([])


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_all_of_a_burst_are_given_on_demand_and_the_important_first(policy: str) -> None:
    world, _ = crowd(policy, RULES[1], 500)
    given = [seq.handle for seq in world.queue.in_order()]
    assert sorted(given) == [seq.handle for seq in world.members]
    most = max(world.rule.base(seq) for seq in world.members)
    count = sum(world.rule.base(seq) == most for seq in world.members)
    assert {
        world.rule.base(world.members[handle - 1]) for handle in given[: min(count, KEYS_PER_LOOK)]
    } == {most}


@pytest.mark.parametrize("rule", [0, 3])
@pytest.mark.parametrize("policy", ["dfs-weight", "lpm"])
def test_order_that_depends_on_all_sorts_a_long_queue_in_parts(
    policy: str, rule: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No look enters more than a part, though requests come and go and the tree changes; then the order is exact."""
    params = dataclasses.replace(
        PARAMS,
        in_batch_prefix_caching_check_threshold=2,
        in_batch_prefix_caching_deprioritize_threshold=3,
    )
    world, _ = crowd(policy, RULES[rule], 0)
    world.queue = WaitingQueue(POLICIES[policy](params), RULES[rule], world.view, SharingStrategy())
    assert not world.queue.policy.keys_are_independent
    entered: list[int] = []
    enter = waiting_queue._Order.enter

    def counted(order: waiting_queue._Order, seqs: list[Seq], *args: object) -> None:
        entered.append(len(seqs))
        enter(order, seqs, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(waiting_queue._Order, "enter", counted)
    for _ in range(1000):
        world.members.append(world.new())
        world.queue.add(world.members[-1])
    sorted_again = 0
    for _ in range(150):
        before, entered[:] = world.queue._order, []
        next(world.queue.in_order())
        sorted_again += world.queue._order is not before
        assert sum(entered) <= 3 * EXACT_UP_TO + KEYS_PER_LOOK, (
            "those that join, in both orders, a part, those due"
        )
        world.publish()
        world.cache.evict(2)
        world.queue.discard(world.members.pop(world.rng.randrange(len(world.members))))
        world.members.append(world.new())
        world.queue.add(world.members[-1])
    assert sorted_again >= 3
    for _ in range(150):  # nothing changes any more
        next(world.queue.in_order())
    exact = ordered(world.members, POLICIES[policy](params), RULES[rule], world.view())
    assert list(world.queue.in_order()) == exact


def test_edf_lets_no_request_pass_for_ever() -> None:
    """Overload by requests that can be in time: a hopeless one, and one without a deadline, wait for a bounded time."""
    params = PolicyParams(default_deadline_secs=60.0, edf_demotion_secs=100.0)
    for hopeless, bound in ((dataclasses.replace(request(1, [1] * 8, 1), ttft_deadline=0.5, arrival=0.0), 100.5),
                            (dataclasses.replace(request(1, [1] * 8, 1), arrival=0.0), 160.0)):  # fmt: skip
        policy = POLICIES["edf"](params)
        world = World("edf", RULES[0], 1)
        world.rate = 8.0
        waiting_queue = WaitingQueue(policy, RULES[0], world.view, SharingStrategy())
        waiting_queue.add(Seq(hopeless, array("i", hopeless.prompt), 1))
        handle, served = 1, 0
        while 1 in [seq.handle for seq in waiting_queue]:
            for _ in range(2):  # twice what is served, each with a second to spare
                handle += 1
                req = dataclasses.replace(
                    request(handle, [2] * 8, 1), ttft_deadline=world.now + 2.0, arrival=world.now
                )
                waiting_queue.add(Seq(req, array("i", req.prompt), 1))
            waiting_queue.discard(next(waiting_queue.in_order()))
            served += 1
            world.now += 1.0
            assert world.now < bound + 4, "starves"
        assert served > 50, "others that can be in time go first"


@given(
    deadline=st.one_of(st.none(), st.floats(0.0, 1e3)),
    work=st.integers(1, 1000),
    now=st.floats(0.0, 1e4),
    others=st.lists(st.tuples(st.floats(0.0, 1e3), st.integers(1, 1000)), max_size=8),
)
@settings(max_examples=examples(200), deadline=None)
def test_edf_puts_every_request_before_all_that_arrive_after_a_bounded_time(
    deadline: float | None, work: int, now: float, others: list[tuple[float, int]]
) -> None:
    """A request that arrived at 0 precedes, at any time, those that arrive when deadline + demotion have passed."""
    params = PolicyParams(default_deadline_secs=60.0, edf_demotion_secs=100.0)
    bound = (60.0 if deadline is None else deadline) + 100.0
    first = dataclasses.replace(request(1, [1] * work, 1), ttft_deadline=deadline, arrival=0.0)
    waiting_queue = [Seq(first, array("i", first.prompt), 1)]
    for handle, (slack, length) in enumerate(others, start=2):
        late = dataclasses.replace(
            request(handle, [1] * length, 1), ttft_deadline=bound + slack, arrival=bound
        )
        waiting_queue.append(Seq(late, array("i", late.prompt), 1))
    world = World("edf", RULES[0], 1)
    world.now, world.rate = now, 10.0
    assert ordered(waiting_queue, POLICIES["edf"](params), RULES[0], world.view())[0].handle == 1
