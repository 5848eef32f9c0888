"""Prefill and decode processes whose pages are on a device, over cuda_ipc.

The device is a stand-in (tests/support/devices/stand_in.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.engines.test_equal import prompts
from tests.e2e.failover.test_faults import killed_node_is_survived
from tests.support.processes.cluster import Cluster, eventually, metric

pytestmark = pytest.mark.timeout(240)
REPO = Path(__file__).parents[3]
SITE = REPO / "tests" / "support" / "devices" / "stand_in_site"
SLOW = {"rules": [{"on": "PAGE", "do": {"delay_ms": 4}, "repeat": True}]}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """--transport is left at auto. Copies are slow, so that a kill finds some under way."""
    path = os.pathsep.join([str(SITE), str(REPO), str(REPO / "engine")])
    flags = [
        "--chunked-prefill-size",
        "64",
        "--kv-lease-secs",
        "5",
        "--test-kv-fault",
        json.dumps(SLOW),
    ]
    with Cluster.up(*flags, env={"PYTHONPATH": path}) as cluster:
        yield cluster


def pulled(cluster: Cluster, via: str) -> float:
    return metric(cluster.node("decode")["url"], "baton_kv_pull_bytes_total", transport=via)


def test_two_processes_over_cuda_ipc_equal_one(cluster: Cluster, solo: Cluster) -> None:
    want = [solo.generate_ids(prompt, 24) for prompt in prompts()]
    assert [cluster.generate_ids(prompt, 24) for prompt in prompts()] == want
    assert pulled(cluster, "cuda_ipc") > 0
    assert pulled(cluster, "tcp") == 0
    cluster.assert_nothing_is_held()


@pytest.mark.parametrize("role", ["decode", pytest.param("prefill", marks=pytest.mark.slow)])
def test_killed_process_is_survived(cluster: Cluster, role: str) -> None:
    """The dead process's memory holds rubbish from then on, where it is still open; no token comes from that."""
    killed_node_is_survived(cluster, role, prompt_words=600, max_tokens=8)
    everyone = {node["url"] for node in cluster.state["nodes"]}
    eventually(
        "the router has both again", lambda: everyone <= cluster.ready()
    )  # until then D computes prompts itself
    before = pulled(cluster, "cuda_ipc")
    cluster.complete("a new pair opens its pages again " * 4, max_tokens=4)
    already = 0 if role == "decode" else before
    eventually("pages came by cuda_ipc again", lambda: pulled(cluster, "cuda_ipc") > already)
