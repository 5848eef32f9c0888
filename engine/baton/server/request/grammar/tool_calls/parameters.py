"""Parameters of a tool in formats that write them one by one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.server.fields import bad
from baton.server.request.grammar.constraint import AnswerConstraint, ConstraintKind
from baton.server.request.grammar.tool_calls.call_format import GrammarTool
from baton.server.request.grammar.tool_calls.parameter_values import UnclearValues, resolve

NAME = re.compile(r"[^\s<>\"'=\\(),]{1,200}")
"""Names that can stand in a tag."""


@dataclass(frozen=True, slots=True)
class ToolParameter:
    name: str
    schema: Any
    is_required: bool


@dataclass(frozen=True, slots=True)
class ParameterList:
    """Parameters that a call may have, in the order in which they are written."""

    parameters: tuple[ToolParameter, ...]
    is_open: bool
    """The schema names no parameter and allows any."""


def parameter_lists(tool: GrammarTool, name_pattern: re.Pattern[str] = NAME) -> list[ParameterList]:
    """Alternatives of a tool's parameters. Raises BadRequest for a strict tool that cannot be
    written so.
    """
    root = tool.arguments.value
    try:
        return [_read_list(tool, option, name_pattern) for option in _options(root, root)]
    except UnclearValues as err:
        if tool.arguments.is_strict:
            raise unclear(tool, str(err)) from err
        return [ParameterList((), is_open=True)]


def unclear(tool: GrammarTool, problem: str) -> Exception:
    """The error for a strict tool whose calls cannot be written in the model's format."""
    return bad(
        tool.arguments.param,
        f"{problem}, which calls in this model's format cannot be held to; simplify it, or leave "
        "strict out",
    )


def json_constraint(tool: GrammarTool, schema: Any) -> AnswerConstraint:
    """Constraint for a part of a tool's arguments."""
    arguments = tool.arguments
    return AnswerConstraint(
        ConstraintKind.JSON_SCHEMA, schema, arguments.param, is_strict=arguments.is_strict
    )


def _read_list(
    tool: GrammarTool, schema: Mapping[str, Any], name_pattern: re.Pattern[str]
) -> ParameterList:
    properties = dict(schema.get("properties") or {})
    required = list(schema.get("required") or ())
    for name in required:
        properties.setdefault(name, _additional(schema))
    parameters = []
    for name, value in properties.items():
        if value is False:
            continue
        if name_pattern.fullmatch(name):
            parameters.append(ToolParameter(name, value, name in required))
        elif name in required and tool.arguments.is_strict:
            raise unclear(tool, f"requires a parameter of the name {name[:40]!r}")
    is_open = not properties and schema.get("additionalProperties", True) is not False
    return ParameterList(tuple(parameters), is_open and not tool.arguments.is_strict)


def _additional(schema: Mapping[str, Any]) -> Any:
    additional = schema.get("additionalProperties", True)
    return {} if additional is True else additional


def _options(root: Mapping[str, Any], schema: Any) -> list[dict[str, Any]]:
    """Alternatives of an object schema, without references and compositions at its top."""
    resolved = resolve(root, schema)
    if not isinstance(resolved, dict):
        raise UnclearValues("has a part that is no schema of an object")
    plain = {
        key: value for key, value in resolved.items() if key not in ("allOf", "anyOf", "oneOf")
    }
    options = [plain]
    for part in resolved.get("allOf", ()):
        options = _products(options, _options(root, part))
    for keyword in ("anyOf", "oneOf"):
        if keyword in resolved:
            parts = [option for part in resolved[keyword] for option in _options(root, part)]
            options = _products(options, parts)
    return options


def _products(
    left: Sequence[dict[str, Any]], right: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    if len(left) * len(right) > 64:
        raise UnclearValues("has more than 64 alternatives")
    return [_merged(a, b) for a in left for b in right]


def _merged(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    both = {**left, **right}
    properties = {**(left.get("properties") or {})}
    for name, value in (right.get("properties") or {}).items():
        if name in properties and properties[name] != value:
            raise UnclearValues(f"states the property {name[:40]!r} twice")
        properties[name] = value
    both["properties"] = properties
    both["required"] = [*(left.get("required") or ()), *(right.get("required") or ())]
    return both
