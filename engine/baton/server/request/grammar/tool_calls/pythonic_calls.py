"""Calls as Python writes them: `[f(a="x"), g()]`.

Values are JSON, which the text layer reads as it reads Python's literals; where a value may be
true, false or null, Python's words for it are allowed, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from baton.server.request.grammar.lark import escape_regex
from baton.server.request.grammar.lark_builder import FREE_TEXT
from baton.server.request.grammar.tool_calls.call_format import (
    LINE_START,
    SPACE,
    CallFormat,
    CallScope,
    GrammarTool,
)
from baton.server.request.grammar.tool_calls.parameter_values import (
    UnclearValues,
    resolve,
    with_definitions,
)
from baton.server.request.grammar.tool_calls.parameters import (
    ParameterList,
    ToolParameter,
    json_constraint,
    parameter_lists,
    unclear,
)
from baton.server.text.tool_formats import ToolFormat

ARGUMENT_NAME = re.compile(r"[^\W\d][\w-]{0,199}")
ANY_NAME = "/[a-zA-Z_][a-zA-Z0-9_]{0,63}/"
PYTHON_WORDS: dict[Any, tuple[str, ...]] = {"boolean": ("True", "False"), "null": ("None",)}


class PythonicFormat(CallFormat):
    """A list in brackets, which may stand between markers."""

    def __init__(self, row: ToolFormat) -> None:
        self._list_begin, self._list_end, self._lines_begin, self._lines_end = row.markers

    def calls_alone(self, scope: CallScope) -> str:
        literal = scope.builder.literal
        lists = [f'"[" {self._write_list_body(scope)}']
        for begin, write_rest in self._marked_lists():
            if scope.builder.is_token(begin):
                lists.append(f"{literal(begin)} {write_rest(scope)}")
        return scope.builder.add_rule(" | ".join(lists), "calls")

    def calls_in_text(self, scope: CallScope) -> str:
        builder = scope.builder
        text_begins = [
            FREE_TEXT + escape_regex(begin)
            for begin, _ in self._marked_lists()
            if not builder.is_token(begin)
        ]
        # A single terminal excludes all beginnings: with one terminal each, llguidance's lexer
        # exceeds its limits.
        begins = "|".join([_list_begin([tool.name for tool in scope.tools]), *text_begins])
        text = builder.terminal([FREE_TEXT], [f"({begins}){FREE_TEXT}"])

        def write_first(tool: GrammarTool) -> str:
            lexeme = builder.terminal([_list_begin([tool.name])])
            head = builder.add_rule(lexeme, "head", "[lazy]")
            return f'{head} {self._write_arguments(scope, tool)} ")"'

        first = scope.any_tool(write_first)
        others = "" if scope.is_single else f'(", " {self._write_call(scope)})*'
        lists = [f'{first} {others} "]"']
        for begin, write_rest in self._marked_lists():
            is_token = builder.is_token(begin)
            head = f"{text} {builder.literal(begin)}" if is_token else builder.text_until(begin)[0]
            lists.append(f"{head} {write_rest(scope)}")
        block = builder.add_rule(" | ".join(lists), "block")
        return f"({block} | {text})" if scope.is_single else f"{block}* {text}"

    def _marked_lists(self) -> list[tuple[str, Callable[[CallScope], str]]]:
        """Markers in front of a list, and how the rest of it is written."""
        return [
            (self._list_begin, self._write_marked_list),
            (self._lines_begin, self._write_lines),
        ]

    def _write_marked_list(self, scope: CallScope) -> str:
        return f'"[" {self._write_list_body(scope)} {scope.builder.literal(self._list_end)}'

    def _write_lines(self, scope: CallScope) -> str:
        """Calls on lines of their own, as OLMo 3 writes them."""
        newline = scope.builder.literal("\n")
        calls = scope.repeat(self._write_call(scope), newline)
        return f"{newline} {calls} {newline} {scope.builder.literal(self._lines_end)}"

    def _write_list_body(self, scope: CallScope) -> str:
        separator = scope.builder.literal(", ")
        return f'{scope.repeat(self._write_call(scope), separator)} "]"'

    def _write_call(self, scope: CallScope) -> str:
        def write_call(tool: GrammarTool) -> str:
            begin = scope.builder.literal(tool.name + "(")
            return f'{begin} {self._write_arguments(scope, tool)} ")"'

        return scope.any_tool(write_call)

    def _write_arguments(self, scope: CallScope, tool: GrammarTool) -> str:
        def write() -> str:
            lists = [
                self._write_list(scope, tool, found)
                for found in parameter_lists(tool, ARGUMENT_NAME)
            ]
            return scope.builder.add_rule(" | ".join(lists), "arguments")

        return scope.add_once(tool.name, write)

    def _write_list(self, scope: CallScope, tool: GrammarTool, found: ParameterList) -> str:
        if found.is_open:
            value = scope.builder.constraint(json_constraint(tool, {}))
            argument = f'{ANY_NAME} "=" {value}'
            return f'({argument} (", " {argument})*)?'
        written = [self._write_argument(scope, tool, each) for each in found.parameters]
        required = [each.is_required for each in found.parameters]
        return _join_arguments(scope, written, required)

    def _write_argument(self, scope: CallScope, tool: GrammarTool, parameter: ToolParameter) -> str:
        root = tool.arguments.value
        try:
            schema = resolve(root, parameter.schema)
            known = with_definitions(root, {} if schema is True else schema)
        except UnclearValues as err:
            if tool.arguments.is_strict:
                raise unclear(tool, f"{err} at the parameter {parameter.name}") from err
            known = {}
        value = scope.builder.constraint(json_constraint(tool, known))
        options = [value, *map(json.dumps, _python_words(known))]
        begin = scope.builder.literal(f"{parameter.name}=")
        return scope.builder.add_rule(f"{begin} ({' | '.join(options)})", "argument")


def _list_begin(names: Sequence[str]) -> str:
    """Regex of a text up to the begin of a list whose first call has one of these names."""
    either = "|".join(map(escape_regex, names))
    return rf"{LINE_START}\[{SPACE}({either}){SPACE}\("


def _python_words(schema: dict[str, Any]) -> list[str]:
    """Python's words for values of the types that the schema names, where it has no other keyword
    for them.
    """
    if schema.keys() & {"enum", "const", "anyOf", "oneOf", "allOf", "not", "if"}:
        return []
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    return [word for each in kinds for word in PYTHON_WORDS.get(each, ())]


def _join_arguments(scope: CallScope, written: Sequence[str], required: Sequence[bool]) -> str:
    """Arguments with commas between those that are there."""
    first = '""'
    later = '""'
    for argument, is_required in zip(reversed(written), reversed(required), strict=True):
        taken_first = f"{argument} {later}"
        taken_later = f'", " {argument} {later}'
        if not is_required:
            taken_first = f"{taken_first} | {first}"
            taken_later = f"{taken_later} | {later}"
        first = scope.builder.add_rule(taken_first, "arguments")
        later = scope.builder.add_rule(taken_later, "arguments")
    return first
