"""Property tests have no time limit; tests that start servers take turns on one worker while others run beside them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

ROOT = Path(__file__).parents[1]
SERVERS = {"tests/clients", "tests/contract", "tests/e2e", "tests/fault"}

# Two workers share the cores: a second compute thread in each would only wait for the other's.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups for `pytest --dist loadgroup`: one of all that start servers, one of each other file (shared fixtures)."""
    for item in items:
        path = item.path.relative_to(ROOT)
        is_server = "/".join(path.parts[:2]) in SERVERS
        item.add_marker(pytest.mark.xdist_group("servers" if is_server else path.as_posix()))
