"""Tenants: rules of the file, virtual token counters within the paper's bound, token buckets as exact arithmetic."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config.tenants import TenantRule, TenantRules, parse_rules
from baton.sched.fairness.tenants import RateLimits, VirtualCounters


def test_rules_by_name_and_default_rule_for_all_others() -> None:
    made, bad = parse_rules(
        {
            "default": {"max_running": 2},
            "tenants": {"acme": {"weight": 2.5, "priority_class": "batch"}, "b@c": {}},
        },
        ("interactive", "batch"),
    )
    assert bad == []
    assert made.of("acme") == TenantRule(weight=2.5, priority_class="batch")
    assert made.of("b@c") == TenantRule(), "a named tenant takes nothing from default"
    assert made.of("unnamed") == TenantRule(max_running=2)
    assert parse_rules({}, ()) == (TenantRules(), [])


def test_all_mistakes_of_the_file_are_reported() -> None:
    document = {
        "defaults": {},
        "default": {"weight": 0, "speed": 1},
        "tenants": {
            "a b": {},
            "x": {
                "max_running": 1.5,
                "max_queued": -1,
                "tokens_per_minute": True,
                "priority_class": "gold",
            },
            "y": {"min_priority": 5, "max_priority": 4},
            "z": 7,
        },
    }
    _, bad = parse_rules(document, ("batch",))
    wanted = [
        "defaults: unknown", "default.weight is 0; give a number from 0.001 to 1e+06", "default.speed: unknown; limits",
        "tenants.a b: a name has", "tenants.x.max_running is 1.5; give a whole number from 1",
        "tenants.x.max_queued is -1", "tenants.x.tokens_per_minute is True", "priority_class is 'gold'; there is batch",
        "tenants.y: min_priority 5 is above max_priority 4", "tenants.z is 7; give an object",
    ]  # fmt: skip
    assert len(bad) == len(wanted)
    for want in wanted:
        assert any(want in line for line in bad), want
    assert "list" in parse_rules([], ())[1][0]
    assert "--priority-classes" in parse_rules({"default": {"priority_class": "a"}}, ())[1][0]


@given(
    st.integers(-50, 50), st.integers(-50, 50), st.none() | st.integers(-100, 100), st.booleans()
)
def test_priorities_are_clamped_into_the_range(
    a: int, b: int, asked: int | None, low_first: bool
) -> None:
    low, high = sorted((a, b))
    got = TenantRule(min_priority=low, max_priority=high).clamped(asked, low_first)
    if asked is None:
        assert got == (high if low_first else low), (
            "none counts as the least important of the range"
        )
    else:
        assert got == min(max(asked, low), high)
    assert TenantRule().clamped(asked, low_first) == asked


MOST = 50
"""Largest request: what one can be charged after it was chosen."""


@given(seed=st.integers(0, 10_000), names=st.integers(2, 6))
def test_counters_keep_the_bound_of_the_paper(seed: int, names: int) -> None:
    """Tenants come and go, two stay; served is always the least. The counters of those who wait stay within U."""
    rng = random.Random(seed)
    counters = VirtualCounters(max_idle=100)
    weight = [rng.choice((0.5, 1, 4)) for _ in range(names)]
    most = MOST / min(weight)
    waiting = set(range(names))
    for t in waiting:
        counters.activate(str(t))
    gap, gaps = 0.0, [0.0]
    for _ in range(400):
        for t in range(2, names):
            if rng.random() < 0.1:
                if t in waiting:
                    counters.deactivate(str(t))
                else:
                    counters.activate(str(t))
                waiting ^= {t}
        chosen = min(sorted(waiting), key=lambda t: counters[str(t)])
        n = rng.choice((1, MOST, rng.randint(1, MOST)))
        counters.charge(str(chosen), n / weight[chosen])
        gap += n / weight[chosen] * ((chosen == 0) - (chosen == 1))
        gaps.append(gap)
        values = [counters[str(t)] for t in waiting]
        assert max(values) - min(values) <= most + 1e-6
    assert max(gaps) - min(gaps) <= MOST / weight[0] + MOST / weight[1] + 1e-6, (
        "one maximal request of each"
    )


@given(seed=st.integers(0, 10_000))
def test_counters_equal_the_definition(seed: int) -> None:
    """enter: max(own, least of those who wait, else of the last that did); against dictionaries and min()."""
    rng = random.Random(seed)
    counters = VirtualCounters(max_idle=1000)
    own: dict[str, float] = {}
    waiting: set[str] = set()
    last = ""
    for _ in range(300):
        t = rng.choice("abcde")
        move = rng.random()
        if move < 0.5:
            if t in own:
                amount = rng.randint(1, 9)
                counters.charge(t, amount)
                own[t] += amount
        elif t in waiting:
            waiting.remove(t)
            last = t
            counters.deactivate(t)
        else:
            floor = min((own[w] for w in waiting), default=own.get(last, 0.0))
            own[t] = max(own.get(t, 0.0), floor)
            waiting.add(t)
            counters.activate(t)
        assert {w: counters[w] for w in waiting} == {w: own[w] for w in waiting}


def test_pause_earns_nothing_and_a_lone_tenant_runs_into_no_debt() -> None:
    counters = VirtualCounters(max_idle=10)
    counters.activate("busy")
    counters.activate("pausing")
    counters.deactivate("pausing")
    counters.charge("busy", 1_000_000)
    counters.activate("pausing")
    assert counters["pausing"] == counters["busy"]
    for name in ("busy", "pausing"):
        counters.deactivate(name)
    counters.charge("busy", 500)
    counters.activate("new")
    assert counters["new"] >= 1_000_000


def test_idle_tenants_are_forgotten_the_longest_idle_first_and_memory_is_bounded() -> None:
    counters = VirtualCounters(max_idle=2)
    for name in "abc":
        counters.activate(name)
        counters.charge(name, 10)
        counters.deactivate(name)
    assert counters.num_forgotten == 1
    counters.charge("a", 5)  # still runs: forgotten all the same, no error
    assert set(counters._idle) == {"b", "c"}
    stays = VirtualCounters(max_idle=5)
    stays.activate("least")
    for _ in range(5000):
        stays.charge("other", 1)
        stays.activate("other")
        stays.deactivate("other")
    assert len(stays._lower_bounds) < 100


def limits(per_minute: int | None, most: int = 100) -> RateLimits:
    return RateLimits(TenantRules(named={"t": TenantRule(tokens_per_minute=per_minute)}), most)


@given(seed=st.integers(0, 10_000), per_minute=st.integers(1, 100_000))
def test_buckets_equal_exact_arithmetic_on_a_virtual_clock(seed: int, per_minute: int) -> None:
    rng = random.Random(seed)
    rate = limits(per_minute)
    level, at = Fraction(per_minute), Fraction(0)
    for _ in range(200):
        now = at + Fraction(rng.randint(0, 64), rng.choice((1, 4, 64)))
        level, at = min(level + (now - at) * per_minute / 60, Fraction(per_minute)), now
        n = rng.randint(1, per_minute + per_minute // 4)
        if rng.random() < 0.3:
            rate.spend("t", n // 3, float(now))
            level -= n // 3
            continue
        missing = min(Fraction(n), Fraction(per_minute)) - level
        wait = rate.admit("t", n, float(now))
        assert wait == pytest.approx(max(float(missing * 60 / per_minute), 0.0), rel=1e-6, abs=1e-6)
        if wait == 0:
            level -= n


@given(seed=st.integers(0, 10_000))
def test_no_window_lets_more_through_than_a_minutes_tokens_and_the_rate(seed: int) -> None:
    rng = random.Random(seed)
    per_minute = 6000
    rate, now = limits(per_minute), 0.0
    through: list[tuple[float, int]] = []
    for _ in range(150):
        now += rng.choice((0.0, 0.01, 1.0, rng.random() * 30))
        n = rng.randint(1, 3000)
        if rate.admit("t", n, now) == 0:
            through.append((now, n))
    for i, (start, _) in enumerate(through):
        total = 0
        for at, n in through[i:]:
            total += n
            assert total <= per_minute + (at - start) * per_minute / 60 + 1e-6


def test_waiting_the_returned_time_is_enough_and_a_moment_less_is_not() -> None:
    rate = limits(600)
    assert rate.admit("t", 600, 0.0) == 0
    wait = rate.admit("t", 100, 3.0)
    assert wait == pytest.approx(7.0)
    assert rate.admit("t", 100, 3.0 + wait - 0.001) > 0
    assert rate.admit("t", 100, 3.0 + wait + 1e-9) == 0


def test_request_larger_than_a_minute_needs_a_full_bucket_and_answers_overdraw_it() -> None:
    rate = limits(60)
    assert rate.admit("t", 100, 0.0) == 0
    assert rate.admit("t", 1, 0.0) == pytest.approx(41)
    rate.spend("t", 20, 0.0)
    assert rate.admit("t", 1, 0.0) == pytest.approx(61)
    rate.spend("t", -20, 0.0)
    assert rate.admit("t", 1, 0.0) == pytest.approx(41)


def test_tenants_without_a_limit_pass_and_the_table_is_bounded() -> None:
    rate = limits(None)
    assert rate.admit("t", 10**9, 0.0) == 0
    assert not rate._buckets
    many = RateLimits(TenantRules(default=TenantRule(tokens_per_minute=10)), 3)
    for i in range(10):
        assert many.admit(f"t{i}", 10, 0.0) == 0
    assert list(many._buckets) == ["t7", "t8", "t9"]


FULL = {
    "default": {"weight": 2, "max_queued": 5},
    "tenants": {
        "a": {
            "weight": 1.5, "max_running": 3, "max_queued": 4, "max_kv_tokens": 100, "tokens_per_minute": 7,
            "priority_class": "gold", "min_priority": -1, "max_priority": 3,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("value", [None, -1, 0, 1e9, "", [], {}, True, "0.7", math.nan])
def test_replaced_value_of_the_file_is_a_limit_or_a_mistake_in_a_sentence(value: object) -> None:
    def variants_of(part: Any) -> list[Any]:
        return [
            value,
            *(
                {**part, key: other}
                for key in (part if isinstance(part, dict) else ())
                for other in variants_of(part[key])
            ),
        ]

    for document in variants_of(FULL):
        rules, mistakes = parse_rules(document, ("gold",))
        assert all(isinstance(mistake, str) for mistake in mistakes)
        for rule in rules.all:
            numbers = [rule.weight, rule.max_running, rule.max_queued, rule.max_kv_tokens]
            assert all(type(n) in (int, float) and 0 <= n < 2**60 for n in numbers if n is not None)
            assert rule.weight > 0
