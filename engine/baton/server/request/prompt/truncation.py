"""Prompts that are cut to a number of tokens: `truncate_prompt_tokens` and `truncation_side`
(vLLM).

Which tokens stay is decided by the text layer (engine/text/src/prompt/cut.rs), by which the router
cuts the same prompts. A prompt that comes as token ids is cut too; cutting twice changes nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from baton.server.fields import bad
from baton.server.request.schema import RequestFields
from baton.server.text.native import native_extension

TruncationSide = Literal["left", "right"]
"""The end of a prompt at which tokens are dropped."""
FIELD = "truncate_prompt_tokens"


@dataclass(frozen=True, slots=True)
class PromptCut:
    """Longest prompt, and the end at which longer ones lose tokens."""

    tokens: int
    side: TruncationSide

    def cut(self, ids: Sequence[int]) -> array[int]:
        start, end = native_extension().kept_tokens(len(ids), self.tokens, self.side)
        return array("i", ids[start:end])


def read_cut(request: RequestFields, context_length: int, answer_tokens: int) -> PromptCut | None:
    """How the prompts of a request are cut; None: they are not. Raises BadRequest.

    Args:
        answer_tokens: for which -1 leaves room.
    """
    tokens = request.truncate_prompt_tokens
    if tokens is None:
        return None
    if tokens == 0:
        raise bad(FIELD, "is 0; give at least 1, or -1 for all that the context has room for")
    if tokens == -1:
        tokens = context_length - answer_tokens
        if tokens < 1:
            raise bad(
                FIELD,
                f"is -1, but the context has {context_length} tokens and the answer may have "
                f"{answer_tokens}: "
                "no room is left for a prompt; lower max_tokens",
            )
    return PromptCut(tokens, request.truncation_side or "left")
