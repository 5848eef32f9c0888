"""Formats in which a call is a row of tags with the parameters' values as raw text between them."""

from __future__ import annotations

from abc import abstractmethod

from baton.server.request.grammar.lark import escape_regex
from baton.server.request.grammar.lark_builder import FREE_TEXT
from baton.server.request.grammar.tool_calls.call_format import (
    LINE_START,
    CallScope,
    GrammarTool,
    MarkedFormat,
)
from baton.server.request.grammar.tool_calls.parameter_values import (
    ANY_TEXT,
    ParameterValues,
    TextValue,
    UnclearValues,
    parameter_values,
)
from baton.server.request.grammar.tool_calls.parameters import (
    ParameterList,
    ToolParameter,
    json_constraint,
    parameter_lists,
    unclear,
)
from baton.server.text.tool_formats import ToolFormat

ANY_NAME = r"/[a-zA-Z_][a-zA-Z0-9_]{0,63}/"
"""Names of parameters of a tool whose schema names none."""


class ParameterTagFormat(MarkedFormat):
    """A format with tags around each value."""

    value_end: str
    """Text behind a value."""

    states_types = False
    """A tag says whether its value is a string."""

    @abstractmethod
    def value_tags(self, *, is_text: bool) -> tuple[str, str]:
        """Texts in front of a parameter's name, and between it and the value. `is_text`: the value
        is a string.
        """

    def excluded_texts(self, scope: CallScope) -> tuple[str, ...]:
        """Regexes of values with their end that the text layer would end early, or read as
        something else.
        """
        return ()

    def write_parameters(self, scope: CallScope, tool: GrammarTool) -> str:
        def write() -> str:
            lists = [self._write_list(scope, tool, found) for found in parameter_lists(tool)]
            return scope.builder.add_rule(" | ".join(lists), "parameters")

        return scope.add_once(tool.name, write)

    def _write_list(self, scope: CallScope, tool: GrammarTool, found: ParameterList) -> str:
        if found.is_open:
            return f"({self._write_values(scope, tool, None, ANY_TEXT)})*"
        written = [self._write_parameter(scope, tool, each) for each in found.parameters]
        return " ".join(written) or '""'

    def _write_parameter(
        self, scope: CallScope, tool: GrammarTool, parameter: ToolParameter
    ) -> str:
        try:
            values = parameter_values(
                tool.arguments.value, parameter.schema, states_types=self.states_types
            )
        except UnclearValues as err:
            if tool.arguments.is_strict:
                raise unclear(tool, f"{err} at the parameter {parameter.name}") from err
            values = ANY_TEXT
        written = self._write_values(scope, tool, parameter.name, values)
        return written if parameter.is_required else f"({written})?"

    def _write_values(
        self, scope: CallScope, tool: GrammarTool, name: str | None, values: ParameterValues
    ) -> str:
        """The values of one parameter. `name`: None: any."""
        builder = scope.builder
        options = []
        for text in values.texts:
            begin = self._write_begin(scope, name, is_text=True)
            options.append(f"{begin} {self._write_text(scope, text)}")
        if values.other is not None:
            begin = self._write_begin(scope, name, is_text=False)
            other = builder.constraint(json_constraint(tool, values.other))
            options.append(f"{begin} {other} {builder.literal(self.value_end)}")
        return builder.add_rule(" | ".join(options), "parameter")

    def _write_begin(self, scope: CallScope, name: str | None, *, is_text: bool) -> str:
        before, after = self.value_tags(is_text=is_text)
        if name is not None:
            return scope.builder.literal(before + name + after)
        return f"{scope.builder.literal(before)} {ANY_NAME} {scope.builder.literal(after)}"

    def _write_text(self, scope: CallScope, text: TextValue) -> str:
        """A string, and the end of its value. What of the end is text is part of the same
        lexeme.
        """
        builder = scope.builder
        parts = builder.markers.split(self.value_end)
        front = parts[0] if isinstance(parts[0], str) else ""
        behind = self.value_end[len(front) :]
        end = escape_regex(front)
        excluded = [f"({each}){end}" for each in text.excluded]
        if not behind:
            excluded.append(f"{FREE_TEXT}{end}{FREE_TEXT}(.|\n)")
        excluded += self.excluded_texts(scope)
        lexeme = builder.terminal([f"({regex}){end}" for regex in text.regexes], excluded)
        return f"{lexeme} {builder.literal(behind)}" if behind else lexeme


