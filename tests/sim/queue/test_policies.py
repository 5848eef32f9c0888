"""Queue orders and priority: every policy against its definition, and preemption on slots and on pages."""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cache.radix import PrefixProbe, ProbeWatch
from baton.cache.radix import RadixNode as TreeNode
from baton.config import build_config
from baton.sched.fairness.sharing import SharingStrategy
from baton.sched.policies import POLICIES, PolicyContext, PolicyParams
from baton.sched.policies.dfs_weight import ROOT, BranchWeights, Path
from baton.sched.queue.waiting_queue import WaitingQueue
from baton.sched.setup import from_config
from baton.sched.setup.limits import Limits
from baton.sched.types.priority import PriorityRule
from baton.sched.types.sequence import Seq
from tests.support.effort import seeds
from tests.support.sched.sched_sim import (
    VOCAB,
    Node,
    add_random_request,
    ordered,
    reference,
    request,
)


class FixedIndex:
    """A prefix index that knows `cached` tokens of every prompt by its first token."""

    def __init__(self, cached: dict[int, int]) -> None:
        self.cached = cached
        self.version = 0

    def probe(
        self, tokens: bytes, namespace: bytes, max_tokens: int, last: PrefixProbe | None
    ) -> PrefixProbe:
        found = self.cached.get(tokens[0], 0)
        node = TreeNode(None, tokens[:1] if found else b"", array("i"), tokens[0])
        return PrefixProbe(node, 0, min(found, max_tokens), 0, b"")

    def find_outdated(self, probes: Sequence[PrefixProbe | None]) -> range:
        return range(len(probes))

    def watch(self) -> ProbeWatch:
        return ProbeWatch()

    def path_of(self, probe: PrefixProbe) -> list[int]:
        return [probe.node.serial] if probe.node.key else []


def view(
    now: float = 0.0, step: int = 0, cached: dict[int, int] | None = None, computed: int = 0
) -> PolicyContext:
    return PolicyContext(now, step, FixedIndex(cached or {}), 1000.0, computed, 0.5)


def seq(
    handle: int,
    length: int,
    max_new: int = 4,
    *,
    first: int = 1,
    arrival: float = 0.0,
    born: int = 0,
) -> Seq:
    req = dataclasses.replace(
        request(handle, [first] + [2] * (length - 1), max_new), arrival=arrival
    )
    return Seq(req, array("i", req.prompt), max_new, tokens_computed_at_arrival=born)


def order(
    policy: str,
    queue: list[Seq],
    at: PolicyContext,
    rule: PriorityRule | None = None,
    **params: float,
) -> list[int]:
    made = POLICIES[policy](PolicyParams(**params))  # type: ignore[arg-type]
    return [s.handle for s in ordered(queue, made, rule or PriorityRule(), at)]


def test_each_policy_orders_by_its_definition() -> None:
    queue = [
        seq(1, 100, 8, first=1, arrival=1.0),
        seq(2, 10, 64, first=2, arrival=2.0),
        seq(3, 50, 16, first=3, arrival=3.0, born=900),
    ]
    at = view(now=4.0, cached={1: 96, 3: 40}, computed=1000)
    assert order("fcfs", queue, at) == [1, 2, 3]
    assert order("lpm", queue, at) == [1, 3, 2]
    assert order("lof", queue, at) == [2, 3, 1]
    assert order("short-first", queue, at, short_first_aging_tokens_per_s=0) == [1, 3, 2], (
        "4+4, 10+8, 10+32"
    )
    weighted = {"short_first_aging_tokens_per_s": 0, "short_first_output_weight": 0}
    assert order("short-first", queue, at, **weighted) == [1, 2, 3], "4, 10, 10; then arrival"
    assert order("short-first", queue, at, **(weighted | {"short_first_output_weight": 1})) == [
        1,
        3,
        2,
    ]
    assert order("srpt-aging", queue, at, srpt_aging=0) == [1, 2, 3], (
        "4, 10, 10 tokens left; then arrival"
    )
    assert order("hrrn", queue, at) == [1, 2, 3], "1000/4, 1000/10, 100/10"
    assert sorted(order("random", queue, at)) == [1, 2, 3]


def test_edf_serves_the_earliest_deadline_and_demotes_what_is_lost() -> None:
    def due(handle: int, length: int, deadline: float | None, arrival: float = 0.0) -> Seq:
        plain = seq(handle, length, arrival=arrival)
        return Seq(dataclasses.replace(plain.req, ttft_deadline=deadline), plain.tokens, 4)

    queue = [due(1, 100, None), due(2, 100, 5.0), due(3, 100, 3.0), due(4, 4000, 6.0)]
    assert order("edf", queue, view(now=1.0), default_deadline_secs=60.0) == [3, 2, 4, 1]
    assert order("edf", queue, view(now=2.95), default_deadline_secs=60.0) == [2, 1, 3, 4], (
        "3 and 4 are lost"
    )
    assert order("edf", queue, view(now=2.95), demote_hopeless=False) == [3, 2, 4, 1]


