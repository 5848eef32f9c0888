"""One process, or two over shared memory, TCP or gloo: the same tokens (DESIGN invariant 1)."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
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


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": json.dumps(PERSON)},
    "regex": {"regex": "[a-z]{3,9}( [0-9]{2}){0,4}"},
    "nested": {"ebnf": 'root ::= "(" root ")" | [a-z]+ "-" root | "end"'},
    "one token": {"regex": "[!-~]"},
}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("form", GRAMMARS)
def test_constrained_answer_of_two_nodes_equals_that_of_one(
    solo: Cluster, pair: Cluster, form: str, temperature: float
) -> None:
    """P's first token is under the grammar too, and D goes on behind it."""
    sampling = {"temperature": temperature, "max_new_tokens": 200, **GRAMMARS[form]}
    body = {"text": "Write about a person.", "sampling_params": {**sampling, "sampling_seed": 11}}
    answers = []
    for cluster in (solo, pair):
        status, answer = cluster.post("/generate", body)
        assert status == 200, answer
        finish = answer["meta_info"]["finish_reason"]["type"]
        answers.append((answer["output_ids"], answer["text"], finish))
    assert answers[0] == answers[1]
    assert answers[0][2] == "stop" or form == "nested"  # which may open parentheses for ever
    if form == "schema":
        jsonschema.validate(json.loads(answers[0][1]), PERSON)
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("form", ["free", "regex"])
def test_restricted_answer_of_two_nodes_equals_that_of_one(
    solo: Cluster, pair: Cluster, form: str, temperature: float
) -> None:
    allowed = list(range(3, 2400, 3))
    sampling: dict[str, Any] = {"temperature": temperature, "max_new_tokens": 40}
    sampling |= {"allowed_token_ids": allowed, "sampling_seed": 11}
    sampling |= {"regex": "[a-z ,.]*"} if form == "regex" else {}

    def ask(cluster: Cluster, *bad_words: str) -> tuple[list[int], str]:
        fields = {**sampling, "bad_words": bad_words}
        status, answer = cluster.post(
            "/generate", {"text": "The router is", "sampling_params": fields}
        )
        assert status == 200, answer
        return answer["output_ids"], answer["text"]

    ids, text = ask(solo)
    assert set(ids) <= set(allowed)
    assert ask(pair) == (ids, text)
    words = [solo.post("/detokenize", {"tokens": part})[1]["text"] for part in (ids[:1], ids[1:4])]
    assert text.startswith(words[0])
    without = ask(solo, *words)
    assert without[0][0] != ids[0]
    assert ask(pair, *words) == without
    pair.assert_nothing_is_held()


def test_chat_answers_follow_a_schema_whole_and_streamed(pair: Cluster) -> None:
    with pair.client() as client:
        schema = {"name": "person", "schema": PERSON, "strict": True}
        request: dict[str, Any] = {
            "model": "demo",
            "messages": [{"role": "user", "content": "A person, please."}],
            "response_format": {"type": "json_schema", "json_schema": schema},
            "max_tokens": 200,
            "seed": 3,
        }
        whole = client.chat.completions.create(**request)
        chunks = list(client.chat.completions.create(**request, stream=True))
    text = whole.choices[0].message.content
    assert text is not None
    assert text == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(text), PERSON)


def test_schema_that_cannot_be_enforced_is_refused_by_its_field(pair: Cluster) -> None:
    schema = {"name": "x", "schema": {"not": {}}, "strict": True}
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "hello"}],
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    status, answer = pair.post("/v1/chat/completions", body)
    assert (status, answer["error"]["code"]) == (400, "invalid_value")
    assert answer["error"]["param"] == "response_format.json_schema.schema"
    pair.assert_nothing_is_held()
