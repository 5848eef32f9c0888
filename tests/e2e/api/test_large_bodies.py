"""A prompt that no engine takes: the router refuses it, and nothing of it reaches an engine or a stream."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.support.processes.cluster import Cluster, count

MIB = 1 << 20
LARGE: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "text": ("/v1/completions", {"prompt": "word and more " * (20 * MIB // 14)}, "prompt"),
    "ids": ("/generate", {"input_ids": [17] * (20 * MIB // 4)}, "input_ids"),
    "messages": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}] * (20 * MIB // 34)},
        None,  # refused by its length: a body of several prompts may be longer, one chat may not
    ),
}


def engine_requests(cluster: Cluster, **labels: str) -> list[float]:
    """Requests that each engine has answered or refused; a series that does not exist yet counts 0."""
    return [
        count(node["url"], "baton_http_requests_total", **labels) for node in cluster.state["nodes"]
    ]


@pytest.mark.timeout(180)
def test_prompts_of_20_mib_reach_no_engine_and_no_stream(pair: Cluster) -> None:
    undisturbed = pair.complete("Baton is", max_tokens=256)
    refused_before = engine_requests(pair, code="context_length_exceeded")
    streamed: list[str] = []
    begun, refused = threading.Event(), threading.Event()

    def stream_on() -> None:
        while not refused.is_set():
            text = ""
            with pair.client() as client:
                stream = client.completions.create(
                    model="demo", prompt="Baton is", max_tokens=256, temperature=0, stream=True,
                    extra_body={"ignore_eos": True},
                )  # fmt: skip
                for event in stream:
                    text += event.choices[0].text
                    begun.set()
            streamed.append(text)

    streams = threading.Thread(target=stream_on)
    streams.start()
    try:
        assert begun.wait(60)
        answers = {
            name: pair.post(path, {"model": "demo", **body})
            for name, (path, body, _) in LARGE.items()
        }
    finally:
        refused.set()
        streams.join()
    for name, (status, answer) in answers.items():
        error = answer["error"]
        assert (status, error["code"], error["param"]) == (
            400,
            "context_length_exceeded",
            LARGE[name][2],
        ), answer
    assert streamed == [undisturbed] * len(streamed)
    assert engine_requests(pair, code="context_length_exceeded") == refused_before


@pytest.mark.timeout(180)
def test_router_and_engine_refuse_in_the_same_words(pair: Cluster) -> None:
    before = engine_requests(pair)
    path, body, _ = LARGE["text"]
    by_router = pair.post(path, body)
    assert engine_requests(pair) == before
    for role in ("prefill", "decode"):
        assert pair.post(path, body, url=pair.node(role)["url"]) == by_router
    assert engine_requests(pair) == [number + 1 for number in before]
