"""One cluster for all cases of abuse: each ends with proof that the cluster is as it was before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fault.victim import Victim
from tests.support.processes.cluster import Cluster


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    with Cluster.up("--prefill", "1", "--decode", "1", "--kv-lease-secs", "3") as cluster:
        yield Victim(cluster)
