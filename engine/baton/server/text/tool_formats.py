"""The table of the formats of tool calls, which the text layer
(engine/text/src/stream/tools/formats.rs) defines.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Literal

import msgspec

from baton.server.text.native import native_extension


class CallSyntax(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Place of names and arguments. Fields are those of Rust, which describes them."""


class JsonCalls(CallSyntax, frozen=True, tag="json"):
    begins: list[Literal["marker", "word"]]
    at_start: bool
    padding: str
    has_optional_padding: bool
    separators: list[str]
    arguments_key: str


class HeaderCalls(CallSyntax, frozen=True, tag="headers"):
    call: str
    id_begin: str | None
    separator: str
    end: str | None


class FunctionTags(CallSyntax, frozen=True, tag="function_tags"):
    pass


class KeyValueTags(CallSyntax, frozen=True, tag="key_value_tags"):
    newline: str


class DsmlTags(CallSyntax, frozen=True, tag="dsml_tags"):
    pass


class PythonicCalls(CallSyntax, frozen=True, tag="pythonic"):
    pass


class HarmonyMessages(CallSyntax, frozen=True, tag="harmony"):
    pass


class ToolFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How models write calls: a row of the table."""

    markers: list[str]
    """Texts between which calls stand. The first ones begin a call."""
    id_form: Literal["usual", "nine_letters", "numbered"]
    """Ids of calls that the model's template takes back."""
    syntax: (
        JsonCalls
        | HeaderCalls
        | FunctionTags
        | KeyValueTags
        | DsmlTags
        | PythonicCalls
        | HarmonyMessages
    )


@cache
def tool_formats() -> Mapping[str, ToolFormat]:
    """Rows of the table by the names of --tool-parser."""
    rows = msgspec.json.decode(native_extension().tool_formats(), type=list[tuple[str, ToolFormat]])
    return dict(rows)
