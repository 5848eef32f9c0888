"""Sequences of tokens that an answer may not contain (`bad_words`), matches vLLM 0.33.

A word of one token is banned throughout. The last token of a longer word is banned where the answer
ends with the word's other tokens; tokens of the prompt count for nothing.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Sequence

BadWordTokens = tuple[int, ...]
"""At least one token."""


class BadWords:
    """Bad words of one sequence, and the end of its answer."""

    def __init__(self, words: Iterable[BadWordTokens]) -> None:
        self._always: list[int] = []
        self._last_tokens: dict[int, dict[BadWordTokens, list[int]]] = {}
        """By the number of tokens before the last one, and by these tokens."""
        for word in words:
            *prefix, last = word
            if prefix:
                with_length = self._last_tokens.setdefault(len(prefix), {})
                with_length.setdefault(tuple(prefix), []).append(last)
            else:
                self._always.append(last)
        self._recent = deque[int](maxlen=max(self._last_tokens, default=0))

    @property
    def need_tokens(self) -> bool:
        """True if the ban depends on the tokens drawn before."""
        return bool(self._last_tokens)

    def fork(self) -> BadWords:
        """A copy that goes on by itself."""
        copied = copy.copy(self)
        copied._recent = self._recent.copy()
        return copied

    def append(self, token: int) -> None:
        """Record the token that now ends the answer."""
        self._recent.append(token)

    def extend(self, tokens: Sequence[int]) -> None:
        self._recent.extend(tokens)

    def banned_tokens(self) -> list[int]:
        """Tokens that may not come next."""
        recent = tuple(self._recent)
        banned = self._always.copy()
        for length, last_tokens in self._last_tokens.items():
            if length <= len(recent):
                banned += last_tokens.get(recent[len(recent) - length :], ())
        return banned
