"""The cheapest set of items whose gains add up to a need (minimum knapsack): whom to preempt, as plain numbers.

Three steps, each as good as the time spent on it:

1. Greedy by cost per gain, in which an item that would finish the set is tried as its end and then passed over: at most
   twice the optimum (Csirik, Frenk, Labbé, Zhang 1991, "Heuristics for the 0-1 min-knapsack problem").
2. Branch and bound from there: an item's own ratio bounds what every unit behind it costs. Exact when it ends within
   `SEARCH_NODES`, which sets of a few dozen items do.
3. Otherwise the best set seen so far, which is never worse than step 1.
"""

from __future__ import annotations

from collections.abc import Sequence

SEARCH_NODES = 2000
"""About a millisecond of search."""


def cheapest_cover(
    costs: Sequence[int], gains: Sequence[int], need: int, search_nodes: int = SEARCH_NODES
) -> list[int] | None:
    """Indices of a non-empty set with Σ gains ≥ need and the least Σ costs; None when all together do not reach it.

    Args:
        costs, gains: not negative, of equal length. Among equally cheap sets earlier items win.
        search_nodes: size of the exact search; 0 leaves the greedy answer.
    """
    if not costs:
        return None
    if need <= 0:
        return [min(range(len(costs)), key=costs.__getitem__)]
    if sum(gains) < need:
        return None
    order = sorted((i for i in range(len(costs)) if gains[i]), key=lambda i: costs[i] / gains[i])
    best = _greedy(order, costs, gains, need)
    return sorted(_search(order, costs, gains, need, best, search_nodes))


def _greedy(order: Sequence[int], costs: Sequence[int], gains: Sequence[int], need: int) -> list[int]:
    best: list[int] = []
    best_cost = -1
    chosen: list[int] = []
    spent = 0
    for i in order:
        if gains[i] < need:
            chosen.append(i)
            spent += costs[i]
            need -= gains[i]
        elif best_cost < 0 or spent + costs[i] < best_cost:
            best, best_cost = [*chosen, i], spent + costs[i]
    return best


def _search(
    order: Sequence[int], costs: Sequence[int], gains: Sequence[int], need: int, best: list[int], nodes: int
) -> list[int]:
    best_cost = sum(costs[i] for i in best)
    behind = [0] * (len(order) + 1)
    for at in range(len(order) - 1, -1, -1):
        behind[at] = behind[at + 1] + gains[order[at]]
    stack: list[tuple[int, int, int, tuple[int, ...]]] = [(0, need, 0, ())]
    while stack and nodes > 0:
        at, left, spent, chosen = stack.pop()
        if left <= 0:
            if spent < best_cost:
                best, best_cost = list(chosen), spent
            continue
        # The cheapest unit behind `at` costs costs[i] / gains[i], so `left` of them cost at least that much each.
        if behind[at] < left:
            continue
        i = order[at]
        if spent * gains[i] + left * costs[i] >= best_cost * gains[i]:
            continue
        nodes -= 1
        stack.append((at + 1, left, spent, chosen))
        stack.append((at + 1, left - gains[i], spent + costs[i], (*chosen, i)))
    return best
