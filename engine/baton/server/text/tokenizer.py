"""Text to token ids and back, with the `tokenizers` wheel and a tokenizer.json.

Encoding a long prompt takes milliseconds to seconds, so texts above INLINE_CHARS go to a small thread pool; short ones
are encoded on the event loop, which is cheaper than the hop. Of the wheel only the batch calls are used: they release
the GIL, while `encode` and `decode` hold it (0.23: one prompt of 1 MB stops all threads for 2 s) and are not faster.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from tokenizers import AddedToken as HFAddedToken
from tokenizers import Tokenizer as HFTokenizer

from baton.errors import ConfigError, QueueFull
from baton.server.text.added_tokens import (
    AddedTokenPlan,
    plan_added_tokens,
    read_tokenizer_files,
)

INLINE_CHARS = 4096
"""About 1 ms of encoding on one core: below it a thread hop costs more than it hides."""
WORKERS = 2
MAX_WAITING = 256
"""Requests that wait for a thread, at most (the router's limit too)."""
NORMALIZER_SHRINKS = 4
"""Characters that a normalizer makes one of, at most: NFC composes up to four."""
os.environ.setdefault(
    "TOKENIZERS_PARALLELISM", "false"
)  # a batch is encoded by the thread that asks

T = TypeVar("T")


class TooManyTokens(Exception):
    """A text has `count` tokens, more than were to be returned."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} tokens")
        self.count = count


def _byte_level_map() -> dict[str, int]:
    """Printable stand-in → byte, the inverse of byte-level BPE's alphabet (Radford et al. 2019, GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


_BYTE_OF = _byte_level_map()


class Tokenizer:
    """A loaded tokenizer.json with the tokens that the files beside it add. Thread-safe for encode and decode."""

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"{path} has no tokenizer.json; convert the tokenizer with transformers or use --tokenizer-path"
            )
        try:
            self._hf = HFTokenizer.from_file(str(file))
        except Exception as err:  # the wheel raises bare Exception for every parse error
            raise ConfigError(f"{file} cannot be read: {err}") from err
        self._apply_added_tokens(plan_added_tokens(read_tokenizer_files(path)))
        # A checkpoint may come with truncation or padding switched on; a server must see the whole prompt and only it.
        self._hf.no_truncation()
        self._hf.no_padding()
        self._start_pool()
        self._byte_level = (
            "ByteLevel" in str(self._hf.decoder.__getstate__()) if self._hf.decoder else False
        )
        self._added = dict(self._hf.get_added_tokens_decoder())
        vocabulary = self._hf.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        """All ids are below it. There may be fewer tokens: ids may be left out between them."""
        longest = max(map(len, vocabulary), default=1)
        self.max_chars_per_token: int = longest * (NORMALIZER_SHRINKS if self._hf.normalizer else 1)
        """A text has at least as many tokens as this goes into its length. Not where a tokenizer drops text: an
        unknown word, or spaces beside an added token with lstrip or rstrip."""
        self.token_bytes: Callable[[int], bytes] = lru_cache(maxsize=16384)(self._token_bytes)

    def _apply_added_tokens(self, plan: AddedTokenPlan) -> None:
        self._hf.add_tokens(
            [HFAddedToken(token.content, **token.named_flags) for token in plan.tokens]
        )
        self._hf.encode_special_tokens = plan.split_special_tokens

    def _start_pool(self) -> None:
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="tokenize")
        self._offloaded = 0

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Raises TooManyTokens before the ids become Python objects, during which all threads wait."""
        (found,) = self._hf.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if max_tokens is not None and len(found) > max_tokens:
            raise TooManyTokens(len(found))
        return list(found.ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """For a few ids: the event loop stands still meanwhile."""
        return str(self._hf.decode(ids, skip_special_tokens=skip_special_tokens))

    def decode_batch(
        self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> list[str]:
        return list(self._hf.decode_batch(rows, skip_special_tokens=skip_special_tokens))

    def tokens_from(self, first_id: int) -> dict[int, str]:
        """The tokens whose id is `first_id` or larger, by id."""
        if self.vocab_size <= first_id:
            return {}
        vocabulary = self._hf.get_vocab(with_added_tokens=True)
        return {token_id: text for text, token_id in vocabulary.items() if token_id >= first_id}

    def id_of(self, token: str) -> int | None:
        found = self._hf.token_to_id(token)
        return None if found is None else int(found)

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

    def _token_bytes(self, token_id: int) -> bytes:
        """The exact bytes the token stands for (a byte-level or byte-fallback token may be part of a character)."""
        token = self._hf.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return str(self._added[token_id].content).encode()
        if self._byte_level and all(c in _BYTE_OF for c in token):
            return bytes(_BYTE_OF[c] for c in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return str(token).replace("\u2581", " ").encode()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
