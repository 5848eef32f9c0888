"""Recorded plans: digests of what the scheduler planned in one scenario per policy and role.

A change that only moves or renames code leaves every digest equal. `python -m tests.support.sched.recorded_plans`
records them again, for a change that is meant to plan differently; the commit says what changed and why.
"""

from __future__ import annotations

import json
from pathlib import Path

from baton.sched.policies import POLICIES
from tests.support.sched.scenarios import Scenario, run_scenario

RECORDED = Path(__file__).parents[2] / "sim/golden/plans.json"
TURNS = 160
ROLES = ("null", "pair")
NAMES = [f"{policy} {role}" for policy in POLICIES for role in ROLES]


def digest_of(name: str) -> str:
    """Digest of all plans of one scenario, field by field. `name`: policy and role."""
    policy, role = name.split()
    seed = 500 + NAMES.index(name)
    return run_scenario(
        Scenario(seed=seed, policy=policy, role=role, page=4, depth=2, priority=True), TURNS
    ).digest


def main() -> None:
    RECORDED.parent.mkdir(exist_ok=True)
    RECORDED.write_text(json.dumps({name: digest_of(name) for name in NAMES}, indent=1) + "\n")


if __name__ == "__main__":
    main()