def test_missed_first_token_deadlines_are_counted_once() -> None:
    node = Node(Limits(100, 4, 4, 100, 16, policy="edf"), depth=1)
    for handle, deadline in ((0, 1.0), (1, 9.0), (2, None)):
        node.sched.add(
            dataclasses.replace(
                request(handle, [1] * 5, 3, ignore_eos=True), ttft_deadline=deadline
            )
        )
    plan = node.sched.plan(now=0.5)
    assert plan is not None
    node.sched.commit(plan, node.device.execute(plan), now=2.0)
    node.run()
    assert node.sched.stats.deadlines_missed["ttft"] == 1


def test_aging_bounds_how_long_a_long_request_is_overtaken() -> None:
    long_one = seq(1, 5000, arrival=0.0)
    for policy, params in (
        ("srpt-aging", {"srpt_aging": 0.05}),
        ("short-first", {"short_first_aging_tokens_per_s": 50}),
    ):
        early, late = seq(2, 10, arrival=1.0), seq(3, 10, arrival=150.0)
        assert order(policy, [long_one, early], view(), **params) == [2, 1]
        assert order(policy, [long_one, late], view(), **params) == [1, 3], (
            "50 tokens per second of waiting"
        )


def test_with_a_long_queue_srpt_ages_slower_in_proportion() -> None:
    queue = [seq(1, 5000, arrival=0.0), seq(2, 10, arrival=150.0)]
    params = {"srpt_aging": 0.05, "srpt_aging_backlog_secs": 10.0}
    for queued, expected in ((9_000, [1, 2]), (12_000, [1, 2]), (20_000, [2, 1])):
        at = dataclasses.replace(view(), queued_tokens=queued)
        assert order("srpt-aging", queue, at, **params) == expected, (
            "150 s * 50/s, times 10 s / 20 s"
        )
    assert order(
        "srpt-aging", queue, dataclasses.replace(view(), queued_tokens=20_000), srpt_aging=0.05
    ) == [1, 2]


def test_random_is_reproducible_changes_per_step_and_is_not_arrival_order() -> None:
    queue = [seq(h, 5) for h in range(50)]
    orders = [order("random", queue, view(step=s)) for s in range(20)]
    assert orders[3] == order("random", queue, view(step=3))
    assert len({tuple(o) for o in orders}) == 20
    firsts = {o[0] for o in orders}
    assert len(firsts) > 5


def test_lpm_degrades_above_the_threshold_and_returns_with_hysteresis() -> None:
    policy = POLICIES["lpm"](PolicyParams(lpm_degrade_threshold=8))
    cached = {9: 4}

    def first(count: int) -> int:
        queue = [seq(h, 5, arrival=float(h)) for h in range(count - 1)] + [
            seq(99, 5, first=9, arrival=99.0)
        ]
        return ordered(queue, policy, PriorityRule(), view(cached=cached))[0].handle

    assert [first(n) for n in (8, 9, 8, 7, 6, 7, 8, 9)] == [99, 0, 0, 0, 99, 99, 99, 0]


def test_lpm_aging_lets_a_cold_prompt_pass_hits_that_came_later() -> None:
    cold, hit = seq(1, 50, arrival=0.0), seq(2, 50, first=2, arrival=11.0)
    at = view(cached={2: 40})
    assert order("lpm", [cold, hit], at) == [2, 1]
    assert order("lpm", [cold, hit], at, lpm_aging_tokens_per_s=4.0) == [1, 2], (
        "40 tokens of match = 10 s at 4/s"
    )


def walk_order(paths: Sequence[Path]) -> list[int]:
    """Indices of the paths in the order of `BranchWeights`; those at one node in the order given."""
    weights = BranchWeights()
    for path in paths:
        weights.add_path(path)
    places = weights.walk_places()
    return sorted(range(len(paths)), key=lambda i: places[paths[i][-1] if paths[i] else ROOT])


def test_dfs_weight_walks_the_heaviest_subtree_first_children_before_parents() -> None:
    a, b, c, d, f, g = range(6)
    paths = [[a, c], [b, f], [a, d], [a, c], [a], [b, g], []]
    assert walk_order(paths) == [0, 3, 2, 4, 1, 5, 6]


