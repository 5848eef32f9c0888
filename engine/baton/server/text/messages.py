"""Chat messages as a client sends them, normalized to the form that the model's chat template takes.

Clients write one wire format, templates expect several: content as a text, as a list of parts, or either; the arguments
of tool calls as an object or as JSON text; system messages anywhere or only in front. `TemplateCaps` says what one
template takes (template_probe.py finds out), `normalize_messages` rewrites messages accordingly.

Deterministic, no I/O. The router normalizes in the same way (router/src/request/tokenize/messages.rs); cases that both
must satisfy are in tests/contract/golden/messages/cases.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import msgspec

from baton.errors import BadRequest, MissingField, UnsupportedParameter
from baton.server.fields import bad

JsonObject = dict[str, Any]
ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))
"""Roles of which a template's capabilities are known."""
MAX_ARGUMENTS_DEPTH = 100
"""Nesting of tool-call arguments that templates get: below the depth at which JSON readers and printers give up."""
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates read the reasoning of a message, the usual one first (matches transformers 5.24)."""
SYSTEM_SEPARATOR = "\n\n"
"""Between the texts of merged system messages."""


class ContentFormat(Enum):
    """Form in which a template takes the content of messages of one role."""

    TEXT = "text"
    """A string; of a list it would print the syntax."""
    PARTS = "parts"
    """A list of parts; it would lose a string."""
    ONE_PART = "one_part"
    """A list of one part; it would lose the others."""
    BOTH = "both"
    """A string or a list of parts."""
    DROPPED = "dropped"
    """Neither form reaches the prompt."""
    REFUSED = "refused"
    """The template refuses messages of this role; its own message is the answer to the client."""

    @property
    def is_rendered(self) -> bool:
        return self not in (ContentFormat.DROPPED, ContentFormat.REFUSED)


class ArgumentsFormat(Enum):
    """Form in which a template takes the arguments of tool calls."""

    OBJECT = "object"
    JSON_TEXT = "json_text"


class EmptyContent(Enum):
    """Content of an assistant message that has tool calls and no text."""

    TEXT = "text"
    NULL = "null"


@dataclass(frozen=True, slots=True)
class TemplateCaps:
    """Capabilities of a chat template. The defaults are those of a template that could not be probed."""

    system: ContentFormat = ContentFormat.TEXT
    developer: ContentFormat = ContentFormat.TEXT
    user: ContentFormat = ContentFormat.TEXT
    """Also used for roles without a field of their own."""
    assistant: ContentFormat = ContentFormat.TEXT
    tool: ContentFormat = ContentFormat.TEXT
    arguments: ArgumentsFormat = ArgumentsFormat.OBJECT
    empty_content: EmptyContent = EmptyContent.TEXT
    inline_system: bool = True
    """System messages behind the first message reach the prompt."""

    def content_format(self, role: str) -> ContentFormat:
        return getattr(self, role) if role in ROLES else self.user

    def canonical(self) -> str:
        """`name=value` of each field, the same text in engine and router: part of the tokenizer's fingerprint."""
        pairs = ((field.name, getattr(self, field.name)) for field in fields(self))
        texts = (
            f"{name}={str(value).lower() if isinstance(value, bool) else value.value}"
            for name, value in pairs
        )
        return " ".join(texts)


def normalize_messages(value: Any, caps: TemplateCaps) -> list[JsonObject]:
    """The `messages` field, checked, in the form that the template takes.

    Raises BadRequest for messages that are malformed, hold other content than text, or whose text the template drops.
    """
    if value is None:
        raise MissingField("messages is required", param="messages")
    if type(value) is not list or not value:
        raise bad("messages", "must be a non-empty array")
    places = [f"messages[{i}]" for i in range(len(value))]
    messages = [_checked_message(*pair) for pair in zip(value, places, strict=True)]
    _add_tool_names(messages)
    for message, where in zip(messages, places, strict=True):
        _fit_message(message, caps, where)
    return messages if caps.inline_system else _merge_system_messages(messages, caps.system)


def count_chars(messages: list[JsonObject]) -> int:
    """Text in normalized messages, for deciding where to tokenize it."""
    contents = (message["content"] for message in messages)
    return sum(
        len(content) if type(content) is str else sum(len(part["text"]) for part in content or ())
        for content in contents
    )


# ---- shape: the same for every template ------------------------------------------------------------------------------


def _checked_message(given: Any, where: str) -> JsonObject:
    """A copy without null members, with content as a string or a list of text parts, None if there is none."""
    if type(given) is not dict:
        raise BadRequest(f"{where} must be an object with role and content", param=where)
    message = _without_nulls(given, kept="content")  # null stands for a content that is filled in
    role = message.get("role")
    if type(role) is not str:
        raise MissingField(f"{where}.role is required and must be a string", param=f"{where}.role")
    if role == "function":
        message["role"] = "tool"
    elif role == "tool" and type(message.get("tool_call_id")) is not str:
        param = f"{where}.tool_call_id"
        raise MissingField(
            f"{param} is required: the id of the call that was answered", param=param
        )
    if "tool_calls" in message or "function_call" in message:
        _check_calls(message, f"{where}.tool_calls")
    given_names = [name for name in REASONING_NAMES if name in message]
    if given_names:
        reasoning = message[given_names[0]]
        for name in REASONING_NAMES:
            message.setdefault(name, reasoning)
    message["content"] = _checked_content(message, where)
    return message


def _without_nulls(members: JsonObject, kept: str | None = None) -> JsonObject:
    """Copy an object without the members that are null. `kept` keeps its place even so."""
    return {name: value for name, value in members.items() if value is not None or name == kept}


