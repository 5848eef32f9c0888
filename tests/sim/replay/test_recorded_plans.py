"""The scheduler plans what it planned when tests/sim/golden/plans.json was recorded."""

from __future__ import annotations

import json

import pytest

from tests.support.sched import recorded_plans


def test_every_policy_and_role_is_recorded() -> None:
    assert list(json.loads(recorded_plans.RECORDED.read_text())) == recorded_plans.NAMES


@pytest.mark.parametrize("name", recorded_plans.NAMES)
def test_plans_equal_the_recorded_ones(name: str) -> None:
    recorded = json.loads(recorded_plans.RECORDED.read_text())
    assert recorded_plans.digest_of(name) == recorded[name], (
        "plans changed: if that is meant, record them with python -m tests.support.sched.recorded_plans"
    )
