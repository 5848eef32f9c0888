"""The format of each name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from baton.server.request.grammar.tool_calls.call_format import CallFormat
from baton.server.request.grammar.tool_calls.gpt_oss_calls import GptOssFormat
from baton.server.request.grammar.tool_calls.header_calls import HeaderFormat
from baton.server.request.grammar.tool_calls.json_calls import MarkedJsonFormat, StartJsonFormat
from baton.server.request.grammar.tool_calls.pythonic_calls import PythonicFormat
from baton.server.request.grammar.tool_calls.tag_calls import (
    DeepseekV32Format,
    GlmFormat,
    Qwen3CoderFormat,
)
from baton.server.text.tool_formats import (
    DsmlTags,
    FunctionTags,
    HarmonyMessages,
    HeaderCalls,
    JsonCalls,
    KeyValueTags,
    PythonicCalls,
    ToolFormat,
    tool_formats,
)


@cache
def call_formats() -> Mapping[str, CallFormat]:
    """By the names of --tool-parser."""
    return {name: call_format_of(row) for name, row in tool_formats().items()}


def call_format_of(row: ToolFormat) -> CallFormat:
    """The grammar's side of a row."""
    match row.syntax:
        case JsonCalls(at_start=True) as calls:
            return StartJsonFormat(row, calls)
        case JsonCalls() as calls:
            return MarkedJsonFormat(row, calls)
        case HeaderCalls() as calls:
            return HeaderFormat(row, calls)
        case FunctionTags():
            return Qwen3CoderFormat(row)
        case KeyValueTags(newline):
            return GlmFormat(row, newline)
        case DsmlTags():
            return DeepseekV32Format(row)
        case PythonicCalls():
            return PythonicFormat(row)
        case HarmonyMessages():
            return GptOssFormat(row)
