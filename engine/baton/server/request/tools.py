"""Tools that a chat request offers to the model, and which of them an answer may call.

Sources: OpenAI's API reference (`tools`, `tool_choice`, `allowed_tools`), and its older names
`functions` and `function_call`. The tools reach the prompt as the client wrote them
(engine/text/src/prompt/chat.rs).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.errors import MissingField, UnsupportedParameter
from baton.server.fields import bad
from baton.server.request.schema import ChatCompletionRequest

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
"""OpenAI takes 64 characters without dots, Anthropic 128; tools of a namespace have a dot."""
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


class ChoiceMode(enum.Enum):
    """Calls that an answer must have."""

    AUTO = "auto"
    """Any number of calls, or none."""
    REQUIRED = "required"
    """At least one call."""
    NAMED = "named"
    """A call of the one tool."""


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that an answer may call."""

    name: str
    parameters: Mapping[str, Any]
    """JSON Schema of its arguments, members in the client's order; of a large body the JSON itself
    (`msgspec.Raw`).
    """
    place: str
    """Path of the function in the body."""
    is_strict: bool = False
    """Arguments follow the schema exactly; a schema that cannot be enforced is refused."""

    @property
    def param(self) -> str:
        """Path of its schema in the body."""
        return f"{self.place}.parameters"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Tools that an answer may call."""

    tools: tuple[CallableTool, ...] = ()
    """Empty: calls are not read, their text is content."""
    mode: ChoiceMode = ChoiceMode.AUTO
    field: str = "tool_choice"
    """Path of the mode in the body."""

    @property
    def is_forced(self) -> bool:
        """The answer has a call."""
        return self.mode is not ChoiceMode.AUTO

    @property
    def strict_tools(self) -> tuple[CallableTool, ...]:
        return tuple(tool for tool in self.tools if tool.is_strict)


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
    callable_names, mode = _read_choice(choice_name, choice, names)
    callable_tools = tuple(tool for tool in tools if tool.name in callable_names)
    return ToolChoice(callable_tools, mode, choice_name)


class MessageCalls(msgspec.Struct, gc=False):
    """A message, apart from what does not count."""

    tool_calls: Any = None


def count_calls(messages: Any) -> int:
    """Tool calls in the messages of a body that has been checked."""
    if isinstance(messages, msgspec.Raw):
        found = msgspec.json.decode(messages, type=list[MessageCalls])
    else:
        found = msgspec.convert(messages, list[MessageCalls])
    return sum(len(each.tool_calls) for each in found if type(each.tool_calls) is list)


def has_functions(request: ChatCompletionRequest) -> bool:
    """True if the tools come under their older name: then the call does, too."""
    return request.tools is None and bool(request.functions)


def allows_parallel_calls(request: ChatCompletionRequest) -> bool:
    """True if an answer may have several calls: a message has one `function_call`."""
    return request.parallel_tool_calls is not False and not has_functions(request)


def _list_functions(request: ChatCompletionRequest) -> list[tuple[Mapping[str, Any], str]]:
    """Each function with its place in the body."""
    if request.tools is None:
        found = request.functions or []
        if type(found) is not list:
            raise bad("functions", "must be an array of functions")
        _refuse_many(found)
        functions = [(function, f"functions[{i}]") for i, function in enumerate(found)]
    else:
        if type(request.tools) is not list:
            raise bad("tools", "must be an array of tools")
        _refuse_many(request.tools)
        functions = [
            (_read_function(tool, f"tools[{i}]"), f"tools[{i}].function")
            for i, tool in enumerate(request.tools)
        ]
    for function, place in functions:
        if type(function) is not dict:
            raise bad(place, "must be an object with name, description and parameters")
    return functions


def _refuse_many(tools: list[Any]) -> None:
    if len(tools) > MAX_TOOLS:
        raise bad("tools", f"has {len(tools)} entries, at most {MAX_TOOLS} are accepted")


def _read_function(tool: Any, place: str) -> Any:
    if type(tool) is not dict:
        raise bad(place, "must be an object with type and function")
    kind = tool.get("type")
    if kind not in (None, "function"):
        raise UnsupportedParameter(
            f"{place}.type is {str(kind)[:50]!r}; only function is supported: leave the tool out",
            param=f"{place}.type",
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
    is_object = type(parameters) is dict or parameters is NO_PARAMETERS
    if not is_object and not is_raw_object(parameters):
        raise bad(f"{place}.parameters", "must be a JSON Schema, an object")
    return CallableTool(name, parameters, place, function.get("strict") is True)


def is_raw_object(value: Any) -> bool:
    """True for the JSON of an object."""
    return isinstance(value, msgspec.Raw) and bytes(memoryview(value)[:1]) == b"{"


def _convert_choice(function_call: Any) -> Any:
    """`function_call` as `tool_choice` has it."""
    if type(function_call) is dict:
        return {"type": "function", "function": function_call}
    return function_call


def _read_choice(
    field: str, choice: Any, names: Sequence[str]
) -> tuple[frozenset[str], ChoiceMode]:
    """Names of the tools that the answer may call, and how many calls it must have."""
    if choice is None or choice == "auto":
        return frozenset(names), ChoiceMode.AUTO
    if choice == "none":
        return frozenset(), ChoiceMode.AUTO
    if not names:
        raise bad(field, "needs tools; give some, or leave it out")
    if choice == "required":
        return frozenset(names), ChoiceMode.REQUIRED
    if type(choice) is dict:
        kind = choice.get("type")
        if kind == "allowed_tools":
            return _read_allowed_tools(field, choice, names)
        if kind == "function":
            chosen = _read_name(choice)
            if chosen is None or chosen not in names:
                raise bad(field, f"names the function {chosen!r}, which is not among the tools")
            return frozenset((chosen,)), ChoiceMode.NAMED
    raise bad(
        field, "must be none, auto, required, or an object of the type function or allowed_tools"
    )


def _read_allowed_tools(
    field: str, choice: Mapping[str, Any], names: Sequence[str]
) -> tuple[frozenset[str], ChoiceMode]:
    allowed = choice.get("allowed_tools", choice)
    if type(allowed) is not dict or type(allowed.get("tools")) is not list:
        raise bad(field, "must have allowed_tools with mode and tools")
    chosen = [_read_name(tool) if type(tool) is dict else None for tool in allowed["tools"]]
    unknown = next((name for name in chosen if name not in names), None)
    if unknown is not None or None in chosen:
        raise bad(field, f"allows the function {unknown!r}, which is not among the tools")
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise bad(field, "must have the mode auto or required")
    if mode == "required" and not chosen:
        raise bad(field, "requires a call and allows no tool; allow some")
    names_of_choice = frozenset(name for name in chosen if name is not None)
    return names_of_choice, ChoiceMode(mode)


def _read_name(choice: Mapping[str, Any]) -> str | None:
    """Name in a choice of chat completions, or in the flat form of responses."""
    function = choice.get("function", choice)
    name = function.get("name") if type(function) is dict else None
    return name if type(name) is str else None
