"""Tokens that stand for a whole marker, such as <tool_call>, in the literals of a grammar.

The vocabulary has them as one token, and text in a grammar never allows that token: neither special
ones, nor added ones that look like a tag. A literal is divided at them, and they are named by id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from baton.server.text.model_info import ModelFacts
from baton.server.text.native import load_or_refuse, native_extension
from baton.server.text.tokenizer import Tokenizer
from baton.server.text.tool_formats import tool_formats

LITERAL_SIGNS = re.compile(r"""["\\\s]+""")
"""Signs between and within the literals of a grammar."""


class MarkerTokens:
    """Added tokens that stand for a whole marker, and literals divided at them."""

    def __init__(self, load: Callable[[], dict[str, int]]) -> None:
        """`load`: ids of the marker tokens by text; called when the first literal is divided, in a
        thread.
        """
        self._load = load
        self._ids: dict[str, int] | None = None
        self._pattern: re.Pattern[str] | None = None

    @property
    def ids(self) -> dict[str, int]:
        """Ids of the marker tokens by text."""
        if self._ids is None:
            self._ids = self._load()
        return self._ids

    def split(self, text: str) -> list[str | int]:
        """Texts and ids of marker tokens, in order."""
        ids = self.ids
        if self._pattern is None and ids:
            longest_first = sorted(ids, key=len, reverse=True)
            self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        if self._pattern is None:
            return [text] if text else []
        parts: list[str | int] = []
        position = 0
        for found in self._pattern.finditer(text):
            if found.start() > position:
                parts.append(text[position : found.start()])
            parts.append(ids[found[0]])
            position = found.end()
        if position < len(text):
            parts.append(text[position:])
        return parts

    def stand_in(self, text: str) -> bool:
        """True if the literals of a grammar may write a marker, also in several pieces."""
        plain = LITERAL_SIGNS.sub("", text)
        chars = set(plain)
        return any(
            LITERAL_SIGNS.sub("", spelling) in plain
            for marker in self.ids
            if marker[:1] in chars
            for spelling in (marker, json.dumps(marker))
        )

    def text_of(self, token_id: int) -> str:
        """Text of a marker token that `split` has returned."""
        return next(text for text, known in self.ids.items() if known == token_id)


def marker_tokens(facts: ModelFacts, tokenizer: Tokenizer) -> MarkerTokens:
    """Marker tokens of a model's directory."""

    def load_ids() -> dict[str, int]:
        files = load_or_refuse(native_extension().TokenizerFiles, facts.tokenizer_path)
        tokens = load_or_refuse(files.own_tokens)
        return {
            text: token_id
            for token_id, text, is_special in (*tokens, *tokenizer.added_tokens())
            if token_id < facts.vocab_size and is_marker(text, is_special=is_special)
        }

    return MarkerTokens(load_ids)


def is_marker(text: str, *, is_special: bool) -> bool:
    """True for tokens that text in a grammar never allows, by llguidance's rule, and for the token
    in the tags of `deepseek_v32`, by which the text layer knows them whether it is special or not.
    """
    is_tag = text.startswith("<") and text.endswith(">")
    return is_special or is_tag or text in tool_formats()["deepseek_v32"].markers
