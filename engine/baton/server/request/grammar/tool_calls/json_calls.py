"""Formats in which a call is a JSON object with a name and arguments."""

from __future__ import annotations

import json

from baton.server.request.grammar.lark_builder import FREE_TEXT
from baton.server.request.grammar.tool_calls.call_format import (
    SPACE,
    CallFormat,
    CallScope,
    GrammarTool,
    MarkedFormat,
)

NO_TEXT = rf"{SPACE}(\[{FREE_TEXT})?\{{{FREE_TEXT}"
"""Answers that begin with an object, or with a list that may have one: without a marker, those are read
for calls.
"""


def object_call(
    scope: CallScope, tool: GrammarTool, key: str = "arguments", others: str = ""
) -> str:
    """`{"name": "f", "arguments": {…}}`. `others`: part of a rule for further members."""
    front = scope.builder.literal(f'{{"name": {json.dumps(tool.name)}, "{key}": ')
    return f'{front} {scope.arguments(tool)} {others} "}}"'


def call_list(scope: CallScope, call: str) -> str:
    """`[…, …]`"""
    return f'"[" {list_body(scope, call)}'


def list_body(scope: CallScope, call: str) -> str:
    """A list behind its bracket."""
    elements = scope.repeat(call, scope.builder.literal(", "))
    return f'{elements} "]"'


class HermesFormat(MarkedFormat):
    """An object between two markers."""

    begins = ("<tool_call>",)
    separator = "\n"

    def write_block(self, scope: CallScope, begin: str) -> str:
        call = scope.any_tool(lambda tool: object_call(scope, tool))
        front = scope.builder.literal("\n")
        end = scope.builder.literal("\n</tool_call>")
        return f"{front} {call} {end}"


class MistralFormat(MarkedFormat):
    """A list behind a marker, whose elements may have an id of nine characters."""

    begins = ("[TOOL_CALLS]",)

    def write_block(self, scope: CallScope, begin: str) -> str:
        call_id = '(", \\"id\\": \\"" /[a-zA-Z0-9]{9}/ "\\"")?'
        call = scope.any_tool(lambda tool: object_call(scope, tool, others=call_id))
        return f'" "? {call_list(scope, call)}'


class GraniteFormat(MarkedFormat):
    """A list behind a marker, of which there are two spellings."""

    begins = ("<|tool_call|>", "<tool_call>")

    def write_block(self, scope: CallScope, begin: str) -> str:
        return call_list(scope, scope.any_tool(lambda tool: object_call(scope, tool)))


class Phi4Format(MarkedFormat):
    """A list between two markers, or behind `functools`."""

    begins = ("<|tool_call|>", "functools[")
    lenient_begins = (rf"{FREE_TEXT}functools({SPACE}\{{|[ \t\r\n]+\[){FREE_TEXT}",)

    def write_block(self, scope: CallScope, begin: str) -> str:
        call = scope.any_tool(lambda tool: object_call(scope, tool))
        if begin == "functools[":
            return list_body(scope, call)
        return f"{call_list(scope, call)} {scope.builder.literal('<|/tool_call|>')}"


class Llama3Format(CallFormat):
    """Objects from the answer's start on, or behind a marker."""

    marker = "<|python_tag|>"

    def calls_alone(self, scope: CallScope) -> str:
        calls = self._write_calls(scope)
        return f"({scope.builder.literal(self.marker)})? {calls}"

    def calls_in_text(self, scope: CallScope) -> str:
        calls = self._write_calls(scope)
        head, _ = scope.builder.text_until(self.marker)
        text = scope.builder.terminal([FREE_TEXT], [NO_TEXT])
        space = scope.builder.terminal([SPACE])
        return f"({space} {calls} | {head} {calls} | {text})"

    def _write_calls(self, scope: CallScope) -> str:
        call = scope.any_tool(lambda tool: object_call(scope, tool, key="parameters"))
        return scope.builder.add_rule(scope.repeat(call, '("; " | "\\n")'), "calls")


class UnmarkedFormat(CallFormat):
    """An object, or a list: the whole answer."""

    def calls_alone(self, scope: CallScope) -> str:
        call = scope.any_tool(lambda tool: object_call(scope, tool))
        if scope.is_single:
            return call
        return scope.builder.add_rule(f"{call} | {call_list(scope, call)}", "calls")

    def calls_in_text(self, scope: CallScope) -> str:
        calls = self.calls_alone(scope)
        text = scope.builder.terminal([FREE_TEXT], [NO_TEXT])
        space = scope.builder.terminal([SPACE])
        return f"({space} {calls} | {text})"
