"""`prediction`: the answer that a client expects, as in OpenAI's predicted outputs.

A hint: a rank that drafts tokens takes them from it too, any other rank does nothing with it. The
answer is the same with and without.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from baton.server.fields import bad
from baton.server.request.limits import PromptLimits
from baton.server.request.schema import PredictionFields
from baton.server.request.token_ids import ModelVocabulary
from baton.server.text.tokenizer import NO_LIMIT, Tokenizer


@dataclass(frozen=True, slots=True)
class PredictionReader:
    """Reads predictions by the model's tokenizer; long ones in a thread."""

    tokenizer: Tokenizer
    vocabulary: ModelVocabulary
    limits: PromptLimits
    is_drafted: bool
    """This node may draft tokens. False: the form of a prediction is checked, and no more."""

    async def read(self, given: PredictionFields | None) -> array[int] | None:
        """Token ids of the prediction, without special tokens at its ends; None: there is none, or
        no use for it. What no answer has is left out: tokens beyond the context, and those that the
        model lacks.

        Raises BadRequest.
        """
        if given is None:
            return None
        if given.type != "content":
            raise bad("prediction.type", "must be content")
        text = _text_of(given.content)
        if not self.is_drafted:
            return None
        kept = text[: self.limits.max_prompt_chars]
        ids = await self.tokenizer.offload(
            len(kept),
            lambda: self.tokenizer.encode_prompt(kept, False, NO_LIMIT, param="prediction"),
        )
        if self.vocabulary.missing:
            ids = array("i", (token_id for token_id in ids if token_id in self.vocabulary))
        return ids[: self.limits.context_length]


def _text_of(content: Any) -> str:
    """The text of a string, or of parts one behind the other."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(map(_is_text_part, content)):
        raise bad(
            "prediction.content",
            'must be a string or an array of parts {"type": "text", "text": ...}',
        )
    return "".join(part["text"] for part in content)


def _is_text_part(part: Any) -> bool:
    is_text = isinstance(part, dict) and part.get("type") == "text"
    return is_text and isinstance(part.get("text"), str)
