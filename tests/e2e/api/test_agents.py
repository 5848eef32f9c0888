"""Reasoning and tool calls as agents see them through router, prefill node and decode node."""

from __future__ import annotations

import itertools
import json
from typing import Any

import openai
import pytest

from tests.e2e.failover.test_resume import resume_points, streamed
from tests.support import effort
from tests.support.processes.cluster import Cluster

pytestmark = pytest.mark.timeout(240)

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
REASONING = "The user asks for the weather in Paris. I call get_weather."
ARGUMENTS = {"city": "Paris"}


def body(**more: Any) -> dict[str, Any]:
    return {
        "model": "demo",
        "messages": [QUESTION],
        "tools": [WEATHER],
        "temperature": 0,
        "max_tokens": 250,
        **more,
    }


@pytest.fixture(
    scope="module", params=["shm", pytest.param("tcp", marks=pytest.mark.slow), "one node"]
)
def cluster(request: pytest.FixtureRequest) -> Cluster:
    fixtures = {"shm": "pair", "tcp": "tcp_pair", "one node": "solo"}
    found: Cluster = request.getfixturevalue(fixtures[request.param])
    return found


def test_answer_has_reasoning_and_a_call(cluster: Cluster) -> None:
    with cluster.client() as client:
        answer = client.chat.completions.create(**body())
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.model_extra == {"reasoning_content": REASONING}
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == ARGUMENTS
    assert answer.usage.completion_tokens_details.reasoning_tokens > 5


def test_stream_is_the_whole_answer(cluster: Cluster) -> None:
    with cluster.client() as client:
        whole = client.chat.completions.create(**body())
        with client.chat.completions.stream(**body()) as stream:
            events = list(stream)
            final = stream.get_final_completion()
    message = final.choices[0].message
    assert final.choices[0].finish_reason == "tool_calls"
    (call,), (expected,) = message.tool_calls, whole.choices[0].message.tool_calls
    assert call.function.arguments == expected.function.arguments
    assert call.function.name == expected.function.name
    assert call.id.startswith("call_")
    deltas = [
        event.chunk.choices[0].delta.model_extra["reasoning_content"]
        for event in events
        if event.type == "chunk"
        and event.chunk.choices
        and "reasoning_content" in (event.chunk.choices[0].delta.model_extra or {})
    ]
    assert "".join(deltas) == REASONING
    assert len(deltas) > 3


def test_second_turn_answers_with_the_result_of_the_call(cluster: Cluster) -> None:
    with cluster.client() as client:
        first = client.chat.completions.create(**body()).choices[0].message
        (call,) = first.tool_calls
        result = {
            "role": "tool",
            "tool_call_id": call.id,
            "content": '{"temperature": 21, "sky": "sunny"}',
        }
        history = [QUESTION, first.model_dump(exclude_none=False), result]
        second = client.chat.completions.create(**body(messages=history)).choices[0]
    assert second.finish_reason == "stop"
    assert second.message.content == "It is sunny in Paris, with 21 degrees."
    assert second.message.tool_calls is None


def with_functions(**more: Any) -> dict[str, Any]:
    old = body(functions=[WEATHER["function"]], **more)
    del old["tools"]
    return old


