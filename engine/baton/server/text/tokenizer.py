"""Text to token ids and back, with a checkpoint's tokenizer or the one of simulated engines.

The work is done by `engine/text` (module `tokenizer`), without the GIL. Encoding a long prompt
takes milliseconds to seconds, so texts above INLINE_CHARS go to a small thread pool; short ones are
encoded on the event loop, which is cheaper than the hop.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from baton.errors import QueueFull
from baton.server.text.native import call_or_refuse, load_or_refuse, native_extension

INLINE_CHARS = 4096
"""About 1 ms of encoding on one core: below it a thread hop costs more than it hides."""
WORKERS = 2
MAX_WAITING = 256
"""Requests that wait for a thread, at most (the router's limit too)."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """Longest prompt."""

    context_length: int = sys.maxsize
    """Longer texts are refused before they are tokenized, whatever their tokens [tokens]."""
    is_bounded: bool = True
    """More tokens than that are refused too."""

    @property
    def native_arguments(self) -> dict[str, Any]:
        return {"context_length": self.context_length, "is_bounded": self.is_bounded}


NO_LIMIT = ContextLimit()


class Tokenizer:
    """A loaded vocabulary with the tokens that the files beside it add. Thread-safe for encode and
    decode.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError for a folder without a tokenizer that can be read."""
        files = load_or_refuse(native_extension().TokenizerFiles, folder)
        self._start(load_or_refuse(files.load_tokenizer), files.added_tokens)

    @classmethod
    def four_byte(cls) -> Tokenizer:
        """The tokenizer of simulated engines: four bytes of text are one token."""
        tokenizer = cls.__new__(cls)
        tokenizer._start(native_extension().Tokenizer.four_byte())
        return tokenizer

    def _start(self, native: Any, file_added: Sequence[tuple[str, str]] = ()) -> None:
        self.native = native
        """As other calls of the native extension take it."""
        self.vocab_size: int = native.vocab_size
        """All ids are below it. There may be fewer tokens: ids may be left out between them."""
        self.max_chars_per_token: int = native.max_chars_per_token
        """A text has at least as many tokens as this goes into its length. Not where a tokenizer
        drops text: an unknown word, or spaces beside an added token with lstrip or rstrip.
        """
        self.token_bytes: Callable[[int], bytes] = native.token_bytes
        """The exact bytes the token stands for (it may be part of a character); none for ids
        without a token.
        """
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="tokenize")
        self._offloaded = 0
        self._file_added = file_added
        """Content and flags of the tokens that the files beside the vocabulary add."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = self.encode_prompt(text, add_special_tokens, NO_LIMIT, param="text")
        return ids.tolist()

    def encode_prompt(
        self, text: str, add_special_tokens: bool, limit: ContextLimit, *, param: str
    ) -> array[int]:
        """Raises PromptTooLong, which names `param`, by the limit."""
        ids = call_or_refuse(
            self.native.encode,
            text,
            param=param,
            add_special_tokens=add_special_tokens,
            **limit.native_arguments,
        )
        return array("i", ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """For a few ids: the event loop stands still meanwhile."""
        text: str = self.native.decode(ids, skip_special_tokens)
        return text

    def decode_batch(
        self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> list[str]:
        texts: list[str] = self.native.decode_batch(rows, skip_special_tokens)
        return texts

    def tokens_from(self, first_id: int) -> dict[int, str]:
        """The tokens whose id is `first_id` or larger, by id."""
        tokens: dict[int, str] = self.native.tokens_from(first_id)
        return tokens

    def names_of(self, ids: Sequence[int]) -> list[str | None]:
        """Names of tokens in the vocabulary, as transformers' convert_ids_to_tokens gives them."""
        names: list[str | None] = self.native.names_of(ids)
        return names

    def added_tokens(self) -> list[tuple[int, str, bool]]:
        """Tokens that the files beside the vocabulary add: id, content, and True for special
        ones.
        """
        ids = ((self.id_of(text), text, flags.endswith("1")) for text, flags in self._file_added)
        return [
            (token_id, text, special) for token_id, text, special in ids if token_id is not None
        ]

    def id_of(self, token: str) -> int | None:
        token_id: int | None = self.native.id_of(token)
        return token_id

    async def offload(self, size: int, work: Callable[[], T]) -> T:
        """Run `work` here when it concerns few characters, else on the pool. Raises QueueFull."""
        if size <= INLINE_CHARS:
            return work()
        if self._offloaded >= WORKERS + MAX_WAITING:
            raise QueueFull(
                f"{MAX_WAITING} long prompts wait to be tokenized; try again later",
                retry_after_secs=1,
            )
        self._offloaded += 1
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        future.add_done_callback(self._on_offload_done)
        return await future

    def _on_offload_done(self, _: object) -> None:
        self._offloaded -= 1

    def token_text(self, token_id: int) -> str:
        """Return a token as text for logprobs; bytes that are no UTF-8 alone become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
