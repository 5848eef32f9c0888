"""Chat messages to the ids of a prompt, with the checkpoint's own Jinja template.

The work is done by `engine/text` (modules `prompt` and `template`), without the GIL: the members of
the body that decide the prompt cross as JSON (`encode_chat_fields`), one call per request.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from baton.server.fields import encode_exact
from baton.server.text.native import call_or_refuse, native_extension
from baton.server.text.tokenizer import ContextLimit, Tokenizer


def encode_chat_fields(body: Mapping[str, Any]) -> bytes:
    """JSON of the members of a chat body that decide its prompt: `ChatPrompt` of
    engine/text/src/prompt/chat.rs.
    """
    names = native_extension().CHAT_FIELDS
    return encode_exact({name: body[name] for name in names if name in body})


class ChatTemplate:
    """A compiled template. `source` None: the checkpoint has none, and every render is a clear
    400.
    """

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str],
        control_tokens: Sequence[str] = (),
    ) -> None:
        """`control_tokens`: those that the texts of users do not contain (`ModelFacts`)."""
        self._native = native_extension().ChatTemplate(
            source, dict(special_tokens), list(control_tokens)
        )
        self.caps: str = self._native.caps
        """Form in which the template takes messages: `name=value` of each capability."""
        defect: str | None = None if source is None else self._native.defect
        self.warning: str | None = defect or self._native.warning
        """Sentence for the log about a template that cannot be used; None: there is none, or it
        renders messages.
        """

    def normalize_messages(self, chat: bytes) -> bytes:
        """JSON of the messages in the form that the template takes. Raises BadRequest."""
        normalized: bytes = call_or_refuse(self._native.normalize, chat)
        return normalized

    def check_chat(self, chat: bytes) -> None:
        """Raise BadRequest for a chat that cannot be rendered, but for what the template itself
        refuses.
        """
        call_or_refuse(self._native.check, chat)

    def render_chat(self, chat: bytes) -> str:
        """Text of a chat's prompt. Raises BadRequest, with the template's own message if it refuses
        the messages.
        """
        text: str = call_or_refuse(self._native.render, chat)
        return text

    def encode_chat(self, tokenizer: Tokenizer, chat: bytes, limit: ContextLimit) -> array[int]:
        """Ids of a chat's prompt. Raises BadRequest, and PromptTooLong by the limit."""
        ids = call_or_refuse(self._native.encode, tokenizer.native, chat, **limit.native_arguments)
        return array("i", ids)
