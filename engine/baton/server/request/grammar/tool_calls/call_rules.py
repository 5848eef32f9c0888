"""Calls that an answer may have or must have, and the schemas of their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.server.fields import bad
from baton.server.request.grammar.constraint import AnswerConstraint, ConstraintKind
from baton.server.request.grammar.schema.exact_numbers import exact_schema
from baton.server.request.tools import CallableTool, ChoiceMode

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class CallRules:
    """Rules for the calls of an answer. Equal rules give equal grammars."""

    family: str
    """Format in which the model writes calls: a name of --tool-parser."""
    tools: tuple[CallableTool, ...]
    mode: ChoiceMode
    is_parallel: bool
    """An answer may have several calls."""

    @property
    def is_forced(self) -> bool:
        """An answer has a call."""
        return self.mode is not ChoiceMode.AUTO

    @property
    def is_single(self) -> bool:
        """An answer has at most one call."""
        return not self.is_parallel or self.mode is ChoiceMode.NAMED


def arguments_constraint(tool: CallableTool) -> AnswerConstraint:
    """Constraint for the arguments of a tool's calls, which are an object. Raises BadRequest."""
    schema = exact_schema(dict(tool.parameters), tool.param)
    kind = schema.get("type")
    if isinstance(kind, list) and "object" in kind:
        kind = "object"
    if kind not in (None, "object"):
        raise bad(
            tool.param,
            f"describes a value of the type {kind!r}; the arguments of a function are an object",
        )
    schema["type"] = "object"
    return AnswerConstraint(
        ConstraintKind.JSON_SCHEMA, schema, tool.param, is_strict=tool.is_strict
    )


def any_object(tool: CallableTool) -> AnswerConstraint:
    """Constraint for the arguments of a tool whose schema cannot be enforced."""
    return AnswerConstraint(ConstraintKind.JSON_SCHEMA, dict(ANY_OBJECT), tool.param)
