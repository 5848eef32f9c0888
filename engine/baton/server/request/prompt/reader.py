"""Prompts of requests as token ids: rendered, encoded, or checked where they come as ids."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.errors import BadRequest
from baton.server.fields import bad
from baton.server.request.limits import PromptLimits
from baton.server.request.schema import MAX_ITEMS, RequestFields
from baton.server.request.token_ids import (
    ModelVocabulary,
    refuse_other_tokenizer,
    rows_of_ids,
)
from baton.server.text.chat_template import ChatTemplate
from baton.server.text.tokenizer import ContextLimit, Tokenizer


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Reads prompts by the model's template and tokenizer; long ones in a thread."""

    tokenizer: Tokenizer
    template: ChatTemplate
    vocabulary: ModelVocabulary
    limits: PromptLimits
    tokenizer_fingerprint: str

    async def read_chat(self, chat: bytes, limit: ContextLimit) -> array[int]:
        """Token ids of the text that the chat template makes of `encode_chat_fields`."""
        return await self.tokenizer.offload(
            len(chat), lambda: self.template.encode_chat(self.tokenizer, chat, limit)
        )

    async def check_chat(self, chat: bytes) -> None:
        """Raise BadRequest for `encode_chat_fields` that cannot be rendered."""
        await self.tokenizer.offload(len(chat), lambda: self.template.check_chat(chat))

    async def encode_texts(
        self, texts: Sequence[str], special: bool, limit: ContextLimit, param: str
    ) -> list[array[int]]:
        """Token ids of texts. `special`: with special tokens."""
        self.limits.refuse_long_texts(texts, limit, param)
        encode = self.tokenizer.encode_prompt
        return await self.tokenizer.offload(
            sum(map(len, texts)),
            lambda: [encode(text, special, limit, param=param) for text in texts],
        )

    async def decode(self, rows: Sequence[Sequence[int]], skip_special: bool) -> list[str]:
        return await self.tokenizer.offload(
            sum(map(len, rows)),
            lambda: self.tokenizer.decode_batch(rows, skip_special_tokens=skip_special),
        )

    def read_forwarded_ids(
        self, request: RequestFields, count: int, param: str, *, many: bool
    ) -> list[list[int]] | None:
        """`input_ids` beside messages or texts: one list of ids, or one for each prompt where the
        body holds `many`.

        They are the same prompts, tokenized by a router with this engine's tokenizer and template
        (it states the fingerprint), and take the place of the texts. A prompt that is too long is
        reported as `param`, which the client sent. Raises FingerprintMismatch.
        """
        if request.input_ids is None:
            return None
        self.refuse_other_tokenizer(request)
        rows = rows_of_ids(request.input_ids, count, many=many)
        for ids in rows:
            self._check_ids(request, ids, "input_ids", sent=param)
            if not ids:
                raise bad("input_ids", "is empty; give at least one token")
        return rows

    def refuse_other_tokenizer(self, request: RequestFields) -> None:
        """Raise FingerprintMismatch for ids of another tokenizer."""
        refuse_other_tokenizer(request.tokenizer_fingerprint, self.tokenizer_fingerprint)

    async def read_prompts(
        self, request: RequestFields, raw: list[Any], param: str, special: bool
    ) -> Sequence[Sequence[int]]:
        """Token ids of each prompt; texts are encoded, ids are checked."""
        if len(raw) > MAX_ITEMS:
            raise BadRequest(
                f"{param} holds {len(raw)} prompts, at most {MAX_ITEMS} are accepted", param=param
            )
        if raw and isinstance(raw[0], str):
            if not all(isinstance(text, str) for text in raw):
                raise BadRequest(f"{param} must not mix texts and token ids", param=param)
            limit = self.limits.limit_before_cut(request)
            rows = await self.encode_texts(raw, special, limit, param)
            for ids in rows:
                self.vocabulary.check_encoded(ids, param)
            return rows
        for ids in raw:
            self._check_ids(request, ids, param)
        return raw

    def _check_ids(
        self, request: RequestFields, ids: Any, param: str, *, sent: str | None = None
    ) -> None:
        is_cut = request.truncate_prompt_tokens is not None
        # Before the ids are looked at one by one: an array may have millions.
        if type(ids) is list and not is_cut:
            self.limits.refuse_long_ids(len(ids), sent or param)
        self.vocabulary.check_ids(ids, param)
