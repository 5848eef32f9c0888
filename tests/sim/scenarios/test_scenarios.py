"""Random scenarios of tests.support.sched.scenarios over every policy, role, page size, overlap and priority setting.

A failure prints its scenario; `run_scenario(Scenario(...), turns)` reproduces it.
"""

from __future__ import annotations

import dataclasses

import pytest

from baton.sched.policies import POLICIES
from tests.support.sched.scenarios import Scenario, ScenarioLog, run_scenario, scenarios

TURNS = 120
LONG_STEPS = 200_000


@pytest.mark.parametrize("scenario", scenarios(0)[::3], ids=str)
def test_every_invariant_holds_in_random_scenarios(scenario: Scenario) -> None:
    log = run_scenario(scenario, TURNS)
    assert log.steps > 0 or log.endings.keys() <= {"REFUSED", "ERROR", "ABORTED"}


@pytest.mark.parametrize("scenario", scenarios(300, is_tight=True)[::5], ids=str)
def test_every_invariant_holds_with_short_queues_and_priorities_that_change(
    scenario: Scenario,
) -> None:
    log = run_scenario(scenario, TURNS)
    assert log.steps > 0 or log.endings.keys() <= {"REFUSED", "ERROR", "ABORTED"}


@pytest.mark.parametrize("scenario", scenarios(100)[::17], ids=str)
def test_same_scenario_gives_same_plans_and_another_seed_others(scenario: Scenario) -> None:
    first, again = run_scenario(scenario, TURNS), run_scenario(scenario, TURNS)
    assert (first.digest, first.endings) == (again.digest, again.endings)
    assert (
        first.digest
        != run_scenario(dataclasses.replace(scenario, seed=scenario.seed + 1), TURNS).digest
    )


@pytest.mark.parametrize(
    ("scenario", "turns"),
    [
        (
            Scenario(seed=10053, policy="dfs-weight", role="null", page=4, depth=1, priority=True),
            400,
        ),
        (
            Scenario(seed=20071, policy="dfs-weight", role="pair", page=16, depth=2, priority=True),
            400,
        ),
        (Scenario(seed=20106, policy="random", role="null", page=16, depth=2, priority=False), 400),
        (Scenario(seed=20118, policy="random", role="pair", page=16, depth=2, priority=False), 400),
        (Scenario(seed=40043, policy="lpm", role="pair", page=4, depth=2, priority=True), TURNS),
        (Scenario(seed=40206, policy="hrrn", role="pair", page=1, depth=2, priority=False), TURNS),
        (Scenario(seed=70036, policy="lpm", role="pair", page=1, depth=1, priority=False), TURNS),
    ],
    ids=str,
)
def test_scenarios_that_once_broke_an_invariant(scenario: Scenario, turns: int) -> None:
    assert run_scenario(scenario, turns).steps > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_hundred_thousand_random_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """Memory from 1 to 100 % of what all live requests need; aborts hit every state."""
    total = ScenarioLog()
    first_seed = 10_000
    while total.steps < LONG_STEPS:
        for policy in POLICIES:
            many = scenarios(first_seed) + scenarios(first_seed + 5_000, is_tight=True)
            for scenario in [w for w in many if w.policy == policy]:
                log = run_scenario(scenario, 400)
                total.steps += log.steps
                total.checked += log.checked
                total.endings += log.endings
            with capsys.disabled():
                print(
                    f"\n{total.steps} of {LONG_STEPS} steps, {policy}: {dict(total.endings)}",
                    end="",
                    flush=True,
                )
        first_seed += 10_000
    assert {"STOP", "LENGTH", "ERROR", "ABORTED", "REFUSED"} <= total.endings.keys()
    for kind in (
        "gap",
        "order",
        "admission refused",
        "preemption",
        "no page to grow",
        "priorities adjusted",
    ):
        assert total.checked[kind] > 10, kind
    assert {key.removesuffix(" in flight") for key in total.checked if key.startswith("abort")} >= {
        "abort null waiting", "abort null running", "abort prefill waiting", "abort prefill leased",
        "abort prefill running", "abort decode opening", "abort decode transfer", "abort decode running",
        "abort null suspended",
    }  # fmt: skip
