"""The cluster that all clients ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.cluster import Cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder starts processes for minutes."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """Router, one prefill node and two decode nodes, KV over TCP."""
    with Cluster.up("--prefill", "1", "--decode", "2", "--transport", "tcp") as cluster:
        yield cluster
