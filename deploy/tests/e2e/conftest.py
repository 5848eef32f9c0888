from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.tests.custom_resources import FILES, crd_file
from deploy.tests.e2e.cluster import TestCluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[TestCluster]:
    programs = os.environ.get("BATON_KUBE_PROGRAMS")
    if programs is None:
        pytest.fail("these tests need namespaces of their own: run make test-kube")
    started = TestCluster(Path(programs))
    try:
        started.start()
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="session")
def demo(cluster: TestCluster) -> TestCluster:
    """The cluster with overlay cpu-demo installed by the commands of deploy/README.md."""
    cluster.run_readme("Install the demo")
    return cluster


@pytest.fixture(scope="session")
def custom_resources(cluster: TestCluster) -> None:
    """The cluster knows the custom resources of components; no controller of theirs runs."""
    paths = [crd_file(kind) for kind in FILES]
    cluster.kubectl("apply", "--server-side", *(f"--filename={path}" for path in paths))
    cluster.kubectl(
        "wait", "--for=condition=Established", "customresourcedefinitions", "--all", "--timeout=60s"
    )