def _check_calls(message: JsonObject, where: str) -> None:
    """Copy the tool calls of a message; one without any has no `tool_calls`."""
    calls = message.get("tool_calls", [])
    if type(calls) is not list:
        raise bad(where, "must be an array")
    function_call = message.pop("function_call", None)
    if not calls and type(function_call) is dict:  # the predecessor of tool_calls
        calls = [{"type": "function", "function": function_call}]
    if calls:
        message["tool_calls"] = [_checked_call(call, where) for call in calls]
    else:
        message.pop("tool_calls", None)


def _checked_call(call: Any, where: str) -> JsonObject:
    """Copy a tool call and its function without null members."""
    if type(call) is not dict:
        raise bad(where, "must hold objects with id, type and function")
    copied = _without_nulls(call)
    if type(copied.get("function")) is dict:
        copied["function"] = _without_nulls(copied["function"])
    return copied


def _checked_content(message: JsonObject, where: str) -> str | list[JsonObject] | None:
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        return None
    if type(content) is str:
        return content
    if type(content) is not list:
        raise MissingField(
            f"{where}.content must be a string or an array of text parts", param=f"{where}.content"
        )
    return [_checked_part(part, f"{where}.content") for part in content]


def _checked_part(part: Any, where: str) -> JsonObject:
    if type(part) is not dict:
        raise bad(where, "must hold parts like {'type': 'text', 'text': …}")
    copied = _without_nulls(part)
    kind = copied.setdefault("type", "text")
    if kind != "text":
        raise UnsupportedParameter(
            f"{where} has a part of type {str(kind)[:50]!r}; only text is supported", param=where
        )
    if type(copied.get("text")) is not str:
        raise bad(where, "must hold parts like {'type': 'text', 'text': …}")
    return copied


def _add_tool_names(messages: list[JsonObject]) -> None:
    """Name the function in each tool message that leaves it out, by the call that it answers."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            call_id = call.get("id")
            name = _function_of(call).get("name")
            if type(call_id) is str and type(name) is str:
                names[call_id] = name
        if message["role"] == "tool":
            answered_id = message.get("tool_call_id")
            if type(answered_id) is str and answered_id in names:
                message.setdefault("name", names[answered_id])


def _function_of(call: JsonObject) -> JsonObject:
    """The object with name and arguments: some clients write them into the call itself."""
    function = call.get("function")
    return function if type(function) is dict else call


# ---- form: as the template takes it ----------------------------------------------------------------------------------


def _fit_message(message: JsonObject, caps: TemplateCaps, where: str) -> None:
    """Put role, arguments and content into the template's form."""
    role = message["role"]
    if role == "developer" and not caps.developer.is_rendered:
        role = "system"
        message["role"] = role
    for call in message.get("tool_calls", ()):
        function = _function_of(call)
        function["arguments"] = _fitted_arguments(function.get("arguments"), caps.arguments)
    content = message["content"]
    content_format = caps.content_format(role)
    if content_format is ContentFormat.DROPPED and join_parts(content or "").strip():
        raise UnsupportedParameter(
            f"the model's chat template drops the content of {role} messages; leave them out, "
            "or start the engine with a --chat-template FILE that writes them",
            param=f"{where}.content",
        )
    if not content and "tool_calls" in message and caps.empty_content is EmptyContent.NULL:
        message["content"] = None
    else:
        message["content"] = fit_content(content or "", content_format)


def fit_content(content: str | list[JsonObject], content_format: ContentFormat) -> Any:
    """A string or a list of text parts in the form of a template. Parts are joined by newlines, as in vLLM."""
    takes_list = content_format in (ContentFormat.BOTH, ContentFormat.PARTS)
    if takes_list and type(content) is list:
        return content
    text = join_parts(content)
    if content_format in (ContentFormat.PARTS, ContentFormat.ONE_PART):
        return [{"type": "text", "text": text}]
    return text


def join_parts(content: str | list[JsonObject]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _fitted_arguments(given: Any, arguments_format: ArgumentsFormat) -> Any:
    """Arguments of one call. On the wire they are JSON text; an empty one, and null, are an empty object."""
    is_empty = given is None or (type(given) is str and given.strip(" \t\r\n") in ("", "null"))
    if arguments_format is ArgumentsFormat.JSON_TEXT:
        if is_empty:
            return "{}"
        return given if type(given) is str else json.dumps(given, ensure_ascii=False)
    parsed = _parsed_json(given) if type(given) is str and not is_empty else given
    if type(parsed) is dict and not _is_deeper(parsed, MAX_ARGUMENTS_DEPTH):
        return parsed
    return {}  # one malformed call must not end the conversation (matches vLLM)


def _parsed_json(text: str) -> Any:
    """The value of a JSON text; None where it is malformed."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def _is_deeper(value: Any, depth: int) -> bool:
    """Objects and arrays are nested more than `depth` deep."""
    if type(value) not in (dict, list):
        return False
    members = value.values() if type(value) is dict else value
    return depth == 0 or any(_is_deeper(member, depth - 1) for member in members)


def _merge_system_messages(
    messages: list[JsonObject], content_format: ContentFormat
) -> list[JsonObject]:
    """Move the texts of all system messages into one message in front."""
    systems = [message for message in messages if message["role"] == "system"]
    if not systems:
        return messages
    first = systems[0]
    if len(systems) > 1:
        texts = [join_parts(message["content"]) for message in systems]
        first["content"] = fit_content(SYSTEM_SEPARATOR.join(texts), content_format)
    return [first, *(message for message in messages if message["role"] != "system")]
