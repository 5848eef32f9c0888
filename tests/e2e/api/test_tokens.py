"""The router tokenizes for the engines: with the ids it sends they answer what they answer by themselves."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.support.processes.cluster import Cluster, count, metric

USER = {"role": "user", "content": "What is Baton?"}
LONG = "Pages travel from prefill to decode. " * 1200
"""More tokens than the context has."""
GREEDY = {"model": "demo", "temperature": 0, "max_tokens": 8}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [USER], "logprobs": True, "top_logprobs": 2}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "system", "content": " terse "}, USER], "n": 2, "seed": 3},
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "né 😀"}]}]},
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [USER, {"role": "assistant", "content": "Baton is "}],
            "continue_final_message": True,
        },
    ),
    ("/v1/completions", {"prompt": "Pages travel from", "echo": True}),
    (
        "/v1/completions",
        {"prompt": ["Pages travel from", "The router"], "add_special_tokens": False},
    ),
    (
        "/generate",
        {"text": "Pages travel", "sampling_params": {"temperature": 0, "max_new_tokens": 8}},
    ),
    (
        "/generate",
        {
            "text": LONG,
            "truncate_prompt_tokens": 9,
            "sampling_params": {"temperature": 0, "max_new_tokens": 8},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": LONG}],
            "truncate_prompt_tokens": 30,
            "truncation_side": "right",
        },
    ),
    ("/v1/completions", {"prompt": [LONG, "short"], "truncate_prompt_tokens": -1}),
    (
        "/v1/responses",
        {"instructions": "terse", "input": [USER, {"role": "developer", "content": "really"}]},
    ),
    ("/v1/messages", {"system": [{"type": "text", "text": "terse"}], "messages": [USER]}),
]


def shown(path: str, answer: dict[str, Any]) -> Any:
    """The parts that do not differ from run to run."""
    if path == "/generate":
        return answer["text"], answer["meta_info"]["prompt_tokens"]
    if path == "/v1/responses":
        texts = [item["content"] for item in answer["output"]]
        return texts, answer["usage"]["input_tokens"]
    if path == "/v1/messages":
        usage = answer["usage"]
        return answer["content"], usage["input_tokens"] + usage["cache_read_input_tokens"]
    return answer["choices"], answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body"), BODIES, ids=[json.dumps(body)[:40] for _, body in BODIES]
)
def test_answers_are_the_engines_own(solo: Cluster, path: str, body: dict[str, Any]) -> None:
    if path == "/v1/responses":
        body = {"model": "demo", "temperature": 0, "max_output_tokens": 8, **body}
    elif path != "/generate":
        body = {**GREEDY, **body}

    def forwarded() -> float:
        return count(solo.url, "baton_router_input_ids_forwarded_total", role="regular")

    before = forwarded()
    status, through = solo.post(path, body)
    assert status == 200, through
    assert forwarded() == before + 1
    alone = httpx.post(solo.node("worker")["url"] + path, json=body, timeout=60).json()
    assert shown(path, through) == shown(path, alone)


def test_both_nodes_of_a_pair_get_them_and_count_the_same(pair: Cluster) -> None:
    status, answer = pair.post("/v1/chat/completions", {**GREEDY, "messages": [USER]})
    assert status == 200, answer
    for role in ("prefill", "decode"):
        assert metric(pair.url, "baton_router_input_ids_forwarded_total", role=role) >= 1
    different = metric(pair.url, "baton_router_token_counts_total", result="different")
    assert different != different, "NaN: there is no such sample"
    assert metric(pair.url, "baton_router_token_counts_total", result="equal") >= 1
