"""Formats in which a call is a header between markers and a JSON object."""

from __future__ import annotations

from baton.server.request.grammar.tool_calls.call_format import (
    CallScope,
    GrammarTool,
    MarkedFormat,
)

CALLS_BEGIN = "<｜tool▁calls▁begin｜>"  # noqa: RUF001
CALL_BEGIN = "<｜tool▁call▁begin｜>"  # noqa: RUF001
SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
CALL_END = "<｜tool▁call▁end｜>"  # noqa: RUF001
CALLS_END = "<｜tool▁calls▁end｜>"  # noqa: RUF001
"""Markers of `deepseek_v3` and `deepseek_v31`, whose bars are no ASCII."""


class DeepseekV3Format(MarkedFormat):
    """The object stands in a fence."""

    begins = (CALLS_BEGIN,)

    def write_block(self, scope: CallScope, begin: str) -> str:
        literal = scope.builder.literal

        def write_call(tool: GrammarTool) -> str:
            header = literal(f"{CALL_BEGIN}function{SEPARATOR}{tool.name}\n```json\n")
            end = literal(f"\n```{CALL_END}")
            return f"{header} {scope.arguments(tool)} {end}"

        calls = scope.repeat(scope.any_tool(write_call), literal("\n"))
        return f"{calls} {literal(CALLS_END)}"


class DeepseekV31Format(MarkedFormat):
    """The object follows the name."""

    begins = (CALLS_BEGIN,)

    def write_block(self, scope: CallScope, begin: str) -> str:
        literal = scope.builder.literal

        def write_call(tool: GrammarTool) -> str:
            header = literal(f"{CALL_BEGIN}{tool.name}{SEPARATOR}")
            return f"{header} {scope.arguments(tool)} {literal(CALL_END)}"

        calls = scope.repeat(scope.any_tool(write_call), "")
        return f"{calls} {literal(CALLS_END)}"


class KimiK2Format(MarkedFormat):
    """The header is an id with a number."""

    begins = ("<|tool_calls_section_begin|>",)

    def write_block(self, scope: CallScope, begin: str) -> str:
        literal = scope.builder.literal
        number = r"/0|[1-9][0-9]{0,3}/"

        def write_call(tool: GrammarTool) -> str:
            header = f"{literal(f'<|tool_call_begin|>functions.{tool.name}:')} {number}"
            begin = literal("<|tool_call_argument_begin|>")
            end = literal("<|tool_call_end|>")
            return f"{header} {begin} {scope.arguments(tool)} {end}"

        calls = scope.repeat(scope.any_tool(write_call), "")
        return f"{calls} {literal('<|tool_calls_section_end|>')}"


class MistralV13Format(MarkedFormat):
    """A marker in front of each name. Version 11 writes an id of nine characters behind the name."""

    begins = ("[TOOL_CALLS]",)
    separator = ""

    def write_block(self, scope: CallScope, begin: str) -> str:
        literal = scope.builder.literal
        call_id = ""
        if scope.builder.is_token("[CALL_ID]"):
            call_id = f"({literal('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)?"

        def write_call(tool: GrammarTool) -> str:
            header = f"{literal(tool.name)} {call_id} {literal('[ARGS]')}"
            return f"{header} {scope.arguments(tool)}"

        return scope.any_tool(write_call)
