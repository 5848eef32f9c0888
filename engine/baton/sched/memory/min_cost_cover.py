"""A cheap set of items with gains that add up to a need (minimum knapsack): the choice of victims
of preemption, as plain numbers.

Greedy by cost per gain, in which an item that would finish the set is tried as its end and then
passed over: at most twice the optimum (Csirik, Frenk, Labbé, Zhang 1991, "Heuristics for the 0-1
min-knapsack problem"). Items that the end makes superfluous are left out again.
"""

from __future__ import annotations

from collections.abc import Sequence


def cheap_cover(costs: Sequence[int], gains: Sequence[int], need: int) -> list[int] | None:
    """Indices of a non-empty set with Σ gains ≥ need and small Σ costs; None when all together do
    not reach it.

    No index of several can be left out.

    Args:
        costs, gains: not negative, of equal length. Of items with one ratio the earlier ones are
            taken first.
    """
    if not costs:
        return None
    if need <= 0:
        return [min(range(len(costs)), key=costs.__getitem__)]
    cover: list[int] = []
    chosen: list[int] = []
    best_cost = sum(costs) + 1
    chosen_cost = 0
    need_left = need
    useful = (i for i in range(len(costs)) if gains[i])
    for i in sorted(useful, key=lambda i: costs[i] / gains[i]):
        if gains[i] < need_left:
            chosen.append(i)
            chosen_cost += costs[i]
            need_left -= gains[i]
        elif chosen_cost + costs[i] < best_cost:
            best_cost = chosen_cost + costs[i]
            cover = [*chosen, i]
    spare = sum(gains[i] for i in cover) - need
    for i in sorted(cover, key=lambda i: -costs[i]):
        if gains[i] <= spare:
            spare -= gains[i]
            cover.remove(i)
    return sorted(cover) or None
