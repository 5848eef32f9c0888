"""Capabilities of a chat template, found by rendering short conversations when the template is loaded.

Each probe puts words into one place of a conversation and looks whether they reach the prompt. The order of the probes
matters: later ones write the content of their other messages as the earlier ones found. Rendering twenty conversations
takes a few milliseconds.

Deterministic, no I/O. The router probes in the same way (router/src/request/tokenize/template_probe.rs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from baton.server.text.messages import (
    ArgumentsFormat,
    ContentFormat,
    EmptyContent,
    JsonObject,
    TemplateCaps,
    fit_content,
)

Render = Callable[[list[JsonObject]], str | None]
"""Text of a conversation; None: the template raises an error."""
WORD = "batonprobea"
TEXT_WORDS = (WORD, "batonprobeb")
SYNTAX_WORD = "batonprobec"
"""Member of content parts that is no text: in the prompt only where a template prints whole parts."""
WORDS = (*TEXT_WORDS, SYNTAX_WORD)
VALUE = "batonprobed\x01batonprobee"
"""Argument of a tool call. JSON, Python's repr and Rust's debug form each write the control character differently, so
that JSON differs from an object that the template printed where it expected text."""
VALUE_FORMS = (VALUE, r"batonprobed\u0001batonprobee")
VALUE_JSON = f'{{"probe": "{VALUE_FORMS[1]}"}}'
CALL_ID = "probe0id9"
"""Nine letters and digits: Mistral's templates refuse others."""
NEUTRAL_TEXT = "ok"


def probe_template(render: Render) -> TemplateCaps:
    """Find out what a template takes. Equal templates give equal capabilities."""
    caps = TemplateCaps()
    caps = replace(caps, user=_content_format(render, caps, "user"))
    caps = replace(caps, assistant=_content_format(render, caps, "assistant"))
    caps = replace(caps, system=_content_format(render, caps, "system"))
    caps = replace(caps, developer=_content_format(render, caps, "developer"))
    caps = _with_call_format(render, caps)
    caps = replace(caps, tool=_content_format(render, caps, "tool"))
    return replace(caps, inline_system=_is_inline_system_rendered(render, caps))


def _message(role: str, content: Any, **members: Any) -> JsonObject:
    return {"role": role, "content": content, **members}


def _neutral_message(caps: TemplateCaps, role: str) -> JsonObject:
    return _message(role, fit_content(NEUTRAL_TEXT, caps.content_format(role)))


def _content_format(render: Render, caps: TemplateCaps, role: str) -> ContentFormat:
    """Form in which content of `role` reaches the prompt."""

    def shown_words(content: Any) -> set[str] | None:
        text = render(_conversation_with(caps, role, content))
        return None if text is None else {word for word in WORDS if word in text}

    parts = [{"type": "text", "text": word, SYNTAX_WORD: SYNTAX_WORD} for word in TEXT_WORDS]
    words_of_text = shown_words(WORD)
    takes_text = words_of_text == {WORD}
    if shown_words(parts) == set(TEXT_WORDS):
        return ContentFormat.BOTH if takes_text else ContentFormat.PARTS
    if takes_text:
        return ContentFormat.TEXT
    if shown_words(parts[:1]) == {WORD}:
        return ContentFormat.ONE_PART
    return ContentFormat.REFUSED if words_of_text is None else ContentFormat.DROPPED


def _conversation_with(caps: TemplateCaps, role: str, content: Any) -> list[JsonObject]:
    """Shortest ordinary conversation in which a message of `role` has `content`."""
    user = _neutral_message(caps, "user")
    match role:
        case "system" | "developer":
            return [_message(role, content), user]
        case "assistant":
            return [user, _message(role, content), user]
        case "tool":
            return [user, _calling_message(caps), _tool_message(content)]
        case _:
            return [_message(role, content)]


def _calling_message(caps: TemplateCaps) -> JsonObject:
    is_object = caps.arguments is ArgumentsFormat.OBJECT
    function = {
        "name": "probe",
        "arguments": {"probe": VALUE} if is_object else VALUE_JSON,
    }
    call = {"id": CALL_ID, "type": "function", "function": function}
    is_null = caps.empty_content is EmptyContent.NULL
    content = None if is_null else fit_content("", caps.assistant)
    return _message("assistant", content, tool_calls=[call])


def _tool_message(content: Any) -> JsonObject:
    return _message("tool", content, tool_call_id=CALL_ID, name="probe")


def _with_call_format(render: Render, caps: TemplateCaps) -> TemplateCaps:
    """Find the form in which arguments reach the prompt as JSON or value by value; an object if several do."""
    user = _neutral_message(caps, "user")
    tool = _tool_message(fit_content(NEUTRAL_TEXT, caps.user))
    for arguments in ArgumentsFormat:
        for empty_content in EmptyContent:
            tried = replace(caps, arguments=arguments, empty_content=empty_content)
            calling = _calling_message(tried)
            for conversation in ([user, calling, tool], [user, calling]):
                text = render(conversation)
                if text is not None and any(form in text for form in VALUE_FORMS):
                    return tried
    return caps


def _is_inline_system_rendered(render: Render, caps: TemplateCaps) -> bool:
    """System messages behind the first message reach the prompt. True where none does: merging would not help."""
    if not caps.system.is_rendered:
        return True
    inline = _message("system", fit_content(WORD, caps.system))
    others = [_neutral_message(caps, role) for role in ("system", "user", "assistant")]
    text = render([*others, inline, _neutral_message(caps, "user")])
    return text is not None and WORD in text
