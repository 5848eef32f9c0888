"""Property tests have no time limit; tests that start servers take turns on one worker while others run beside them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

HERE = Path(__file__).parent
SERVERS = {"contract", "e2e", "fault", "peers"}

# Two workers share the cores: a second compute thread in each would only wait for the other's.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups for `pytest --dist loadgroup`: one of all that start servers, one of each other file (shared fixtures)."""
    for item in items:
        path = item.path.relative_to(HERE)
        item.add_marker(pytest.mark.xdist_group("servers" if path.parts[0] in SERVERS else path.as_posix()))
