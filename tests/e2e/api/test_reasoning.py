"""Answers that reason and then follow a grammar, and limits of the reasoning, as clients see them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.e2e.api.test_agents import QUESTION, REASONING, WEATHER, resume_everywhere
from tests.support.processes.cluster import Cluster

pytestmark = pytest.mark.timeout(240)

SKY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "sky": {"enum": ["sunny", "rain"]},
    },
    "required": ["city", "sky"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "sky", "schema": SKY, "strict": True}}
FORCED_END_TOKENS = 4
"""Newline, end marker, and two newlines, of which reasoning_tokens counts the first two."""


def body(**more: Any) -> dict[str, Any]:
    return {
        "model": "demo",
        "messages": [QUESTION],
        "tools": [WEATHER],
        "tool_choice": "none",
        "temperature": 0,
        "max_tokens": 150,
        **more,
    }


def ask(cluster: Cluster, **more: Any) -> dict[str, Any]:
    status, answer = cluster.post("/v1/chat/completions", body(**more))
    assert status == 200, answer
    return dict(answer)


def without_ids(answer: dict[str, Any]) -> tuple[Any, ...]:
    usage = answer["usage"]
    return answer["choices"], usage["completion_tokens"], usage["completion_tokens_details"]


def test_answer_reasons_and_then_follows_the_schema(pair: Cluster) -> None:
    answer = ask(pair, response_format=FORMAT)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["reasoning_content"] == REASONING
    content = choice["message"]["content"]
    assert content.startswith("{")
    jsonschema.validate(json.loads(content), SKY)
    usage = answer["usage"]
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 5 < reasoning < usage["completion_tokens"]
    hidden = ask(pair, response_format=FORMAT, include_reasoning=False)
    assert "reasoning_content" not in hidden["choices"][0]["message"]
    assert hidden["choices"][0]["message"]["content"] == content
    assert hidden["usage"]["completion_tokens_details"]["reasoning_tokens"] == reasoning
    joined = ask(pair, response_format=FORMAT, separate_reasoning=False)
    text = joined["choices"][0]["message"]["content"]
    assert text == f"<think>\n{REASONING}\n</think>\n\n{content}"


def test_reasoning_that_is_off_leaves_the_answer_alone(pair: Cluster) -> None:
    answer = ask(pair, response_format=FORMAT, enable_thinking=False)
    message = answer["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert message["content"].startswith("{")
    jsonschema.validate(json.loads(message["content"]), SKY)
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("form", ["schema", "calls"])
def test_limit_ends_the_reasoning(pair: Cluster, form: str, budget: int) -> None:
    more = {"response_format": FORMAT} if form == "schema" else {"tool_choice": "auto"}
    answer = ask(pair, **more, thinking_token_budget=budget)
    (choice,) = answer["choices"]
    message = choice["message"]
    counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert counted == 1 + budget + FORCED_END_TOKENS - 2
    assert REASONING.startswith(message.get("reasoning_content", ""))
    assert len(message.get("reasoning_content", "")) < len(REASONING)
    if form == "schema":
        jsonschema.validate(json.loads(message["content"]), SKY)
    else:
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]


FORMS: dict[str, dict[str, Any]] = {
    "schema": {"response_format": FORMAT},
    "schema and limit": {"response_format": FORMAT, "thinking_token_budget": 3},
    "regex": {"regex": "[A-Z][a-z]{2,9}( [0-9]{1,2})?"},
    "limit": {"tool_choice": "auto", "custom_params": {"thinking_budget": 2}},
}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("form", FORMS)
def test_two_nodes_answer_as_one(
    solo: Cluster, pair: Cluster, tcp_pair: Cluster, form: str, temperature: float
) -> None:
    """Wherever P's token stands: P draws the first one, D is inside the reasoning behind it."""
    request = {**FORMS[form], "temperature": temperature, "seed": 5, "rid": f"{form}{temperature}"}
    expected, *others = [without_ids(ask(cluster, **request)) for cluster in (solo, pair, tcp_pair)]
    assert others == [expected] * 2
    assert expected[0][0]["message"]["reasoning_content"]
    pair.assert_nothing_is_held()


def test_stream_is_the_whole_answer(pair: Cluster) -> None:
    whole = ask(pair, response_format=FORMAT)["choices"][0]["message"]
    with pair.client() as client:
        chunks = list(
            client.chat.completions.create(
                **{**body(stream=True), "tools": [WEATHER]}, response_format=FORMAT
            )
        )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    reasoning = [(delta.model_extra or {}).get("reasoning_content", "") for delta in deltas]
    assert "".join(reasoning) == whole["reasoning_content"]
    assert len([part for part in reasoning if part]) > 3
    assert "".join(delta.content or "" for delta in deltas) == whole["content"]


@pytest.mark.parametrize(
    "form", [pytest.param("schema", marks=pytest.mark.slow), "schema and limit"]
)
def test_answer_is_resumed_at_every_event(pair: Cluster, form: str) -> None:
    """Within the reasoning, in its forced end, and within the JSON."""
    more = {**FORMS[form], "stream_options": {"include_usage": True}, "seed": 7, "rid": "thinker"}
    node = pair.node("decode")["url"]
    wanted = resume_everywhere(node, node, body(stream=True, **more), least_cuts=8)
    assert wanted["reasoning"]
    jsonschema.validate(json.loads(wanted["content"]), SKY)


def test_other_apis_reason_before_their_answer(pair: Cluster) -> None:
    tool = WEATHER["function"]
    status, message = pair.post(
        "/v1/messages",
        {
            "model": "demo",
            "max_tokens": 150,
            "temperature": 0,
            "messages": [QUESTION],
            "tools": [{**tool, "input_schema": tool["parameters"]}],
            "tool_choice": {"type": "none"},
            "thinking": {"type": "enabled", "budget_tokens": 5},
            "output_config": {"format": {"type": "json_schema", "schema": SKY}},
        },
    )
    assert status == 200, message
    thinking, text = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "The user asks")
    jsonschema.validate(json.loads(text["text"]), SKY)
    status, response = pair.post(
        "/v1/responses",
        {
            "model": "demo",
            "input": QUESTION["content"],
            "temperature": 0,
            "tools": [{"type": "function", **tool}],
            "tool_choice": "none",
            "text": {"format": {"type": "json_schema", "name": "sky", "schema": SKY}},
        },
    )
    assert status == 200, response
    reasoning, answer = response["output"]
    assert reasoning["content"][0]["text"] == REASONING
    jsonschema.validate(json.loads(answer["content"][0]["text"]), SKY)


def test_generate_takes_a_limit(pair: Cluster) -> None:
    """The text keeps the reasoning and its markers, as generated."""
    sampling = {"temperature": 0, "max_new_tokens": 60, "custom_params": {"thinking_budget": 2}}
    status, answer = pair.post(
        "/generate", {"text": "<think>", "sampling_params": {**sampling, "regex": "[a-z]{3,8}"}}
    )
    assert status == 200, answer
    reasoning, marker, rest = answer["text"].partition("\n</think>\n\n")
    assert marker
    assert len(reasoning) > 0
    assert rest.strip("\n").isalpha()