class Qwen3CoderFormat(ParameterTagFormat):
    """A tag with the name, then a tag for each parameter; values stand on lines of their own."""

    separator = "\n"
    lenient_begins = (f"{LINE_START}<function={FREE_TEXT}",)
    value_end = "\n</parameter>\n"

    def __init__(self, row: ToolFormat) -> None:
        begin, self._call_end = row.markers
        self.begins = (begin,)

    def write_block(self, scope: CallScope, begin: str) -> str:
        literal = scope.builder.literal

        def write_call(tool: GrammarTool) -> str:
            front = literal(f"\n<function={tool.name}>\n")
            end = literal(f"</function>\n{self._call_end}")
            return f"{front} {self.write_parameters(scope, tool)} {end}"

        return scope.any_tool(write_call)

    def value_tags(self, *, is_text: bool) -> tuple[str, str]:
        return "<parameter=", ">\n"

    def excluded_texts(self, scope: CallScope) -> tuple[str, ...]:
        excluded = (
            rf"{FREE_TEXT}</parameter>{FREE_TEXT}</parameter>\n",
            rf"({FREE_TEXT}\n)?<parameter=[^>\s<]+>{FREE_TEXT}",
        )
        if scope.builder.is_token(self._call_end):
            return excluded
        return (*excluded, f"{FREE_TEXT}{self._call_end}{FREE_TEXT}")


class GlmFormat(ParameterTagFormat):
    """A name, then keys and values."""

    def __init__(self, row: ToolFormat, newline: str) -> None:
        """`newline`: text behind the name and behind each tag."""
        begin, self._call_end, self._key_begin, self._key_end, self._value_begin, value_end = (
            row.markers
        )
        self.begins = (begin,)
        self.separator = newline
        self.value_end = value_end + newline
        self._newline = newline

    def write_block(self, scope: CallScope, begin: str) -> str:
        literal = scope.builder.literal

        def write_call(tool: GrammarTool) -> str:
            front = literal(f"{tool.name}{self._newline}")
            return f"{front} {self.write_parameters(scope, tool)} {literal(self._call_end)}"

        return scope.any_tool(write_call)

    def value_tags(self, *, is_text: bool) -> tuple[str, str]:
        return self._key_begin, f"{self._key_end}{self._newline}{self._value_begin}"


class DeepseekV32Format(ParameterTagFormat):
    """Tags that hold a token, and state of each value whether it is a string. V4 names the block
    `tool_calls`.
    """

    states_types = True

    def __init__(self, row: ToolFormat) -> None:
        (self._token,) = row.markers
        self.begins = (f"<{self._token}function_calls>", f"<{self._token}tool_calls>")
        self.value_end = f"</{self._token}parameter>\n"

    def write_block(self, scope: CallScope, begin: str) -> str:
        literal = scope.builder.literal

        def write_call(tool: GrammarTool) -> str:
            front = literal(f'\n<{self._token}invoke name="{tool.name}">\n')
            end = literal(f"</{self._token}invoke>")
            return f"{front} {self.write_parameters(scope, tool)} {end}"

        calls = scope.repeat(scope.any_tool(write_call), "")
        end = literal(f"\n</{begin.removeprefix('<')}")
        return f"{calls} {end}"

    def value_tags(self, *, is_text: bool) -> tuple[str, str]:
        return f'<{self._token}parameter name="', f'" string="{str(is_text).lower()}">'

    def excluded_texts(self, scope: CallScope) -> tuple[str, ...]:
        token = f"{FREE_TEXT}{self._token}"
        times = 1 if scope.builder.is_token(self._token) else 2
        return (token * times + FREE_TEXT,)
