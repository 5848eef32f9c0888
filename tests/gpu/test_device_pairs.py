"""Prefill and decode processes with their pages on one GPU, by each transport: one process's tokens, and kills."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from tests.e2e.failover.test_faults import killed_node_is_survived
from tests.gpu.test_nccl import PROMPTS, SHARED_GPU
from tests.support.processes.cluster import Cluster, metric

pytestmark = pytest.mark.timeout(600)
FLAGS = (
    "--device",
    "cuda",
    "--dtype",
    "float32",
    "--attention-backend",
    "torch",
    "--max-total-tokens",
    "16384",
)
"""float32 and the reference backend: tokens do not hang on how a batch is cut."""
SMALL = ("--chunked-prefill-size", "64", "--kv-lease-secs", "5")
SLOW = {"rules": [{"on": "PAGE", "do": {"delay_ms": 4}, "repeat": True}]}


@pytest.fixture(scope="module")
def want() -> list[list[int]]:
    with Cluster.up("--workers", "1", *FLAGS, *SMALL) as solo:
        return [solo.generate_ids(prompt, 24) for prompt in PROMPTS]


@pytest.fixture(scope="module", params=["cuda_ipc", "nccl"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[str, Cluster]]:
    """Copies by cuda_ipc are slow, so that a kill finds some under way."""
    if request.param == "nccl" and torch.cuda.nccl.version() < (2, 30):
        pytest.skip(f"NCCL {torch.cuda.nccl.version()} refuses two ranks on one GPU; 2.30 does not")
    flags = [*FLAGS, *SMALL, "--transport", request.param, "--test-kv-fault", json.dumps(SLOW)]
    with Cluster.up(*flags, env=SHARED_GPU) as cluster:
        yield request.param, cluster


def check(cluster: Cluster, via: str, want: list[list[int]]) -> None:
    assert [cluster.generate_ids(prompt, 24) for prompt in PROMPTS] == want
    decode = cluster.node("decode")["url"]
    assert metric(decode, "baton_kv_pull_bytes_total", transport=via) > 0
    assert metric(decode, "baton_kv_transport_fallbacks_total") == 0
    cluster.assert_nothing_is_held()


def test_two_processes_equal_one(pair: tuple[str, Cluster], want: list[list[int]]) -> None:
    via, cluster = pair
    check(cluster, via, want)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_killed_process_is_survived(pair: tuple[str, Cluster], role: str) -> None:
    """kill -9 while pages are copied: no wrong token, no held page, and service again."""
    _, cluster = pair
    killed_node_is_survived(cluster, role, prompt_words=600, max_tokens=8)
    cluster.complete("a new pair", max_tokens=4)


@pytest.mark.parametrize("via", ["gloo", "tcp"])
def test_through_host_memory(via: str, want: list[list[int]]) -> None:
    with Cluster.up(*FLAGS, *SMALL, "--transport", via) as cluster:
        check(cluster, via, want)
