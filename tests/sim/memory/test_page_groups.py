"""Random scenarios of tests.support.sched.scenarios with several page groups: windows, chunks, blocks of several pages.

The pretend device checks what every row reads of each group, the watched scheduler who holds which block.
"""

from __future__ import annotations

import dataclasses

import pytest

from baton.cache.group_pages import GroupRule
from tests.support.sched.scenarios import Scenario, run_scenario, scenarios

GROUPS = {
    "window": (GroupRule("window", 5, 1),),
    "wide": (GroupRule("window", 8, 3),),
    "chunk": (GroupRule("chunk", 8, 2),),
    "both": (GroupRule("window", 1, 1), GroupRule("chunk", 12, 2)),
}


def with_groups(first_seed: int, *, is_tight: bool = False) -> list[Scenario]:
    names = list(GROUPS)
    return [
        dataclasses.replace(scenario, groups=GROUPS[names[place % len(names)]])
        for place, scenario in enumerate(scenarios(first_seed, is_tight))
    ]


@pytest.mark.parametrize("scenario", with_groups(500)[::5], ids=str)
def test_every_invariant_holds_with_several_groups(scenario: Scenario) -> None:
    assert run_scenario(scenario, 120).steps >= 0


@pytest.mark.parametrize("scenario", with_groups(800, is_tight=True)[::7], ids=str)
def test_every_invariant_holds_in_short_queues(scenario: Scenario) -> None:
    assert run_scenario(scenario, 120).steps >= 0
