"""Formats in which a call is a JSON object with a name and arguments."""

from __future__ import annotations

import json

from baton.server.request.grammar.lark import escape_regex
from baton.server.request.grammar.lark_builder import FREE_TEXT
from baton.server.request.grammar.tool_calls.call_format import (
    NINE_LETTERS,
    SPACE,
    CallFormat,
    CallScope,
    GrammarTool,
    MarkedFormat,
)
from baton.server.text.tool_formats import JsonCalls, ToolFormat

NO_TEXT = rf"{SPACE}(\[{FREE_TEXT})?\{{{FREE_TEXT}"
"""Answers that begin with an object, or with a list that may have one: without a marker, those are
read for calls.
"""


class CallObjects:
    """The JSON objects of a format's calls."""

    def __init__(self, row: ToolFormat, calls: JsonCalls) -> None:
        self._arguments_key = calls.arguments_key
        self._has_id = row.id_form == "nine_letters"
        """A further member may hold an id."""

    def any_call(self, scope: CallScope) -> str:
        return scope.any_tool(lambda tool: self._write_call(scope, tool))

    def _write_call(self, scope: CallScope, tool: GrammarTool) -> str:
        """`{"name": "f", "arguments": {…}}`"""
        key = self._arguments_key
        front = scope.builder.literal(f'{{"name": {json.dumps(tool.name)}, "{key}": ')
        call_id = f'(", \\"id\\": \\"" {NINE_LETTERS} "\\"")?' if self._has_id else ""
        return f'{front} {scope.arguments(tool)} {call_id} "}}"'


def call_list(scope: CallScope, call: str) -> str:
    """`[…, …]`"""
    return f'"[" {list_body(scope, call)}'


def list_body(scope: CallScope, call: str) -> str:
    """A list behind its bracket."""
    elements = scope.repeat(call, scope.builder.literal(", "))
    return f'{elements} "]"'


class MarkedJsonFormat(MarkedFormat):
    """A marker in front of each object, or of a list of them."""

    def __init__(self, row: ToolFormat, calls: JsonCalls) -> None:
        count = len(calls.begins)
        self._calls = calls
        self._objects = CallObjects(row, calls)
        self._ends = row.markers[count:]
        kinds = dict(zip(row.markers, calls.begins, strict=False))
        words = [marker for marker, kind in kinds.items() if kind == "word"]
        self._word_begins = [f"{word}[" for word in words]
        self.begins = tuple(
            f"{marker}[" if kind == "word" else marker for marker, kind in kinds.items()
        )
        self.separator = calls.separators[0] if calls.separators else None
        self.lenient_begins = tuple(
            rf"{FREE_TEXT}{escape_regex(word)}({SPACE}\{{|[ \t\r\n]+\[){FREE_TEXT}"
            for word in words
        )

    def write_block(self, scope: CallScope, begin: str) -> str:
        call = self._objects.any_call(scope)
        if begin in self._word_begins:
            return list_body(scope, call)
        calls = call if self.separator is not None else call_list(scope, call)
        parts = [calls]
        padding = self._calls.padding
        if padding:
            is_optional = self._calls.has_optional_padding
            parts.insert(0, scope.builder.literal(padding) + ("?" if is_optional else ""))
        for end in self._ends:
            parts.append(scope.builder.literal(padding + end))
        return " ".join(parts)


class StartJsonFormat(CallFormat):
    """Objects from the answer's start on, or behind a marker."""

    def __init__(self, row: ToolFormat, calls: JsonCalls) -> None:
        self._objects = CallObjects(row, calls)
        self._markers = row.markers
        self._separators = calls.separators

    def calls_alone(self, scope: CallScope) -> str:
        calls = self._write_calls(scope)
        if not self._markers:
            return calls
        return f"({' | '.join(map(scope.builder.literal, self._markers))})? {calls}"

    def calls_in_text(self, scope: CallScope) -> str:
        calls = self._write_calls(scope)
        heads = [self._write_head(scope, marker) for marker in self._markers]
        text = scope.builder.terminal([FREE_TEXT], [NO_TEXT])
        space = scope.builder.terminal([SPACE])
        options = [f"{front} {calls}" for front in (space, *heads)]
        return f"({' | '.join([*options, text])})"

    def _write_head(self, scope: CallScope, marker: str) -> str:
        """Free text up to the end of a marker."""
        head, included = scope.builder.text_until(marker)
        rest = marker[len(included) :]
        return f"{head} {scope.builder.literal(rest)}" if rest else head

    def _write_calls(self, scope: CallScope) -> str:
        call = self._objects.any_call(scope)
        if self._separators:
            separator = f"({' | '.join(map(scope.builder.literal, self._separators))})"
            return scope.builder.add_rule(scope.repeat(call, separator), "calls")
        if scope.is_single:
            return call
        return scope.builder.add_rule(f"{call} | {call_list(scope, call)}", "calls")