def test_dfs_weight_survives_a_tree_deeper_than_the_recursion_limit() -> None:
    assert walk_order([[], list(range(50_000)), [0]]) == [1, 2, 0]


class Plain:
    """The definition: weights counted again at every node, by recursion."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = [tuple(path) for path in paths]

    def under(self, prefix: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [path for path in self.paths if path[: len(prefix)] == prefix]

    def nodes(self, prefix: tuple[int, ...] = ()) -> list[int]:
        """Every node of the paths, the root too, in the order of the walk."""
        children = {path[len(prefix)] for path in self.under(prefix) if len(path) > len(prefix)}
        heaviest_first = sorted(
            children, key=lambda child: (-len(self.under((*prefix, child))), child)
        )
        below = [node for child in heaviest_first for node in self.nodes((*prefix, child))]
        return [*below, prefix[-1] if prefix else ROOT]


@given(st.lists(st.tuples(st.integers(1, 3), st.lists(st.integers(0, 2), max_size=4)), max_size=40))
def test_dfs_weight_equals_the_recursive_definition(ends: list[tuple[int, list[int]]]) -> None:
    weights = BranchWeights()
    present: list[tuple[int, ...]] = []
    for count, turns in ends:
        path: list[int] = []
        for turn in turns:
            path.append((path[-1] if path else 1) * 3 + turn)  # numbers differ for different places
        present += [tuple(path)] * count
        weights.add_path(path, count)
        order = Plain(present).nodes()
        assert weights.walk_places() == {node: place for place, node in enumerate(order)}


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("priorities", [False, True])
def test_waiting_queue_equals_a_sort_from_scratch(policy: str, priorities: bool) -> None:
    rng = random.Random(7)
    rule = PriorityRule(enabled=priorities, aging_rate=0.5, low_values_first=True)
    made = POLICIES[policy](PolicyParams())
    queue = WaitingQueue(made, rule, view, SharingStrategy())
    members: list[Seq] = []
    for handle in range(200):
        new = seq(handle, rng.randint(1, 30), rng.randint(1, 9), arrival=rng.random() * 9)
        new = Seq(
            dataclasses.replace(new.req, priority=rng.choice([None, 1, 5])),
            new.tokens,
            new.max_new_tokens,
        )
        queue.add(new)
        members.append(new)
        if rng.random() < 0.4:
            gone = members.pop(rng.randrange(len(members)))
            queue.discard(gone)
            queue.discard(gone)
        assert [s.handle for s in queue.in_order()] == [
            s.handle for s in ordered(members, made, rule, view())
        ]


def test_priority_comes_before_the_policy_in_both_directions_and_missing_is_lowest() -> None:
    def ask(handle: int, priority: int | None) -> Seq:
        plain = seq(handle, 5, arrival=float(handle))
        return Seq(dataclasses.replace(plain.req, priority=priority), plain.tokens, 4)

    queue = [ask(1, None), ask(2, 5), ask(3, -3), ask(4, 5)]
    assert order("fcfs", queue, view(), PriorityRule(enabled=True)) == [2, 4, 3, 1]
    assert order("fcfs", queue, view(), PriorityRule(enabled=True, low_values_first=True)) == [
        3,
        2,
        4,
        1,
    ]
    assert order("fcfs", queue, view(), PriorityRule(enabled=False)) == [1, 2, 3, 4]


@pytest.mark.parametrize("seed", seeds(20))
def test_static_aging_keys_order_like_priority_plus_rate_times_wait(seed: int) -> None:
    rng = random.Random(seed)
    rule = PriorityRule(enabled=True, aging_rate=rng.choice([0.1, 1.0, 7.0]))
    queue = [
        Seq(
            dataclasses.replace(
                request(h, [1], 1), priority=rng.randrange(20), arrival=rng.random() * 50
            ),
            array("i", [1]),
            1,
        )
        for h in range(30)
    ]
    now = 50 + rng.random() * 100
    aged = sorted(queue, key=lambda s: -(s.req.priority + rule.aging_rate * (now - s.req.arrival)))  # type: ignore[operator]
    got = order("fcfs", queue, view(now), rule)
    exact = [s.handle for s in aged]
    values = {s.handle: s.req.priority + rule.aging_rate * (now - s.req.arrival) for s in queue}  # type: ignore[operator]
    assert all(values[a] > values[b] - 1 for i, a in enumerate(got) for b in got[i:]), (
        "in whole units"
    )
    assert got[0] in exact[:10]


def test_inside_one_unit_of_aged_priority_the_policy_decides() -> None:
    rule = PriorityRule(enabled=True, aging_rate=0.1)
    queue = [
        Seq(
            dataclasses.replace(request(h, [h] * size, 1), priority=5, arrival=arrival),
            array("i", [h] * size),
            1,
        )
        for h, size, arrival in ((1, 50, 21.0), (2, 10, 22.0), (3, 30, 29.0), (4, 1, 31.0))
    ]
    assert order("srpt-aging", queue, view(100.0), rule, srpt_aging=0.0) == [2, 3, 1, 4]
    assert order("fcfs", queue, view(100.0), rule) == [1, 2, 3, 4]


def test_aging_stops_at_its_maximum_and_a_missing_priority_can_be_given_a_value() -> None:
    def ask(handle: int, priority: int | None, arrival: float) -> Seq:
        plain = seq(handle, 5, arrival=arrival)
        return Seq(dataclasses.replace(plain.req, priority=priority), plain.tokens, 4)

    queue = [ask(1, 0, 0.0), ask(2, 4, 90.0), ask(3, None, 95.0)]
    without = PriorityRule(enabled=True, aging_rate=0.1)
    assert order("fcfs", queue, view(now=100.0), without) == [1, 2, 3], "0 + 10, 4 + 1"
    capped = dataclasses.replace(without, aging_max=3.0)
    assert order("fcfs", queue, view(now=100.0), capped) == [2, 1, 3], "0 + 3, 4 + 1"
    assert order("fcfs", queue, view(now=100.0), dataclasses.replace(capped, default=7)) == [
        3,
        2,
        1,
    ]


def preempting(**over: object) -> Node:
    values: dict[str, object] = {
        "num_pages": 200, "page_size": 2, "max_running_requests": 2, "max_queued_requests": 100, "step_tokens": 64,
        "priority": PriorityRule(enabled=True, preemption_threshold=10),
    }  # fmt: skip
    return Node(Limits(**(values | over)), depth=2)  # type: ignore[arg-type]


def ranked(
    handle: int, priority: int, prompt: list[int] | None = None, max_new: int = 30
) -> object:
    req = request(handle, prompt or [handle % VOCAB] * 6, max_new, ignore_eos=True)
    return dataclasses.replace(req, priority=priority)


@pytest.mark.parametrize("mode", ["cache", "recompute", "offload", "auto"])
def test_more_important_request_takes_a_slot_and_the_victim_resumes_exactly(mode: str) -> None:
    node = preempting(preemption_mode=mode, host_pages=50)
    for handle in (0, 1):
        node.sched.add(ranked(handle, 0))  # type: ignore[arg-type]
    for _ in range(6):
        node.step()
    node.sched.add(ranked(2, 11, max_new=4))  # type: ignore[arg-type]
    while 2 not in node.finished:
        node.step()
    assert not node.finished.keys() & {0, 1}, "it did not wait for the others"
    node.run()
    assert node.sched.report.counters()["preemptions_total"] == 1
    for handle in (0, 1, 2):
        req = ranked(handle, 0)
        want = reference(req.prompt, 4 if handle == 2 else 30, True)  # type: ignore[attr-defined]
        assert node.outputs[handle] == want, "no token is repeated or skipped"
    node.sched.ledger().check_idle(200)


def test_threshold_is_strict_and_memory_preempts_too() -> None:
    node = preempting()
    for handle in (0, 1):
        node.sched.add(ranked(handle, 0))  # type: ignore[arg-type]
    node.step()
    node.sched.add(ranked(2, 10))  # type: ignore[arg-type]
    node.run()
    assert node.sched.report.counters()["preemptions_total"] == 0, (
        "a difference of exactly the threshold does not preempt"
    )

    tight = preempting(num_pages=24, max_running_requests=8, schedule_conservativeness=1.0)
    tight.sched.add(ranked(0, 0, max_new=36))  # type: ignore[arg-type]
    for _ in range(4):
        tight.step()
    tight.sched.add(ranked(1, 50, prompt=[3] * 30, max_new=10))  # type: ignore[arg-type]
    while 1 not in tight.finished:
        tight.step()
    assert tight.sched.report.counters()["preemptions_total"] == 1
    assert 0 not in tight.finished
    tight.run()
    assert tight.outputs[0] == reference(ranked(0, 0).prompt, 36, True)  # type: ignore[attr-defined]


def test_no_request_is_preempted_more_often_than_allowed_or_close_to_the_end() -> None:
    node = preempting(max_running_requests=1, max_preemptions_per_request=2)
    node.sched.add(ranked(0, 0, max_new=60))  # type: ignore[arg-type]
    for handle in range(1, 6):
        for _ in range(5):
            node.step()
        node.sched.add(ranked(handle, 20 * handle, max_new=3))  # type: ignore[arg-type]
    node.run()
    assert node.sched.report.counters()["preemptions_total"] == 2
    assert node.outputs[0] == reference(ranked(0, 0).prompt, 60, True)  # type: ignore[attr-defined]

    short = preempting(max_running_requests=1, preemption_min_remaining_tokens=8)
    short.sched.add(ranked(0, 0, max_new=8))  # type: ignore[arg-type]
    for _ in range(3):
        short.step()
    short.sched.add(ranked(1, 100))  # type: ignore[arg-type]
    short.run()
    assert short.sched.report.counters()["preemptions_total"] == 0


@pytest.mark.parametrize("seed", seeds(60))
def test_random_load_under_every_policy_and_priority_gives_reference_tokens(seed: int) -> None:
    rng = random.Random(1000 + seed)
    page = rng.choice([1, 2, 4])
    node = Node(
        Limits(
            rng.randint(12, 60) * (4 // page), page, rng.choice([1, 2, 4]), 1000, page * rng.randint(1, 6),
            policy=rng.choice(sorted(POLICIES)),
            priority=PriorityRule(enabled=rng.random() < 0.7, preemption_threshold=rng.choice([0, 3]), aging_rate=0.01),
            preemption_mode=rng.choice(["recompute", "cache", "offload", "auto"]),
            host_pages=rng.choice([0, 5, 40]),
            max_partial_prefills=rng.choice([1, 4]),
            schedule_conservativeness=rng.choice([0.1, 1.0]),
        ),
        depth=rng.choice([1, 2]),
    )  # fmt: skip
    shared = [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 16))] for _ in range(3)]
    want = {}
    for handle in range(40):
        want[handle] = add_random_request(node, rng, handle, shared)
        for _ in range(rng.randint(0, 5)):
            node.step()
    node.run()
    assert node.outputs == want
    node.sched.ledger().check_idle(node.limits.num_pages)


def test_srpt_lets_a_short_prompt_pass_a_long_one_between_its_chunks() -> None:
    done = {}
    for policy in ("fcfs", "srpt-aging"):
        node = Node(Limits(400, 4, 8, 100, 16, policy=policy), depth=1)
        node.sched.add(request(0, [1] * 200, 1, ignore_eos=True))
        node.step()
        node.sched.add(request(1, [2] * 12, 1, ignore_eos=True))
        steps = 0
        while 1 not in node.finished:
            node.step()
            steps += 1
        assert (0 in node.finished) == (policy == "fcfs")
        node.run()
        done[policy] = steps
        assert node.outputs[0] == reference(request(0, [1] * 200, 1).prompt, 1, True)
    assert done["srpt-aging"] <= 2 < 12 <= done["fcfs"]


def test_lpm_with_in_batch_thresholds_puts_repeats_of_a_cold_prefix_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def first_rows(params: PolicyParams) -> list[int]:
        node = Node(Limits(64, 4, 8, 100, 1000, policy="lpm", policy_params=params), depth=1)
        node.sched.add(request(9, [4] * 9, 1, ignore_eos=True))
        node.run()  # [4] * 8 is cached
        for handle, prompt in enumerate(
            ([1] * 8 + [2], [1] * 8 + [3], [2] * 9, [4] * 8 + [1], [4] * 8 + [2], [1] * 3)
        ):
            node.sched.add(request(handle, prompt, 1, ignore_eos=True))
        plan = node.sched.plan()
        assert plan is not None
        return [row.handle for row in plan.rows]

    assert first_rows(PolicyParams()) == [3, 4, 0, 1, 2, 5]
    set_as_there = PolicyParams(
        in_batch_prefix_caching_check_threshold=4, in_batch_prefix_caching_deprioritize_threshold=8
    )
    assert first_rows(set_as_there) == [3, 4, 0, 2, 5, 1]
    longer = PolicyParams(
        in_batch_prefix_caching_check_threshold=4, in_batch_prefix_caching_deprioritize_threshold=9
    )
    assert first_rows(longer) == [3, 4, 0, 1, 2, 5], "only 8 tokens are alike"
    warm_too = PolicyParams(
        in_batch_prefix_caching_check_threshold=8, in_batch_prefix_caching_deprioritize_threshold=8
    )
    assert first_rows(warm_too) == [3, 0, 2, 5, 1, 4]
    monkeypatch.setenv("IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD", "32")
    monkeypatch.setenv("IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD", "16")
    got = from_config.limits(build_config({}), 100).policy_params
    assert (
        got.in_batch_prefix_caching_check_threshold,
        got.in_batch_prefix_caching_deprioritize_threshold,
    ) == (32, 16)
