"""Tools that a chat request offers to the model, and which of them an answer may call.

Sources: OpenAI's API reference (`tools`, `tool_choice`, `allowed_tools`), and its older names `functions` and
`function_call`. The tools reach the prompt as the client wrote them (engine/text/src/prompt/chat.rs).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.errors import MissingField, UnsupportedParameter
from baton.server.fields import bad
from baton.server.request.schema import ChatCompletionRequest

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
"""OpenAI takes 64 characters without dots, Anthropic 128; tools of a namespace have a dot."""
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
FORCED_CHOICE = "{} is not supported by this version, which cannot force a call; use auto or none"


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that an answer may call."""

    name: str
    parameters: Mapping[str, Any]
    """JSON Schema of its arguments, members in the client's order."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Tools that an answer may call."""

    tools: tuple[CallableTool, ...] = ()
    """Empty: calls are not read, their text is content."""
    ignored: tuple[str, ...] = ()
    """Fields that had no effect."""


def read_tools(request: ChatCompletionRequest) -> ToolChoice:
    """Raises BadRequest, MissingField or UnsupportedParameter for the first field that is wrong."""
    named = _list_functions(request)
    tools = [_read_tool(function, place) for function, place in named]
    names = [tool.name for tool in tools]
    repeated = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if repeated is not None:
        raise bad("tools", f"has two functions of the name {repeated!r}")
    choice_name = "tool_choice"
    choice = request.tool_choice
    if choice is None and request.function_call is not None:
        choice_name = "function_call"
        choice = _convert_choice(request.function_call)
    callable_names = _choose_names(choice_name, choice, names)
    ignored = [f"{place}.strict" for function, place in named if function.get("strict") is True]
    return ToolChoice(tuple(tool for tool in tools if tool.name in callable_names), tuple(ignored))


def refuse_tools_with_grammar(choice: ToolChoice) -> None:
    """Raise UnsupportedParameter for a request whose answer is constrained, and could not call its tools."""
    if choice.tools:
        raise UnsupportedParameter(
            "tools together with a schema or grammar are not supported by this version: a constrained answer cannot "
            "call them; leave one of them out, or send tool_choice none",
            param="tools",
        )


def count_calls(messages: Any) -> int:
    """Tool calls in the messages of a body that has been checked."""
    calls = (message.get("tool_calls") for message in messages)
    return sum(len(found) for found in calls if type(found) is list)


def _list_functions(request: ChatCompletionRequest) -> list[tuple[Mapping[str, Any], str]]:
    """Each function with its place in the body."""
    if request.tools is None:
        found = request.functions or []
        if type(found) is not list:
            raise bad("functions", "must be an array of functions")
        functions = [(function, f"functions[{i}]") for i, function in enumerate(found)]
    else:
        if type(request.tools) is not list:
            raise bad("tools", "must be an array of tools")
        functions = [
            (_read_function(tool, f"tools[{i}]"), f"tools[{i}].function")
            for i, tool in enumerate(request.tools)
        ]
    if len(functions) > MAX_TOOLS:
        raise bad("tools", f"has {len(functions)} entries, at most {MAX_TOOLS} are accepted")
    for function, place in functions:
        if type(function) is not dict:
            raise bad(place, "must be an object with name, description and parameters")
    return functions


def _read_function(tool: Any, place: str) -> Any:
    if type(tool) is not dict:
        raise bad(place, "must be an object with type and function")
    kind = tool.get("type")
    if kind not in (None, "function"):
        raise UnsupportedParameter(
            f"{place}.type is {str(kind)[:50]!r}; only function is supported", param=f"{place}.type"
        )
    if tool.get("function") is None:
        raise MissingField(f"{place}.function is required", param=f"{place}.function")
    return tool["function"]


def _read_tool(function: Mapping[str, Any], place: str) -> CallableTool:
    name = function.get("name")
    if name is None:
        raise MissingField(f"{place}.name is required", param=f"{place}.name")
    if type(name) is not str or NAME.fullmatch(name) is None:
        raise bad(
            f"{place}.name", "must have 1 to 128 letters, digits, underscores, dots or hyphens"
        )
    parameters = function.get("parameters")
    if parameters is None:
        parameters = NO_PARAMETERS
    if type(parameters) is not dict and parameters is not NO_PARAMETERS:
        raise bad(f"{place}.parameters", "must be a JSON Schema, an object")
    return CallableTool(name, parameters)


def _convert_choice(function_call: Any) -> Any:
    """`function_call` as `tool_choice` has it."""
    if type(function_call) is dict:
        return {"type": "function", "function": function_call}
    return function_call


def _choose_names(field: str, choice: Any, names: Sequence[str]) -> frozenset[str]:
    """Names of the tools that the answer may call."""
    if choice is None or choice == "auto":
        return frozenset(names)
    if choice == "none":
        return frozenset()
    if not names:
        raise bad(field, "needs tools; give some, or leave it out")
    if choice == "required":
        raise UnsupportedParameter(FORCED_CHOICE.format(f"{field} required"), param=field)
    if type(choice) is dict:
        kind = choice.get("type")
        if kind == "allowed_tools":
            return _read_allowed_names(field, choice, names)
        if kind == "function":
            chosen = _read_name(choice)
            if chosen not in names:
                raise bad(field, f"names the function {chosen!r}, which is not among the tools")
            raise UnsupportedParameter(FORCED_CHOICE.format(f"{field} with a name"), param=field)
    raise bad(
        field, "must be none, auto, required, or an object of the type function or allowed_tools"
    )


def _read_allowed_names(
    field: str, choice: Mapping[str, Any], names: Sequence[str]
) -> frozenset[str]:
    allowed = choice.get("allowed_tools", choice)
    if type(allowed) is not dict or type(allowed.get("tools")) is not list:
        raise bad(field, "must have allowed_tools with mode and tools")
    chosen = [_read_name(tool) if type(tool) is dict else None for tool in allowed["tools"]]
    unknown = next((name for name in chosen if name not in names), None)
    if unknown is not None or None in chosen:
        raise bad(field, f"allows the function {unknown!r}, which is not among the tools")
    mode = allowed.get("mode", "auto")
    if mode == "required":
        raise UnsupportedParameter(FORCED_CHOICE.format(f"{field} required"), param=field)
    if mode != "auto":
        raise bad(field, "must have the mode auto or required")
    return frozenset(name for name in chosen if name is not None)


def _read_name(choice: Mapping[str, Any]) -> str | None:
    """Name in a choice of chat completions, or in the flat form of responses."""
    function = choice.get("function", choice)
    name = function.get("name") if type(function) is dict else None
    return name if type(name) is str else None
