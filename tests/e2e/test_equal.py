"""One process, or two over shared memory, TCP or gloo: the same tokens (DESIGN invariant 1)."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.processes.cluster import Cluster, metric

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 100, 255, 256, 257, 700)
"""Around the page size (16) and the chunk size (512)."""


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, 3072) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(solo: Cluster) -> list[list[int]]:
    return [solo.generate_ids(prompt, 24) for prompt in prompts()]


def test_two_nodes_over_shared_memory_equal_one(pair: Cluster, expected: list[list[int]]) -> None:
    assert [pair.generate_ids(prompt, 24) for prompt in prompts()] == expected
    assert metric(pair.node("decode")["url"], "baton_kv_pull_bytes_total", transport="shm") > 0


def test_two_nodes_over_tcp_equal_one(tcp_pair: Cluster, expected: list[list[int]]) -> None:
    assert [tcp_pair.generate_ids(prompt, 24) for prompt in prompts()] == expected
    tcp_pair.assert_nothing_is_held()
    assert metric(tcp_pair.node("decode")["url"], "baton_kv_pull_bytes_total", transport="tcp") > 0


def test_two_nodes_over_gloo_equal_one(gloo_pair: Cluster, expected: list[list[int]]) -> None:
    decode = gloo_pair.node("decode")["url"]
    fallbacks = metric(decode, "baton_kv_transport_fallbacks_total")
    assert [gloo_pair.generate_ids(prompt, 24) for prompt in prompts()] == expected
    gloo_pair.assert_nothing_is_held()
    assert metric(decode, "baton_kv_pull_bytes_total", transport="gloo") > 0
    assert metric(decode, "baton_kv_transport_fallbacks_total") == fallbacks


def test_tokens_do_not_depend_on_company(pair: Cluster, expected: list[list[int]]) -> None:
    """All at once, twice: batches mix, the second round hits the caches of both nodes."""
    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        for _ in range(2):
            assert (
                list(pool.map(lambda prompt: pair.generate_ids(prompt, 24), prompts())) == expected
            )
    pair.assert_nothing_is_held()
