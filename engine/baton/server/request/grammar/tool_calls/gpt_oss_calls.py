"""Calls of gpt-oss: messages to tools, in channels.

The prompt ends with the begin of the first message, `<|start|>assistant`. Reasoning is a message of
a channel of its own, so that it is part of the grammar. A call ends the answer: `<|call|>` is one
of the model's end tokens.
"""

from __future__ import annotations

from baton.server.request.grammar.tool_calls.call_format import CallFormat, CallScope, GrammarTool
from baton.server.text.tool_formats import ToolFormat


class GptOssFormat(CallFormat):
    """Messages of the channels analysis, commentary and final."""

    def __init__(self, row: ToolFormat) -> None:
        self._channel, start, self._message, constrain, end, _call, _return = row.markers
        self._next_message = f"{end}{start}assistant"
        self._json_kind = f"{constrain}json"

    def calls_alone(self, scope: CallScope) -> str:
        return f"{self._write_analysis(scope)} {self._write_call(scope)}"

    def calls_behind_reasoning(self, scope: CallScope) -> str:
        return self.calls_alone(scope)

    def calls_in_text(self, scope: CallScope) -> str:
        literal = scope.builder.literal
        preamble = self._write_message(scope, "commentary")
        final = f"{literal(f'{self._channel}final{self._message}')} FREE_TEXT"
        before = f"({self._write_analysis(scope)} | {preamble})*"
        return f"{before} ({self._write_call(scope)} | {final})"

    def calls_or_answer(self, scope: CallScope, answer: str) -> str:
        literal = scope.builder.literal
        kind = f'(" "? {literal(self._json_kind)})?'
        final = f"{literal(f'{self._channel}final')} {kind} {literal(self._message)} {answer}"
        return f"{self._write_analysis(scope)} ({self._write_call(scope)} | {final})"

    def _write_analysis(self, scope: CallScope) -> str:
        return f"({self._write_message(scope, 'analysis')})*"

    def _write_message(self, scope: CallScope, channel: str) -> str:
        """A message, and the begin of the next one."""
        literal = scope.builder.literal
        begin = literal(f"{self._channel}{channel}{self._message}")
        return f"{begin} FREE_TEXT {literal(self._next_message)}"

    def _write_call(self, scope: CallScope) -> str:
        literal = scope.builder.literal
        kind = f'(" "? {literal(self._json_kind)} | " json")?'

        def write_call(tool: GrammarTool) -> str:
            in_channel = literal(f"{self._channel}commentary to=functions.{tool.name}")
            in_role = literal(f" to=functions.{tool.name}{self._channel}commentary")
            header = f"({in_channel} | {in_role}) {kind} {literal(self._message)}"
            return f"{header} {scope.arguments(tool)}"

        return scope.any_tool(write_call)
