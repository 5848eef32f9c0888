"""Clusters that the peers stand in front of, and the reference engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.processes.cluster import Cluster


@pytest.fixture(scope="package")
def pair() -> Iterator[Cluster]:
    """One prefill and one decode node (and our router, idle unless asked)."""
    with Cluster.up() as cluster:
        yield cluster


@pytest.fixture(scope="package")
def wide() -> Iterator[Cluster]:
    """The same with two DP ranks in each node."""
    with Cluster.up("--dp-size", "2") as cluster:
        yield cluster


@pytest.fixture(scope="package")
def solo() -> Iterator[Cluster]:
    """One engine that does both phases."""
    with Cluster.up("--workers", "1") as cluster:
        yield cluster


@pytest.fixture(scope="package")
def wide_solo() -> Iterator[Cluster]:
    """The same with two DP ranks."""
    with Cluster.up("--workers", "1", "--dp-size", "2") as cluster:
        yield cluster


@pytest.fixture(scope="package")
def reference(solo: Cluster) -> str:
    """Where to ask that engine directly: what it answers is right."""
    return str(solo.node("worker")["url"])
