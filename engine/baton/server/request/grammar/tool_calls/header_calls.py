"""Formats in which a call is a header between markers and a JSON object."""

from __future__ import annotations

from baton.server.request.grammar.tool_calls.call_format import (
    NINE_LETTERS,
    CallScope,
    GrammarTool,
    MarkedFormat,
)
from baton.server.text.tool_formats import HeaderCalls, ToolFormat

NUMBER = r"/0|[1-9][0-9]{0,3}/"


class HeaderFormat(MarkedFormat):
    """A block of calls between markers, or a marker in front of each call."""

    def __init__(self, row: ToolFormat, calls: HeaderCalls) -> None:
        self._id_form = row.id_form
        self._calls = calls
        header, self._call_end = calls.call.split("{arguments}")
        self._name_begin, behind_name = header.split("{name}")
        self._name_end, id_part, self._arguments_begin = behind_name.rpartition("{id}")
        self._has_id = bool(id_part)
        self.begins = (row.markers[0],)
        self.separator = calls.separator if calls.end is None else None

    def write_block(self, scope: CallScope, begin: str) -> str:
        call = scope.any_tool(lambda tool: self._write_call(scope, tool))
        if self._calls.end is None:
            return call
        literal = scope.builder.literal
        separator = self._calls.separator
        calls = scope.repeat(call, literal(separator) if separator else "")
        return f"{calls} {literal(self._calls.end)}"

    def _write_call(self, scope: CallScope, tool: GrammarTool) -> str:
        literal = scope.builder.literal
        name = f"{self._name_begin}{tool.name}{self._name_end}"
        if self._has_id:
            header = f"{literal(name)} {self._write_id(scope)} {literal(self._arguments_begin)}"
        else:
            header = literal(name + self._arguments_begin)
        call = f"{header} {scope.arguments(tool)}"
        return f"{call} {literal(self._call_end)}" if self._call_end else call

    def _write_id(self, scope: CallScope) -> str:
        """Part of a rule for what a header has of an id. Empty: the vocabulary has no marker of
        ids.
        """
        form = NUMBER if self._id_form == "numbered" else NINE_LETTERS
        marker = self._calls.id_begin
        if marker is None:
            return form
        return (
            f"({scope.builder.literal(marker)} {form})?" if scope.builder.is_token(marker) else ""
        )
