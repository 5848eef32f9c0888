"""The cover against brute force: found when there is one, and at most twice as dear as the cheapest."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from baton.sched.memory.min_cost_cover import cheap_cover

ITEMS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=9)


def brute_force(items: list[tuple[int, int]], need: int) -> int | None:
    """Cost of the cheapest non-empty set that reaches `need`."""
    sets = (c for k in range(1, len(items) + 1) for c in combinations(items, k))
    fitting = [sum(cost for cost, _ in c) for c in sets if sum(gain for _, gain in c) >= need]
    return min(fitting, default=None)


@given(ITEMS, st.integers(-3, 60))
def test_cover_costs_at_most_twice_the_optimum(items: list[tuple[int, int]], need: int) -> None:
    costs, gains = [c for c, _ in items], [g for _, g in items]
    found = cheap_cover(costs, gains, need)
    want = brute_force(items, need)
    assert (found is None) == (want is None)
    if found is not None and want is not None:
        assert found
        assert len(set(found)) == len(found)
        assert sum(gains[i] for i in found) >= need
        spare = sum(gains[i] for i in found) - need
        assert len(found) == 1 or all(gains[i] > spare for i in found), "one could be left out"
        assert want <= sum(costs[i] for i in found) <= 2 * want
