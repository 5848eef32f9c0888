"""Tests that start servers take turns; with workers (`pytest -n 2 --dist loadgroup`) the others run beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
SERVERS = {"contract", "e2e", "peers"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(HERE).parts[0] in SERVERS:
            item.add_marker(pytest.mark.xdist_group("servers"))
