"""Calls that a client forces, strict tools, and tools with a schema, through router, prefill node and decode node."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.e2e.api.test_agents import ARGUMENTS, QUESTION, WEATHER, body
from tests.support.processes.cluster import Cluster

pytestmark = pytest.mark.timeout(240)

HELLO = {"role": "user", "content": "Hello"}
MAIL: Any = {
    "type": "function",
    "function": {
        "name": "send_mail",
        "parameters": {
            "type": "object",
            "properties": {
                "to": {"enum": ["all", "me"]},
                "copies": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["to", "copies"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
TOOLS = [WEATHER, MAIL]
NAMED_MAIL = {"type": "function", "function": {"name": "send_mail"}}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CITY_FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}


@pytest.fixture(scope="module", params=["shm", "tcp", "one node"])
def cluster(request: pytest.FixtureRequest) -> Cluster:
    fixtures = {"shm": "pair", "tcp": "tcp_pair", "one node": "solo"}
    found: Cluster = request.getfixturevalue(fixtures[request.param])
    return found


AT_ONCE: Any = {"reasoning": {"enabled": False}}
"""The demo model calls or answers without reasoning."""


def check_mail(arguments: str) -> None:
    found = json.loads(arguments)
    assert found.keys() == {"to", "copies"}
    assert found["to"] in ("all", "me")
    assert 1 <= found["copies"] <= 9


def test_named_tool_is_called_once(cluster: Cluster) -> None:
    with cluster.client() as client:
        answer = client.chat.completions.create(**body(tools=TOOLS, tool_choice=NAMED_MAIL))
        fields = body(tools=TOOLS, tool_choice=NAMED_MAIL)
        with client.chat.completions.stream(**fields) as stream:
            final = stream.get_final_completion()
    for (choice,) in (answer.choices, final.choices):
        assert choice.finish_reason == "stop"
        assert not choice.message.content
        (call,) = choice.message.tool_calls
        assert call.function.name == "send_mail"
        check_mail(call.function.arguments)
    whole, streamed_call = (made.choices[0].message.tool_calls[0] for made in (answer, final))
    assert whole.function.arguments == streamed_call.function.arguments


def test_required_call_comes_where_the_model_would_not_call(cluster: Cluster) -> None:
    fields = body(tools=TOOLS, messages=[HELLO], parallel_tool_calls=False)
    with cluster.client() as client:
        free = client.chat.completions.create(**fields)
        forced = client.chat.completions.create(**fields, tool_choice="required")
    assert free.choices[0].message.tool_calls is None
    assert forced.choices[0].finish_reason == "tool_calls"
    message = forced.choices[0].message
    assert message.content is None
    assert len(message.tool_calls) == 1


def test_allowed_tools_are_required(pair: Cluster) -> None:
    allowed = {"mode": "required", "tools": [NAMED_MAIL]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    with pair.client() as client:
        answer = client.chat.completions.create(
            **body(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
        )
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls
    check_mail(call.function.arguments)


def test_answer_with_a_schema_may_call(cluster: Cluster) -> None:
    with cluster.client() as client:
        called = client.chat.completions.create(
            **body(response_format=CITY_FORMAT), extra_body=AT_ONCE
        ).choices[0]
        answered = client.chat.completions.create(
            **body(response_format=CITY_FORMAT, messages=[HELLO], tools=[MAIL])
        ).choices[0]
    assert called.finish_reason == "tool_calls"
    (call,) = called.message.tool_calls
    assert json.loads(call.function.arguments) == ARGUMENTS
    if answered.message.tool_calls is None:
        assert json.loads(answered.message.content)["city"] in ("Rome", "Oslo")
    else:
        check_mail(answered.message.tool_calls[0].function.arguments)


class GetWeather(pydantic.BaseModel):
    """Get the weather of a city"""

    city: Literal["Rome", "Oslo"]
    unit: Literal["celsius", "kelvin"]


def test_strict_tool_of_openai_python(cluster: Cluster) -> None:
    """The model would say Paris, and no unit."""
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    with cluster.client() as client:
        answer = client.chat.completions.parse(**body(tools=[tool]), extra_body=AT_ONCE)
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)
    assert answer.choices[0].finish_reason == "tool_calls"


def test_responses_with_a_format_and_tools(cluster: Cluster) -> None:
    """As openai-agents asks in every turn."""
    function = {"type": "function", **MAIL["function"]}
    text: Any = {"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}}
    fields: Any = {
        "model": "demo",
        "input": QUESTION["content"],
        "tools": [function],
        "text": text,
        "temperature": 0,
        "parallel_tool_calls": False,
    }
    with cluster.client() as client:
        forced = client.responses.create(**fields, tool_choice="required")
        with client.responses.stream(**fields, tool_choice="required") as stream:
            list(stream)
            final = stream.get_final_response()
        either = client.responses.create(**fields)
        named = client.responses.create(
            **fields, tool_choice={"type": "function", "name": "send_mail"}
        )
    for response in (forced, final, named):
        call = response.output[-1]
        assert call.type == "function_call"
        check_mail(call.arguments)
    assert final.output[-1].arguments == forced.output[-1].arguments
    item = either.output[-1]
    if item.type == "function_call":
        check_mail(item.arguments)
    else:
        assert json.loads(either.output_text)["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "send_mail"}])
def test_messages_force_a_tool(pair: Cluster, choice: dict[str, Any]) -> None:
    function = MAIL["function"]
    tool = {"name": "send_mail", "input_schema": function["parameters"], "strict": True}
    fields = {
        "model": "demo",
        "max_tokens": 250,
        "temperature": 0,
        "messages": [HELLO],
        "tools": [tool],
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
    }
    status, answer = pair.post("/v1/messages", fields)
    assert status == 200, answer
    block = answer["content"][-1]
    assert block["type"] == "tool_use"
    check_mail(json.dumps(block["input"]))
    assert answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": "required", "regex": "a"}, "regex"),
        ({"regex": "a"}, "regex"),
        (
            {"tools": [{**MAIL, "function": {**MAIL["function"], "parameters": {"not": {}}}}]},
            "tools[0].function.parameters",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"type": "string"}},
                    }
                ],
            },
            "tools[0].function.parameters",
        ),
    ],
    ids=str,
)
def test_refusals_name_the_field(pair: Cluster, fields: dict[str, Any], param: str) -> None:
    known = {key: value for key, value in fields.items() if key != "regex"}
    extra = {key: value for key, value in fields.items() if key == "regex"}
    with pair.client() as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**body(**known), extra_body=extra)
    assert caught.value.param == param
