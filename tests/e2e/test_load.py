"""Many clients, and clients that leave."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.cluster import Cluster, eventually, metric


def test_64_requests_at_once_are_all_answered(pair: Cluster) -> None:
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda i: pair.complete(f"{i % 8}: pages travel from", max_tokens=12), range(64)))
    assert len(set(answers)) <= 8, "equal prompts got different greedy answers"
    assert all(answers[i] == answers[i % 8] for i in range(64))
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("path", ["stream", "whole"])
def test_client_that_leaves_frees_both_nodes(pair: Cluster, path: str) -> None:
    decode = pair.node("decode")["url"]

    def generated() -> float:
        return metric(decode, "baton_generated_tokens_total")

    def running() -> bool:
        return metric(decode, "baton_requests", state="running") > 0

    with pair.client() as client:
        options = {"model": "demo", "prompt": f"leaving {path}", "max_tokens": 1900, "temperature": 0}
        options |= {"extra_body": {"ignore_eos": True}}
        if path == "stream":
            stream = client.completions.create(**options, stream=True)  # type: ignore[call-overload]
            next(iter(stream))
            stream.close()
        else:
            with ThreadPoolExecutor(1) as pool:
                lost = pool.submit(client.completions.create, **options)
                eventually("it runs", running, 20)
                client.close()
                assert lost.exception(20) is not None
    pair.assert_nothing_is_held()
    settled = generated()
    assert settled < 1900 or metric(decode, "baton_client_disconnects_total") > 0
    pair.complete("still here", max_tokens=2)
