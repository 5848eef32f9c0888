"""Chat messages to the text of a prompt, with the checkpoint's own Jinja template.

The template is data from the internet, so it runs in Jinja's immutable sandbox. The helpers, block trimming and
`continue_final_message` behave as in transformers' apply_chat_template, since templates are written against that; a
test compares the two. The text already holds the BOS token where the template wants one: tokenize it with
add_special_tokens=False.
"""

from __future__ import annotations

import datetime
import json
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.errors import BadRequest, MissingField, UnsupportedParameter
from baton.server.api.fields import bad

MARK = "\ue000baton-continues-here\ue000"
"""Private-use characters: no client text holds them by accident."""
MARK_SPACE = MARK + " "
"""Probe text to append: a template that trims its messages takes the space away, and so tells that it trims."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's turn for training; a prompt ignores it."""

    tags = {"generation"}  # noqa: RUF012 — jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML characters, which would change prompts."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return env


class ChatTemplate:
    """A compiled template. `source` None: the checkpoint has none, and every render is a clear 400."""

    def __init__(self, source: str | None, special_tokens: dict[str, str]) -> None:
        self._special_tokens = special_tokens
        self._template: jinja2.Template | None = None
        self._broken = "the model has no chat template"
        try:
            if source is not None:
                self._template = _environment().from_string(source)
        except (
            jinja2.TemplateError
        ) as err:  # completions still work: the error belongs to chat requests
            self._broken = f"the model's chat template does not compile ({err})"

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Raises BadRequest with the template's own message when it refuses the messages."""
        if self._template is None:
            raise UnsupportedParameter(
                f"{self._broken}; use /v1/completions, or start the engine with --chat-template FILE",
                param="messages",
            )
        if continue_final_message:
            messages = _mark_end(messages)
        variables = {"tools": None, "documents": None, **self._special_tokens, **(kwargs or {})}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._template.render(variables)
        except jinja2.TemplateError as err:
            raise BadRequest(
                f"the chat template refuses these messages: {err}", param="messages"
            ) from err
        except (
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            IndexError,
            ArithmeticError,
        ) as err:
            # A template that meets a shape it did not expect fails with plain Python errors.
            raise BadRequest(
                f"the chat template fails on these messages: {err}", param="messages"
            ) from err
        return _cut_at_mark(text) if continue_final_message else text


def _mark_end(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Append the mark to the last text of the last message, so that the cut can be found in the rendered text."""
    last = dict(messages[-1])
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + MARK_SPACE
    elif (
        isinstance(content, list)
        and content
        and isinstance(content[-1], dict)
        and "text" in content[-1]
    ):
        last["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + MARK_SPACE}]
    else:
        raise bad("continue_final_message", "needs a last message with text to continue")
    return [*messages[:-1], last]


def _cut_at_mark(text: str) -> str:
    at = text.rfind(MARK)
    if at < 0:
        raise BadRequest(
            "the chat template drops the end of the last message, so it cannot be continued",
            param="continue_final_message",
        )
    return text[:at] if text.startswith(MARK_SPACE, at) else text[:at].rstrip()


def read_messages(value: Any) -> list[dict[str, Any]]:
    """The `messages` field, checked; every content is plain text."""
    if value is None:
        raise MissingField("messages is required", param="messages")
    if type(value) is not list or not value:
        raise bad("messages", "must be a non-empty array")
    return [_message(m, f"messages[{i}]") for i, m in enumerate(value)]


def _message(message: Any, where: str) -> dict[str, Any]:
    """Return a message with its content as plain text: text parts are joined by newlines (matches vLLM)."""
    if type(message) is not dict:
        raise BadRequest(f"{where} must be an object with role and content", param=where)
    if type(message.get("role")) is not str:
        raise MissingField(f"{where}.role is required and must be a string", param=f"{where}.role")
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        return {**message, "content": ""} if not message.get("tool_calls") else message
    if type(content) is str:
        return message
    if type(content) is not list:
        raise MissingField(
            f"{where}.content must be a string or an array of text parts", param=f"{where}.content"
        )
    texts = []
    for part in content:
        if type(part) is dict and part.get("type", "text") != "text":
            raise UnsupportedParameter(
                f"{where}.content has a part of type {str(part.get('type'))[:50]!r}; only text is supported",
                param=f"{where}.content",
            )
        if type(part) is not dict or type(part.get("text")) is not str:
            raise bad(f"{where}.content", "must hold parts like {'type': 'text', 'text': …}")
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}


def chars_of(messages: list[dict[str, Any]]) -> int:
    """Text in all messages, for deciding where to tokenize it."""
    return sum(len(m["content"] or "") for m in messages)
