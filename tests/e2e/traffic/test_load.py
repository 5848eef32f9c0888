"""Many clients, and clients that leave."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import pytest

from tests.support.processes.cluster import Cluster, count, eventually, settled

TOO_LONG = 1900
"""Tokens of an answer that no client waits for; seconds of work."""


def test_64_requests_at_once_are_all_answered(pair: Cluster) -> None:
    with ThreadPoolExecutor(64) as pool:
        answers = list(
            pool.map(
                lambda i: pair.complete(f"{i % 8}: pages travel from", max_tokens=12), range(64)
            )
        )
    assert len(set(answers)) <= 8, "equal prompts got different greedy answers"
    assert all(answers[i] == answers[i % 8] for i in range(64))
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
def test_client_that_leaves_frees_both_nodes(pair: Cluster, is_stream: bool) -> None:
    decode = pair.node("decode")["url"]
    pair.complete("so that the counter exists", max_tokens=2)
    body = {
        "model": "demo",
        "max_tokens": TOO_LONG,
        "temperature": 0,
        "ignore_eos": True,
        "stream": is_stream,
    }

    def was_cut() -> bool:
        """Leave a request early; False if it had ended by then, which a busy machine may do."""
        before = settled(lambda: count(decode, "baton_generated_tokens_total"))
        connection = HTTPConnection(pair.url.removeprefix("http://"), timeout=30)
        connection.request(
            "POST", "/v1/completions", json.dumps({**body, "prompt": f"leaving {is_stream}"})
        )
        if is_stream:
            assert connection.getresponse().readline().startswith(b"data: ")
        else:
            eventually(
                "it runs", lambda: count(decode, "baton_generated_tokens_total") > before, 20
            )
        connection.close()
        pair.assert_nothing_is_held()
        return settled(lambda: count(decode, "baton_generated_tokens_total")) - before < TOO_LONG

    eventually("an abandoned request is cut", was_cut)
    pair.complete("still here", max_tokens=2)
