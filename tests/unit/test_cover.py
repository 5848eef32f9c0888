"""The cheapest cover against brute force: exact for small sets, within twice the optimum by the greedy step alone."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.sched.memory.min_cost_cover import cheapest_cover

ITEMS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=9)


def brute_force(items: list[tuple[int, int]], need: int) -> int | None:
    """Cost of the cheapest non-empty set that reaches `need`."""
    sets = (c for k in range(1, len(items) + 1) for c in combinations(items, k))
    fitting = [sum(cost for cost, _ in c) for c in sets if sum(gain for _, gain in c) >= need]
    return min(fitting, default=None)


@given(ITEMS, st.integers(-3, 60))
def test_the_search_finds_the_optimum(items: list[tuple[int, int]], need: int) -> None:
    costs, gains = [c for c, _ in items], [g for _, g in items]
    found = cheapest_cover(costs, gains, need)
    want = brute_force(items, need)
    assert (found is None) == (want is None)
    if found is not None:
        assert found
        assert len(set(found)) == len(found)
        assert sum(gains[i] for i in found) >= need
        assert sum(costs[i] for i in found) == want


@given(ITEMS, st.integers(-3, 60), st.integers(0, 5))
def test_cut_short_it_costs_at_most_twice_the_optimum(items: list[tuple[int, int]], need: int, nodes: int) -> None:
    costs, gains = [c for c, _ in items], [g for _, g in items]
    found = cheapest_cover(costs, gains, need, search_nodes=nodes)
    want = brute_force(items, need)
    assert (found is None) == (want is None)
    if found is not None and want is not None:
        assert sum(gains[i] for i in found) >= need
        assert want <= sum(costs[i] for i in found) <= 2 * want


def test_greedy_alone_can_be_wrong_and_the_search_corrects_it() -> None:
    costs, gains = [3, 3, 5], [2, 2, 3]
    assert cheapest_cover(costs, gains, 3, search_nodes=0) == [0, 1]
    assert cheapest_cover(costs, gains, 3) == [2]


@pytest.mark.parametrize("count", [256])
def test_hundreds_of_rows_end_within_the_node_limit(count: int) -> None:
    costs = [(i * 7919) % 4001 + 1 for i in range(count)]
    gains = [(i * 104729) % 61 + 1 for i in range(count)]
    found = cheapest_cover(costs, gains, sum(gains) // 2)
    assert found is not None
    greedy = cheapest_cover(costs, gains, sum(gains) // 2, search_nodes=0)
    assert greedy is not None
    assert sum(costs[i] for i in found) <= sum(costs[i] for i in greedy)
