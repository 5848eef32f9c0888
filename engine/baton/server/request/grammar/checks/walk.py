"""Walks through a compiled grammar: places behind which no answer can go on, before a client's
answer meets them.

llguidance does not look for them: a grammar compiles where a name, an item or a rule behind a comma
has no text at all, and where one of the matcher's limits is reached in the course of an answer. A
walk draws bytes from those that are allowed, by a seed of its own, so that P and D find the same.
Structure is preferred to the inside of texts: dead ends stand behind the parts of JSON and the
literals of grammars.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from baton.runtime.grammar.limits import MATCHER_LIMITS

BYTE_VALUES = 256
WALKS = 4
WALK_BYTES = 160
"""With four walks, 2 to 4 ms for most schemas."""
LARGE_TEXT_CHARS = 32 * 2**10
LARGE_WALK_BYTES = 40
"""Steps of larger grammars take longer."""
STRUCTURE = b'{["]},:<>|'
STRUCTURE_CHANCE = 0.7
SHOWN_BYTES = 60
BITS = tuple(tuple(bit for bit in range(8) if value >> bit & 1) for value in range(256))
"""Bits that are set, by value of a byte."""


@dataclass(frozen=True, slots=True)
class DeadEnd:
    """A beginning of an answer with which it cannot become whole."""

    text: str
    """Last characters of the beginning."""
    is_limit: bool
    """A limit of the matcher is reached; else no character is allowed."""

    @property
    def reason(self) -> str:
        place = f"behind {self.text!r}" if self.text else "at its beginning"
        if self.is_limit:
            return f"needs more work {place} than the matcher's limits allow"
        if not self.text:
            return "has no answer: no text follows it"
        return f"allows nothing more {place}, where the answer is not complete"


@functools.cache
def byte_trie() -> LLTokenizer:
    """A tokenizer with one token per byte."""
    return LLTokenizer("byte")


def compile_text(text: str) -> LLMatcher:
    """The grammar's matcher, which `is_error` where llguidance refuses it."""
    limits = LLParserLimits(verbose_errors=False, **MATCHER_LIMITS)
    return LLMatcher(byte_trie(), text, log_level=0, limits=limits)


def find_dead_end(matcher: LLMatcher, text: str) -> DeadEnd | None:
    """A dead end that one of the walks meets. `matcher`: at the beginning of the grammar `text`."""
    longest = LARGE_WALK_BYTES if len(text) > LARGE_TEXT_CHARS else WALK_BYTES
    for seed in range(WALKS):
        found = _walk(matcher.deep_copy(), seed, longest)
        if found is not None:
            return found
    return None


def has_no_text(text: str) -> bool:
    """True for a grammar that compiles and allows no answer to begin."""
    matcher = compile_text(text)
    if matcher.is_error():
        return False
    matcher.compute_bitmask()
    return matcher.is_error() and _allows_nothing(matcher)


def _walk(matcher: LLMatcher, seed: int, longest: int) -> DeadEnd | None:
    rng = random.Random(seed)
    walked = bytearray()
    while len(walked) < longest:
        mask = matcher.compute_bitmask()[: BYTE_VALUES // 8]
        if matcher.is_error():
            return _dead_end(matcher, walked)
        if not any(mask):  # nothing but the end of the answer
            return None
        structure = [byte for byte in STRUCTURE if mask[byte >> 3] >> (byte & 7) & 1]
        if structure and not walked:  # objects, arrays and strings where a value may be any
            byte = structure[seed % len(structure)]
        elif structure and rng.random() < STRUCTURE_CHANCE:
            byte = rng.choice(structure)
        else:
            byte = rng.choice(list(_bytes_of(mask)))
        walked.append(byte)
        matcher.consume_token(byte)
        if matcher.is_error():
            return _dead_end(matcher, walked)
        if matcher.is_stopped():
            return None
    return None


def _bytes_of(mask: bytes) -> Iterator[int]:
    return (8 * i + bit for i, value in enumerate(mask) if value for bit in BITS[value])


def _dead_end(matcher: LLMatcher, walked: bytearray) -> DeadEnd:
    shown = bytes(walked[-SHOWN_BYTES:]).decode(errors="ignore")
    return DeadEnd(shown, not _allows_nothing(matcher))


def _allows_nothing(matcher: LLMatcher) -> bool:
    """True for an error of a matcher that has reached no limit."""
    return matcher.get_error().startswith("NoExtensionBias")
