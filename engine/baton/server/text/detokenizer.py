"""Tokens back to text while they arrive, and stop strings in that text.

An answer that continues its prompt (completions, /generate, a chat's continued message) is decoded with the end of the
prompt as left context, so that prompt + answer is the text of both. Any other answer of a chat is decoded alone, as
users of transformers do: templates end with the assistant's header, behind which no space belongs.

Life of one generation's text:
1. `Detokenizer.feed(ids)` returns the text that is now final: a character with incomplete bytes is held back;
2. `StopMatcher.feed(text)` returns what may be shown: a tail that could begin a stop string is held back;
3. at the end `flush()` of both releases what is left.

Invariants: the pieces joined equal one decode of all ids, cut at the first stop string; nothing that was returned is
ever taken back; the answer does not depend on how the ids were grouped into calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 8
"""Taken of a prompt's end as left context: decoders look back one token, more if it has no text."""
MAX_CONTEXT_TOKENS = 64
"""Longest left context, where the prompt's end has no text (special tokens)."""
MAX_HELD_TOKENS = 4
"""A character is at most four bytes, so at most four byte tokens; more held tokens are bytes that never become one."""
MAX_GARBAGE_TOKENS = 64
"""After so many the window is closed: endless garbage costs linear time, and its last character may be wrong."""


@dataclass(frozen=True, slots=True)
class TextRules:
    """How tokens become the text a client sees."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    continues_prompt: bool = False
    """The answer's text continues the prompt's."""


class Detokenizer:
    """Incremental decoding with a window over the ids.

    The window [start:] begins with tokens whose text is already out and serves as left context (decoders treat the
    first token of a sequence specially: SentencePiece drops its space). `read` ids have been decoded to final text,
    the window's first `shown` characters are out:

        ids    ... | context      | held    |
                   start          read      len(ids)
    """

    __slots__ = ("_decode", "_ids", "_read", "_shown", "_start")

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()) -> None:
        """`prompt`: ids that the text continues."""
        self._decode = decode
        self._ids, text = left_context(decode, prompt)
        self._start = 0
        self._read = len(self._ids)
        self._shown = len(text)

    def feed(self, ids: Sequence[int]) -> str:
        """Text that became final with these ids."""
        self._ids.extend(ids)
        piece = ""
        # Find the last place where a character ends: at the end, or up to three byte tokens before it.
        for end in range(len(self._ids), max(self._read, len(self._ids) - MAX_HELD_TOKENS), -1):
            text = self._decode(self._ids[self._start : end])
            if not text.endswith(REPLACEMENT) or len(self._ids) - self._read > MAX_GARBAGE_TOKENS:
                piece = text[self._shown :]
                self._advance(end, len(text))
                break
        return piece if self._read == len(self._ids) else piece + self._before_tail()

    def _before_tail(self) -> str:
        """The held tokens' text up to the run of U+FFFD at its end.

        If the run is too long to be one character, only its last one can still change.
        """
        text = self._decode(self._ids[self._start :])
        final = len(text.rstrip(REPLACEMENT))
        if len(self._ids) - self._read > MAX_HELD_TOKENS:
            final = len(text) - 1
        piece = text[self._shown : final]
        self._shown = max(self._shown, final)
        return piece

    def flush(self) -> str:
        """The rest, including bytes that never became a character."""
        piece = self._decode(self._ids[self._start :])[self._shown :]
        self._shown += len(piece)
        return piece

    def _advance(self, end: int, shown: int) -> None:
        context = self._decode(self._ids[self._read : end])
        if context:
            self._start, self._shown = self._read, len(context)
        else:  # invisible tokens are no context: the next one would be decoded as if it began the text
            self._shown = shown
        self._read = end
        # Keep the list short: one generation may run for 100k tokens.
        if self._start > 256:
            del self._ids[: self._start]
            self._read -= self._start
            self._start = 0


def left_context(
    decode: Callable[[Sequence[int]], str], prompt: Sequence[int]
) -> tuple[list[int], str]:
    """The shortest end of `prompt` that has text, in steps of CONTEXT_TOKENS, and that text.

    An end that is half a character is no context: its other half belongs to the answer.
    """
    ids: list[int] = []
    text = ""
    for count in range(CONTEXT_TOKENS, MAX_CONTEXT_TOKENS + 1, CONTEXT_TOKENS):
        ids = list(prompt[-count:])
        text = decode(ids) if ids else ""
        if text or count >= len(prompt):
            break
    if text.endswith(REPLACEMENT):
        return [], ""
    return ids, text


class StopMatcher:
    """Finds the first stop string in a growing text; of several, the one that is complete first."""

    __slots__ = ("_include", "_stops", "_tail", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._tail = ""
        self.matched: str | None = None

    def feed(self, text: str, *, search: bool = True) -> str:
        """Take text in and return what may be shown now. After a match `matched` is set and nothing more comes out.

        `search=False` (fewer than min_tokens so far) lets the text through unexamined.
        """
        if self.matched is not None:
            return ""
        buffer = self._tail + text
        if not search:
            self._tail = ""
            return buffer
        if (found := self._first_match(buffer)) is not None:
            _, begin, stop = found
            self.matched = stop
            self._tail = ""
            return buffer[: begin + len(stop)] if self._include else buffer[:begin]
        held = self._held(buffer)
        self._tail = buffer[len(buffer) - held :]
        return buffer[: len(buffer) - held]

    def flush(self) -> str:
        tail = self._tail
        self._tail = ""
        return tail

    def _first_match(self, buffer: str) -> tuple[int, int, str] | None:
        """End, begin and stop string. Earliest end wins, then the longest: what a reader of characters meets first."""
        hits = [(at + len(s), at, s) for s in self._stops if (at := buffer.find(s)) >= 0]
        return min(hits, default=None)

    def _held(self, buffer: str) -> int:
        """Length of the longest tail of `buffer` that is a proper beginning of a stop string."""
        best = 0
        for stop in self._stops:
            for n in range(min(len(stop) - 1, len(buffer)), best, -1):
                if buffer.endswith(stop[:n]):
                    best = n
                    break
        return best
