"""Tools of a chat and the choice among them: what OpenAI's reference takes, and the field that a refusal names."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import BadRequest, EngineError
from baton.server import fields
from baton.server.request.schema import ChatCompletionRequest
from baton.server.request.tools import (
    ChoiceMode,
    ToolChoice,
    allows_parallel_calls,
    has_functions,
    read_tools,
)


def function(name: Any = "f", **more: Any) -> dict[str, Any]:
    return {"name": name, **more}


def tool(name: Any = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": function(name, **more)}


def read(**body: Any) -> ToolChoice:
    return read_tools(request(**body))


def request(**body: Any) -> ChatCompletionRequest:
    return fields.read(ChatCompletionRequest, {"messages": [], **body})


def names(choice: ToolChoice) -> list[str]:
    return [each.name for each in choice.tools]


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


NAMED = {"type": "function", "function": {"name": "g"}}
FLAT = {"type": "function", "name": "g"}
CHOICES: list[tuple[Any, list[str], ChoiceMode]] = [
    (None, ["f", "g"], ChoiceMode.AUTO),
    ("auto", ["f", "g"], ChoiceMode.AUTO),
    ("none", [], ChoiceMode.AUTO),
    ("required", ["f", "g"], ChoiceMode.REQUIRED),
    (NAMED, ["g"], ChoiceMode.NAMED),
    (FLAT, ["g"], ChoiceMode.NAMED),
    (allowed("auto", NAMED), ["g"], ChoiceMode.AUTO),
    (allowed("required", FLAT), ["g"], ChoiceMode.REQUIRED),
    ({"type": "allowed_tools", "mode": "auto", "tools": [FLAT]}, ["g"], ChoiceMode.AUTO),
    (allowed("auto"), [], ChoiceMode.AUTO),
]


@pytest.mark.parametrize(("choice", "callable_names", "mode"), CHOICES)
def test_choice_names_the_callable_tools(
    choice: Any, callable_names: list[str], mode: ChoiceMode
) -> None:
    found = read(tools=[tool("f"), tool("g")], tool_choice=choice)
    assert (names(found), found.mode) == (callable_names, mode)
    assert found.is_forced == (mode is not ChoiceMode.AUTO)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": ["f"]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": "f"}]}, "tools[0].function"),
    ({"tools": [{"type": "web_search", "function": function()}]}, "tools[0].type"),
    ({"tools": [tool(), {"type": "function"}]}, "tools[1].function"),
    ({"tools": [tool(None)]}, "tools[0].function.name"),
    ({"tools": [tool("")]}, "tools[0].function.name"),
    ({"tools": [tool("a b")]}, "tools[0].function.name"),
    ({"tools": [tool("n" * 129)]}, "tools[0].function.name"),
    ({"tools": [tool(5)]}, "tools[0].function.name"),
    ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters="{}")]}, "tools[0].function.parameters"),
    ({"tools": [tool("f"), tool("f")]}, "tools"),
    ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
    ({"functions": "f"}, "functions"),
    ({"functions": ["f"]}, "functions[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": NAMED}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"type": "function", "name": 5}}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    (
        {"tools": [tool()], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
        "tool_choice",
    ),
    ({"tools": [tool()], "tool_choice": {"type": "allowed_tools", "allowed_tools": 5}}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": allowed("auto", NAMED)}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": allowed("auto", "f")}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": allowed("any", tool())}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": allowed("required")}, "tool_choice"),
    ({"functions": [function()], "function_call": {"name": "g"}}, "function_call"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=[str(body)[:70] for body, _ in REFUSED])
def test_refusal_names_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(EngineError) as caught:
        read(**body)
    assert caught.value.param == param


def test_longest_names_and_most_tools_are_accepted() -> None:
    many = [tool(f"f{i}") for i in range(127)]
    assert len(read(tools=[*many, tool("n" * 128)]).tools) == 128
    assert names(read(tools=[tool("a_b-c.D9")])) == ["a_b-c.D9"]
    assert names(read(tools=[{"function": function()}])) == ["f"], "the type may be left out"


def test_functions_are_the_older_name_of_tools() -> None:
    choice = read(functions=[function("f"), function("g")], function_call={"name": "g"})
    assert (names(choice), choice.mode, choice.field) == (["g"], ChoiceMode.NAMED, "function_call")
    assert choice.tools[0].param == "functions[1].parameters"
    assert has_functions(request(functions=[function()]))
    assert not has_functions(request(functions=[]))
    assert not has_functions(request(tools=[tool()]))
    assert not has_functions(request(tools=[tool()], functions=[function()])), "tools go first"
    assert not has_functions(request())


def test_several_calls_need_tools_that_may_have_them() -> None:
    assert allows_parallel_calls(request(tools=[tool()]))
    assert allows_parallel_calls(request(tools=[tool()], parallel_tool_calls=True))
    assert not allows_parallel_calls(request(tools=[tool()], parallel_tool_calls=False))
    assert not allows_parallel_calls(request(functions=[function()]))


def test_tool_choice_goes_before_function_call() -> None:
    choice = read(tools=[tool("f")], tool_choice="none", function_call="auto")
    assert choice.field == "tool_choice"
    assert choice.tools == ()
    with pytest.raises(BadRequest):
        read(tools=[tool("f")], tool_choice=None, function_call={"name": "h"})


def test_strict_tools_are_those_that_say_true() -> None:
    choice = read(tools=[tool("f", strict=True), tool("g", strict=False), tool("h", strict="yes")])
    assert [each.name for each in choice.strict_tools] == ["f"]
