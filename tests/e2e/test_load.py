"""Many clients, and clients that leave."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import pytest

from tests.support.cluster import Cluster, eventually, metric

TOO_LONG = 1900
"""Tokens of an answer that nobody waits for; seconds of work."""


def test_64_requests_at_once_are_all_answered(pair: Cluster) -> None:
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda i: pair.complete(f"{i % 8}: pages travel from", max_tokens=12), range(64)))
    assert len(set(answers)) <= 8, "equal prompts got different greedy answers"
    assert all(answers[i] == answers[i % 8] for i in range(64))
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
def test_client_that_leaves_frees_both_nodes(pair: Cluster, is_stream: bool) -> None:
    decode = pair.node("decode")["url"]
    pair.complete("so that the counter exists", max_tokens=2)
    pair.assert_nothing_is_held()
    before = metric(decode, "baton_generated_tokens_total")
    body = {"model": "demo", "prompt": f"leaving {is_stream}", "max_tokens": TOO_LONG, "temperature": 0}
    connection = HTTPConnection(pair.url.removeprefix("http://"), timeout=30)
    connection.request("POST", "/v1/completions", json.dumps({**body, "ignore_eos": True, "stream": is_stream}))
    if is_stream:
        assert connection.getresponse().readline().startswith(b"data: ")
    else:
        eventually("it runs", lambda: metric(decode, "baton_requests", state="running") > 0, 20)
    connection.close()
    pair.assert_nothing_is_held()
    assert metric(decode, "baton_generated_tokens_total") - before < TOO_LONG, "it ran to its end"
    pair.complete("still here", max_tokens=2)
