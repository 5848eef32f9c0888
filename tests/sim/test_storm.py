"""Scheduler storms: tests.support.storm over every policy, role, page size, overlap and priority setting.

A failure prints its Weather, which reproduces it: `ride(Weather(...), turns)`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from baton.sched.policy import POLICIES
from tests.support.storm import Log, Weather, ride, weathers

TURNS = 120
LONG_STEPS = 100_000


@pytest.mark.parametrize("weather", weathers(0)[::3], ids=str)
def test_every_promise_holds_in_a_storm(weather: Weather) -> None:
    log = ride(weather, TURNS)
    assert log.steps > 0 or log.endings.keys() <= {"REFUSED", "ERROR", "GONE"}


@pytest.mark.parametrize("weather", weathers(100)[::17], ids=str)
def test_the_same_weather_gives_the_same_plans_and_another_seed_others(weather: Weather) -> None:
    first, again = ride(weather, TURNS), ride(weather, TURNS)
    assert (first.digest, first.endings) == (again.digest, again.endings)
    assert first.digest != ride(dataclasses.replace(weather, seed=weather.seed + 1), TURNS).digest


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_hundred_thousand_random_steps(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Over all policies; memory from 1 to 100 % of what the crowd needs."""
    share = LONG_STEPS / len(POLICIES)
    total = Log()
    states: Counter[str] = Counter()
    round_ = 0
    while total.steps < share:
        for weather in [w for w in weathers(10_000 * (round_ + 1)) if w.policy == policy]:
            log = ride(weather, 400)
            total.steps += log.steps
            total.checked += log.checked
            total.endings += log.endings
            states += Counter({key: n for key, n in log.checked.items() if key.startswith("abort")})
        round_ += 1
        with capsys.disabled():
            print(f"\n{policy}: {total.steps} of {share:.0f} steps, {dict(total.endings)}", flush=True)
    assert {"STOP", "LENGTH", "ERROR", "GONE", "REFUSED"} <= total.endings.keys()
    assert {"gap", "admission refused", "preemption", "no page to grow"} <= total.checked.keys()
    assert total.checked["order"] > 100 or policy == "dfs-weight", "it has a test of its own"
    aborted = {key.removesuffix(" in flight") for key in states}
    assert aborted >= {
        "abort null waiting", "abort null running", "abort prefill waiting", "abort prefill leased",
        "abort decode opening", "abort decode transfer", "abort decode running",
    }  # fmt: skip
