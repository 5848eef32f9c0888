"""A tokenizer for simulated engines: four bytes of text are one token, whose id they are.

It costs next to nothing, lengths are exact (prompts of the benchmarks come in words of four characters), and equal
prefixes of text are equal prefixes of tokens. Text beyond ASCII can be read, not decoded: the top bit of an id is lost.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence

from baton.config.simulated import TOKEN_BYTES
from baton.server.text.tokenizer import Tokenizer, TooManyTokens

MASK = 0x7FFFFFFF


class FourByteTokenizer(Tokenizer):
    def __init__(self) -> None:
        self._start_pool()
        self.max_chars_per_token = TOKEN_BYTES
        self.vocab_size = MASK + 1
        self.token_bytes: Callable[[int], bytes] = _bytes_of

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        data = text.encode("utf-8", "replace")
        ids = array("i", data + b"\0" * (-len(data) % TOKEN_BYTES))
        if max_tokens is not None and len(ids) > max_tokens:
            raise TooManyTokens(len(ids))
        return ids.tolist() if text.isascii() else [i & MASK for i in ids]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(map(_bytes_of, ids)).decode("utf-8", "replace")

    def decode_batch(
        self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> list[str]:
        return [self.decode(ids) for ids in rows]

    def tokens_from(self, first_id: int) -> dict[int, str]:
        """None: every id is four bytes of text."""
        return {}

    def id_of(self, token: str) -> int | None:
        ids = self.encode(token)
        return ids[0] if len(ids) == 1 else None


def _bytes_of(token_id: int) -> bytes:
    return token_id.to_bytes(TOKEN_BYTES, sys.byteorder).rstrip(b"\0")
