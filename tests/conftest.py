"""Property tests have no time limit; tests that share what is slow to start run in groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

ROOT = Path(__file__).parents[1]
SHARED_GROUPS = {
    # Most of it is in the process of the tests: beside the servers of others.
    "promises": ("tests/fault/promises",),
    "real weights": ("tests/e2e/engines/test_real_weights.py",),
    # Tests that ask the clusters of a session: a second worker would start them again.
    "shared clusters": (
        "tests/clients",
        "tests/e2e/api",
        "tests/e2e/engines",
        "tests/e2e/failover",
        "tests/e2e/traffic/test_load.py",
        "tests/fault",
    ),
    "own clusters": ("tests/e2e",),
    "fronts without a model": ("tests/contract",),
    # A second worker would make the checkpoints again, and compute transformers' answers.
    "checkpoints of transformers": ("tests/parity",),
    "prepared Python processes": ("tests/unit/layers",),
}
"""Groups of tests that share servers, processes or files of a session, and where they are. The
first match counts.
"""

# Workers share the cores: a second compute thread in each would only wait for the others'.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_xdist_auto_num_workers() -> int:
    """One worker more than cores for `-n auto`: tests of servers wait half of the time."""
    return len(os.sched_getaffinity(0)) + 1


def group_of(path: Path) -> str:
    """Name of the group that runs on one worker: a shared one, or the file."""
    for group, folders in SHARED_GROUPS.items():
        if any(path.is_relative_to(folder) for folder in folders):
            return group
    return path.as_posix()


class GroupScheduling(LoadScopeScheduling):
    """Gives all tests of a group to one worker.

    xdist's own groups travel in the ids of tests, which pytest 9.2 does not let it change: each
    test was then given to any worker, and every worker started every cluster.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(Path(nodeid.partition("::")[0]))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling:
    """The scheduler of `pytest -n`, whatever `--dist` says."""
    return GroupScheduling(config, log)
