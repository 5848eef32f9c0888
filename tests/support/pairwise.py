"""Few combinations that still contain every pair of values: most failures need two settings, hardly any needs five."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def product(axes: Mapping[str, Sequence[Any]], is_valid: Callable[[Case], bool]) -> list[Case]:
    """Every valid combination."""
    cases = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return [case for case in cases if is_valid(case)]


def pairwise(axes: Mapping[str, Sequence[Any]], is_valid: Callable[[Case], bool]) -> list[Case]:
    """A greedy selection of `product` that covers each pair of values which occurs in it; the same one every time."""
    cases = product(axes, is_valid)
    numbers: dict[object, int] = {}
    covers = [
        sum(1 << numbers.setdefault(pair, len(numbers)) for pair in pairs(case)) for case in cases
    ]
    missing = (1 << len(numbers)) - 1
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda i: (covers[i] & missing).bit_count())
        chosen.append(cases[best])
        missing &= ~covers[best]
    return chosen


def pairs(case: Case) -> list[tuple[tuple[str, Any], ...]]:
    return list(itertools.combinations(case.items(), 2))
