"""Priority classes: their text form, who belongs where, and the bounds of deficit round robin."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config.classes import ClassRules, parse_classes
from baton.sched.fairness.classes import DeficitRoundRobin


def rules(text: str, **more: bool) -> ClassRules:
    made, bad = parse_classes(text, **more)
    assert bad == []
    return made


def test_classes_are_read_in_order_with_weights_and_bounds() -> None:
    made = rules("interactive:8:10, standard:4:0,batch:1:-100")
    assert [(c.name, c.weight, c.bound) for c in made.classes] == [
        ("interactive", 8, 10),
        ("standard", 4, 0),
        ("batch", 1, -100),
    ]
    assert rules("only:3").names == ("only",)


@pytest.mark.parametrize(
    ("text", "complaints"),
    [
        ("a:0,b:1001,c:1", ["the weight must be 1 to 1000"] * 2),
        ("a,b:1:2:3,c:x", ["write name:weight"] * 3),
        ("a b:1,,9:2", ["begins with its name"] * 3),
        ("a:1,a:2", ["'a': is named twice"]),
        ("a:1:5,b:1", ["to every class or to none"]),
        ("a:1:5,b:1:5", ["must shrink"]),
        ("a:1:5,b:1:7", ["must shrink"]),
        (",".join(f"c{i}:1" for i in range(17)), ["17 classes: at most 16"]),
    ],
)
def test_every_mistake_is_reported(text: str, complaints: list[str]) -> None:
    _, bad = parse_classes(text)
    assert len(bad) == len(complaints)
    assert all(complaint in line for complaint, line in zip(complaints, bad, strict=True)), bad


def test_service_tiers_and_priorities_find_their_class() -> None:
    three, two, one = rules("a:8,b:4,c:1"), rules("a:8,b:1"), rules("a:1")
    assert [three.of_tier(t) for t in ("priority", "scale", "default", "auto", "flex")] == [
        "a",
        "a",
        "b",
        "b",
        "c",
    ]
    assert [two.of_tier(t) for t in ("priority", "default", "flex")] == ["a", "a", "b"]
    assert one.of_tier("flex") == "a"
    assert three.of_priority(99) == "b", "without bounds a priority says nothing about the class"
    bands = rules("a:8:10,b:4:0,c:1:-5")
    assert [bands.of_priority(p) for p in (11, 10, 9, 0, -5, -6, None)] == [
        "a",
        "a",
        "b",
        "b",
        "c",
        "c",
        "b",
    ]
    low = rules("a:8:0,b:4:10,c:1:99", low_values_first=True)
    assert [low.of_priority(p) for p in (-1, 0, 1, 10, 99, 100, None)] == [
        "a",
        "a",
        "b",
        "b",
        "c",
        "c",
        "b",
    ]
    assert three.no_better("a", "b") == "b"
    assert three.no_better("c", "b") == "c"


CLASSES = st.lists(st.integers(1, 20), min_size=2, max_size=5)
QUANTUM = 64
MOST = 64
"""Largest single charge: a chunk."""


@given(weights=CLASSES, seed=st.integers(0, 10_000))
def test_backlogged_classes_share_by_weight_in_every_window(weights: list[int], seed: int) -> None:
    """Two classes that always want to compute; the others come and go; sizes are adversarial."""
    rng = random.Random(seed)
    drr = DeficitRoundRobin(weights, QUANTUM)
    i, j = 0, 1
    gaps = [Fraction(0)]
    style = [rng.choice(("small", "large", "random")) for _ in weights]
    for _ in range(300):
        ready = {i, j} | {c for c in range(2, len(weights)) if rng.random() < 0.5}
        for c in set(range(2, len(weights))) - ready:
            drr.leave(c)
        c = drr.next_turn(ready)
        assert c in ready
        n = {"small": 1, "large": MOST, "random": rng.randint(1, MOST)}[style[c]]
        drr.charge(c, n)
        served = {i: 0, j: 0, c: n}
        gaps.append(gaps[-1] + Fraction(served[i], weights[i]) - Fraction(served[j], weights[j]))
    bound = (MOST + QUANTUM) * (Fraction(1, weights[i]) + Fraction(1, weights[j]))
    assert max(gaps) - min(gaps) <= bound, "the largest difference over any window"


@given(weights=CLASSES, seed=st.integers(0, 10_000))
def test_class_that_comes_back_waits_for_one_turn_of_each_other(
    weights: list[int], seed: int
) -> None:
    rng = random.Random(seed)
    drr = DeficitRoundRobin(weights, QUANTUM)
    others = set(range(1, len(weights)))
    for _ in range(rng.randint(0, 100)):
        drr.leave(0)
        drr.charge(drr.next_turn(others), rng.randint(1, MOST))
    waited = 0
    while (c := drr.next_turn(others | {0})) != 0:
        n = rng.choice((1, MOST))
        drr.charge(c, n)
        waited += n
    assert waited <= sum(drr.shares[c] / drr.unit + MOST for c in others)


@given(weights=CLASSES, debt=st.integers(0, 10**7))
def test_rounds_that_serve_no_class_are_skipped_at_once_and_change_nothing(
    weights: list[int], debt: int
) -> None:
    """Against a naive round robin that goes round until some class is out of debt."""
    fast = DeficitRoundRobin(weights, QUANTUM)
    fast.charge(0, debt % 5000)
    fast.charge(1, debt % 3000)
    naive = DeficitRoundRobin(weights, QUANTUM)
    naive.charge(0, debt % 5000)
    naive.charge(1, debt % 3000)
    naive._skip_rounds = lambda ready: None  # type: ignore[method-assign]
    for _ in range(5):
        assert fast.next_turn({0, 1}) == naive.next_turn({0, 1})
        assert fast.credit == naive.credit
        fast.charge(0, 40)
        naive.charge(0, 40)
    fast.charge(0, debt)
    assert fast.next_turn({0}) == 0, "alone it is served whatever it owes"


def test_answers_count_against_their_class_and_idle_time_earns_nothing() -> None:
    drr = DeficitRoundRobin([1, 1], 100)
    assert drr.next_turn({0}) == 0
    drr.charge(0, 1000)  # answers, beside others' turns
    for _ in range(10):
        assert drr.next_turn({0, 1}) == 1
        drr.charge(1, 100)
    drr.leave(1)
    assert drr.next_turn({0}) == 0
    assert drr.credit[1] <= 0
    before = drr.save()
    drr.next_turn({0, 1})
    drr.restore(before)
    assert drr.save() == before
    drr.settle()
    assert drr.credit == [0, 0]


def test_while_the_turn_is_blocked_the_least_served_goes_on_and_the_turn_stays() -> None:
    drr = DeficitRoundRobin([1, 1, 1], 100)
    blocked = drr.next_turn({0, 1, 2})
    others = {0, 1, 2} - {blocked}
    first = drr.least_served(others)
    drr.charge(first, 30)
    assert drr.least_served(others) == (others - {first}).pop()
    assert drr.next_turn({0, 1, 2}) == blocked
