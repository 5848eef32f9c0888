"""Text to token ids and back, with the `tokenizers` wheel and a tokenizer.json.

Encoding a long prompt takes milliseconds to seconds, so texts above INLINE_CHARS go to a small thread pool (the wheel
releases the GIL); short ones are encoded on the event loop, which is cheaper than the hop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer as HFTokenizer

from baton.errors import ConfigError

INLINE_CHARS = 4096
"""About 1 ms of encoding on one core: below it a thread hop costs more than it hides."""
WORKERS = 2

T = TypeVar("T")


def _byte_level_map() -> dict[str, int]:
    """Printable stand-in → byte, the inverse of byte-level BPE's alphabet (Radford et al. 2019, GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


_BYTE_OF = _byte_level_map()


class Tokenizer:
    """A loaded tokenizer.json. Thread-safe for encode and decode."""

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
        # A checkpoint may come with truncation or padding switched on; a server must see the whole prompt and only it.
        self._hf.no_truncation()
        self._hf.no_padding()
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="tokenize")
        self._byte_level = "ByteLevel" in str(self._hf.decoder.__getstate__()) if self._hf.decoder else False
        self._added = dict(self._hf.get_added_tokens_decoder())
        self.vocab_size: int = self._hf.get_vocab_size(with_added_tokens=True)
        self.token_bytes: Callable[[int], bytes] = lru_cache(maxsize=16384)(self._token_bytes)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self._hf.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._hf.decode(ids, skip_special_tokens=skip_special_tokens))

    def id_of(self, token: str) -> int | None:
        found = self._hf.token_to_id(token)
        return None if found is None else int(found)

    async def offload(self, size: int, work: Callable[[], T]) -> T:
        """Run `work` here when it concerns few characters, else on the pool."""
        if size <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def token_text(self, token_id: int) -> str:
        """One token as text for logprobs; bytes that are no UTF-8 alone become U+FFFD."""
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
