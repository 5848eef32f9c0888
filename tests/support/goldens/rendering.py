"""Chat templates of the engine, called with Python objects."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.server.text.chat_template import ChatTemplate


def render(
    template: ChatTemplate,
    messages: Any,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    kwargs: dict[str, Any] | None = None,
) -> str:
    chat = {
        "messages": messages,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "chat_template_kwargs": kwargs,
    }
    return template.render_chat(msgspec.json.encode(chat))


def normalize(template: ChatTemplate, messages: Any) -> Any:
    """Messages in the form that the template takes."""
    chat = msgspec.json.encode({"messages": messages})
    return msgspec.json.decode(template.normalize_messages(chat))
