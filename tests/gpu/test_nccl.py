"""Prefill and decode nodes that share one GPU, their pages over NCCL: the single process's tokens, also after a kill.

Two ranks on one GPU need NCCL >= 2.30 and take turns on it unless CUDA MPS runs: this proves the code path, no speed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from baton.runtime.communicators import nccl
from tests.e2e.failover.test_faults import killed_node_is_survived
from tests.support.processes.cluster import Cluster, metric

pytestmark = pytest.mark.timeout(600)
PROMPTS = [[(7 * i + n) % 3000 + 3 for i in range(n)] for n in (1, 15, 16, 17, 100, 257, 700)]
SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    version = ctypes.c_int()
    nccl.load_library().ncclGetVersion(ctypes.byref(version))
    if version.value < 23000:
        pytest.skip(f"NCCL {version.value} refuses two ranks on one GPU; install 2.30 or newer")
    with Cluster.up(
        "--transport", "nccl", "--chunked-prefill-size", "64", env=SHARED_GPU
    ) as cluster:
        yield cluster


def nccl_bytes(cluster: Cluster) -> float:
    return metric(cluster.node("decode")["url"], "baton_kv_pull_bytes_total", transport="nccl")


def test_two_processes_over_nccl_equal_one(pair: Cluster) -> None:
    with Cluster.up("--workers", "1") as solo:
        want = [solo.generate_ids(prompt, 24) for prompt in PROMPTS]
    assert [pair.generate_ids(prompt, 24) for prompt in PROMPTS] == want
    assert nccl_bytes(pair) > 0
    assert metric(pair.node("decode")["url"], "baton_kv_transport_fallbacks_total") == 0
    pair.assert_nothing_is_held()


def test_killed_prefill_process_is_aborted_or_given_up(pair: Cluster) -> None:
    """D's receive waits on the GPU for a process that is gone. Its abort may hang; the service may not."""
    killed_node_is_survived(pair, "prefill", prompt_words=600, max_tokens=8)
    pair.complete("a new pair has a new communicator", max_tokens=4)