def test_functions_are_answered_as_by_the_older_api(cluster: Cluster) -> None:
    """openai-python's types still have `function_call` and its finish reason."""
    with cluster.client() as client:
        whole = client.chat.completions.create(**with_functions()).choices[0]
        assert whole.finish_reason == "function_call"
        assert whole.message.tool_calls is None
        assert whole.message.content is None
        call = whole.message.function_call
        assert (call.name, json.loads(call.arguments)) == ("get_weather", ARGUMENTS)
        named = with_functions(function_call={"name": "get_weather"})
        forced = client.chat.completions.create(**named).choices[0]
        assert forced.message.function_call.name == "get_weather"
        assert forced.finish_reason == "stop", "as OpenAI has it where the client chose"
        deltas = [
            choice.delta.function_call
            for event in client.chat.completions.create(**with_functions(stream=True))
            for choice in event.choices
            if choice.delta.function_call is not None
        ]
        assert deltas[0].name == "get_weather"
        assert "".join(delta.arguments for delta in deltas) == call.arguments
        history = [
            QUESTION,
            whole.message.model_dump(exclude_none=False),
            {
                "role": "function",
                "name": call.name,
                "content": '{"temperature": 21, "sky": "sunny"}',
            },
        ]
        second = client.chat.completions.create(**with_functions(messages=history)).choices[0]
    assert second.finish_reason == "stop"
    assert second.message.content == "It is sunny in Paris, with 21 degrees."


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_reasoning_can_be_switched_off(pair: Cluster, name: str) -> None:
    kwargs = {"enable_thinking": False} if name == "enable_thinking" else None
    extra: dict[str, Any] = (
        {"chat_template_kwargs": kwargs} if kwargs else {"reasoning": {"enabled": False}}
    )
    with pair.client() as client:
        answer = client.chat.completions.create(**body(), extra_body=extra)
    message = answer.choices[0].message
    assert not message.model_extra
    assert len(message.tool_calls) == 1
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_fields_of_reasoning(pair: Cluster) -> None:
    with pair.client() as client:

        def ask(**extra: Any) -> Any:
            return client.chat.completions.create(**body(), extra_body=extra).choices[0].message

        together = ask(separate_reasoning=False)
        assert together.content == f"<think>\n{REASONING}\n</think>"
        assert len(together.tool_calls) == 1
        left_out = ask(include_reasoning=False)
        assert not left_out.model_extra
        stream = client.chat.completions.create(
            **body(stream=True), extra_body={"stream_reasoning": False}
        )
        found = [
            chunk.choices[0].delta.model_extra["reasoning_content"]
            for chunk in stream
            if (chunk.choices[0].delta.model_extra or {}).get("reasoning_content")
        ]
    assert found == [REASONING]


def test_plain_answer_has_no_new_members(pair: Cluster) -> None:
    with pair.client() as client:
        answer = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "Hello"}], temperature=0
        )
    message = answer.choices[0].message
    assert message.content.startswith("Hello!")
    assert not message.model_extra
    assert message.tool_calls is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ],
)
def test_malformed_fields_are_named(pair: Cluster, fields: dict[str, Any], param: str) -> None:
    with pair.client() as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**body(**fields))
    assert caught.value.param == param


def shown(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that a client makes of the events."""
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    return {
        "reasoning": "".join(delta.get("reasoning_content", "") for delta in deltas),
        "content": "".join(delta.get("content", "") for delta in deltas),
        "heads": [(call["id"], call["function"]["name"]) for call in calls if "id" in call],
        "arguments": "".join(call["function"]["arguments"] for call in calls),
        "finish": [
            event["choices"][0]["finish_reason"]
            for event in events
            if event["choices"] and event["choices"][0]["finish_reason"]
        ],
        "usage": {
            name: count
            for name, count in events[-1]["usage"].items()
            if name != "prompt_tokens_details"
        },
    }


def resume_everywhere(
    first: str, second: str, request: dict[str, Any], *, least_cuts: int = 3
) -> dict[str, Any]:
    """The answer of engine `first`, which `second` resumes at events of it to the same answer.

    In the fast suite that is each third event, in `make test-all` every event.
    """
    path = "/v1/chat/completions"
    whole = streamed(first, path, request)
    events = [event for _, event in whole]
    wanted = shown(events)
    points = list(
        itertools.takewhile(lambda point: not ends(events[point[0]]), resume_points(whole))
    )
    assert len(points) >= least_cuts
    if not effort.EVERY and len(points) >= 3 * least_cuts:
        points = points[len(points) % 3 :: 3]
    for at, resume in points:
        resumed = streamed(second, path, {**request, "baton_resume": resume})
        assert shown(events[: at + 1] + [event for _, event in resumed]) == wanted, at
    return wanted


def ends(event: dict[str, Any]) -> bool:
    """True for the event with the reason of the end."""
    return bool(event["choices"] and event["choices"][0]["finish_reason"])


RESUMED_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "free": ({}, "tool_calls"),
    "named": ({"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}, "stop"),
    "strict": (
        {
            "tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}],
            "reasoning": {"enabled": False},
        },
        "tool_calls",
    ),
}


@pytest.mark.parametrize("name", RESUMED_CALLS)
def test_call_is_resumed_at_every_event(two_workers: Cluster, name: str) -> None:
    fields, finish = RESUMED_CALLS[name]
    request = body(
        stream=True, stream_options={"include_usage": True}, seed=7, rid="an-agent", **fields
    )
    first, second = (two_workers.node("worker", i)["url"] for i in (0, 1))
    wanted = resume_everywhere(first, second, request)
    assert wanted["finish"] == [finish]
