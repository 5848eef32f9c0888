"""Fields of routers from a client: they change nothing behind the router, and a decode node that is asked directly
refuses a rank that the prefill node has not."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.processes.cluster import Cluster, count

MESSAGES = [{"role": "user", "content": "hello"}]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "demo", "prompt": ["a", "b"], "max_tokens": 2}),
    ("/v1/completions", {"model": "demo", "prompt": "a", "max_tokens": 2, "n": 2}),
    ("/v1/completions", {"model": "demo", "prompt": "a", "max_tokens": 2, "stream": True}),
    ("/v1/chat/completions", {"model": "demo", "messages": MESSAGES, "max_tokens": 2}),
    ("/v1/responses", {"model": "demo", "input": "hello", "max_output_tokens": 16}),
    ("/v1/messages", {"model": "demo", "messages": MESSAGES, "max_tokens": 2}),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}}),
]
HOSTILE: dict[str, Any] = {
    "bootstrap_host": "192.0.2.1",
    "bootstrap_port": 9,
    "bootstrap_room": 5,
    "data_parallel_rank": 9,
    "data_parallel_rank_decode": 9,
    "routed_dp_rank": 9,
    "disagg_prefill_dp_rank": 9,
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "192.0.2.1"},
    "baton_resume": {"ids": [5], "seed": 1, "created": 1},
}


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_fields_of_routers_from_a_client_change_no_answer(
    pair: Cluster, path: str, body: dict[str, Any]
) -> None:
    retries = count(pair.url, "baton_router_retries_total")
    headers = {"x-baton-emit-tokens": "1", "x-data-parallel-rank": "9"}
    answer = httpx.post(pair.url + path, json={**body, **HOSTILE}, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    assert ": baton" not in answer.text
    assert count(pair.url, "baton_router_retries_total") == retries


def test_decode_node_refuses_a_rank_that_its_prefill_node_has_not(pair: Cluster) -> None:
    prefill, decode = pair.node("prefill"), pair.node("decode")
    meet = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill["bootstrap_port"],
        "bootstrap_room": 4_000_000_000_000,
    }
    new_name = {"disagg_prefill_dp_rank": 9}
    old_name = {"data_parallel_rank": 9}
    cases = [(path, body, new_name) for path, body in REQUESTS] + [(*REQUESTS[0], old_name)]
    for path, body, rank in cases:
        url = decode["url"] + path
        answer = httpx.post(url, json={**body, **meet, **rank}, timeout=60)
        assert answer.status_code == 400, (path, answer.text)
        assert "the prefill node has no rank 9: it has 1, from 0 on" in answer.text
        if path != "/v1/messages":
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("invalid_value", "disagg_prefill_dp_rank")
    pair.assert_nothing_is_held()
