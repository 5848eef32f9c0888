"""Chat messages to the ids of a prompt, with the checkpoint's own Jinja template.

The work is done by `engine/text` (module `template`), without the GIL: messages cross as JSON, one call per request.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton.server.text.native import call_or_refuse, native_extension
from baton.server.text.tokenizer import PromptRules, Tokenizer


@dataclass(frozen=True, slots=True)
class RenderOptions:
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    """`chat_template_kwargs` and the like."""

    @property
    def native_flags(self) -> dict[str, bool]:
        return {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }


class ChatTemplate:
    """A compiled template. `source` None: the checkpoint has none, and every render is a clear 400."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self._native = native_extension().ChatTemplate(source, dict(special_tokens))
        self.caps: str = self._native.caps
        """Form in which the template takes messages: `name=value` of each capability."""
        defect: str | None = None if source is None else self._native.defect
        self.warning: str | None = defect or self._native.warning
        """Sentence for the log about a template that cannot be used; None: there is none, or it renders messages."""

    def normalize_messages(self, messages: bytes) -> bytes:
        """JSON of a body's `messages`, checked, in the form that the template takes. Raises BadRequest."""
        normalized: bytes = call_or_refuse(self._native.normalize, messages)
        return normalized

    def render_messages(self, messages: bytes, options: RenderOptions) -> str:
        """Text of a body's `messages`, given as JSON. Raises BadRequest, with the template's own message if it refuses
        them."""
        variables = msgspec.json.encode(options.variables)
        text: str = call_or_refuse(self._native.render, messages, variables, **options.native_flags)
        return text

    def encode_messages(
        self, tokenizer: Tokenizer, messages: bytes, options: RenderOptions, rules: PromptRules
    ) -> array[int]:
        """Ids of the text of `messages`, given as JSON. Raises BadRequest, and PromptTooLong by the rules."""
        variables = msgspec.json.encode(options.variables)
        ids = call_or_refuse(
            self._native.encode,
            tokenizer.native,
            messages,
            variables,
            **options.native_flags,
            **rules.native_arguments,
        )
        return array("i", ids)
