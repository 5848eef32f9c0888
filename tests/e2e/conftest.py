"""Clusters that all end-to-end tests share: starting one takes seconds, asking it milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.processes.cluster import Cluster


@pytest.fixture(scope="session")
def pair() -> Iterator[Cluster]:
    """Router, one prefill and one decode node, KV over shared memory: what `make run` starts."""
    with Cluster.up() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def tcp_pair() -> Iterator[Cluster]:
    """The same with KV over TCP."""
    with Cluster.up("--transport", "tcp") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def gloo_pair() -> Iterator[Cluster]:
    """The same through the slabs of a communicator."""
    with Cluster.up("--transport", "gloo", "--chunked-prefill-size", "64") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def solo() -> Iterator[Cluster]:
    """Router and one engine that does both phases: the reference."""
    with Cluster.up("--workers", "1") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def two_decode_nodes() -> Iterator[Cluster]:
    """Router, one prefill and two decode nodes: one resumes answers of the other.

    Its chunks are small, so that a long prompt can be interrupted.
    """
    flags = ("--prefill", "1", "--decode", "2", "--chunked-prefill-size", "16")
    with Cluster.up(*flags) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def two_workers() -> Iterator[Cluster]:
    """Router and two engines that do both phases: one resumes answers of the other."""
    with Cluster.up("--workers", "2") as cluster:
        yield cluster
