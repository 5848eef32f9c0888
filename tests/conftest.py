"""Property tests have no time limit; tests that share what is slow to start run in groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

ROOT = Path(__file__).parents[1]
SHARED_GROUPS = {
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


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups for `pytest --dist loadgroup`."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item.path.relative_to(ROOT))))
