"""Chat templates of the engine, called with Python objects."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.server.text.chat_template import ChatTemplate, RenderOptions


def render(
    template: ChatTemplate,
    messages: Any,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    kwargs: dict[str, Any] | None = None,
) -> str:
    options = RenderOptions(add_generation_prompt, continue_final_message, kwargs or {})
    return template.render_messages(msgspec.json.encode(messages), options)


def normalize(template: ChatTemplate, messages: Any) -> Any:
    """Messages in the form that the template takes."""
    return msgspec.json.decode(template.normalize_messages(msgspec.json.encode(messages)))
