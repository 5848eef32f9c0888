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

from baton.errors import BadRequest, UnsupportedParameter
from baton.server.fields import bad
from baton.server.text.messages import TemplateCaps, normalize_messages
from baton.server.text.template_probe import probe_template

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
    """A compiled template. `source` None: the checkpoint has none, and every render is a clear 400.

    Cost of construction: some twenty short conversations are rendered to find out `caps`.
    """

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
        self.caps = TemplateCaps() if self._template is None else probe_template(self._probe)
        """Form in which the template takes messages."""

    def normalize(self, messages: Any) -> list[dict[str, Any]]:
        """The `messages` field, checked, in the form that the template takes. Raises BadRequest."""
        return normalize_messages(messages, self.caps)

    def _probe(self, messages: list[dict[str, Any]]) -> str | None:
        """Text of a conversation without options; None: the template fails on it."""
        try:
            return self.render(messages, add_generation_prompt=False)
        except BadRequest:
            return None

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
