"""Allowed tokens of the rows of a step, as packed bits and as ids.

`fill_rows` asks the constraints' matchers; `masks[i]` has bit t % 32 of word t // 32 set where
token t may come next in row i. llguidance fills a mask in 4 to 100 us, without the GIL.

Copies of one matcher share a lexer, which is locked while a mask is filled: threads would wait for
each other there. So the calling thread fills the masks of rows that share one, and several threads
fill those of several lexers where that takes longer than handing over (`PARALLEL_SECS`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par
from numpy.typing import NDArray

from baton.runtime.grammar.token_constraint import TokenConstraint
from baton.sched.metrics.histogram import Histogram, exponential

PackedMasks = NDArray[np.int32]
"""[rows, words], 32 tokens to a word, lowest bit first."""
ConstrainedRow: TypeAlias = tuple[int, TokenConstraint]
"""A row of the masks, and the constraint that fills it."""
WORD_BITS = 32
MASK_BUCKETS = exponential(0.00001, 4.0, 1.0)
ALL_BITS = 2**WORD_BITS - 1
PARALLEL_SECS = 0.001
"""Masks of a step that take less are filled by one thread: handing over takes 50 us, and much
longer on a machine whose cores are busy.
"""
NEWEST_WEIGHT = 0.2
"""Weight of the latest step in the running mean of the time per row."""


class LiveRow(NamedTuple):
    """A row whose mask a matcher fills."""

    lexer: int
    """Equal for rows that share a lexer."""
    matcher: LLMatcher
    row: int


class MaskFiller:
    """Fills masks for one tokenizer and one model."""

    def __init__(self, trie_size: int, vocab_size: int, threads: int) -> None:
        """
        Args:
            trie_size: ids of the trie, at least `vocab_size`.
            vocab_size: width of the model's logits.
            threads: for steps whose rows have several lexers.
        """
        self._trie_words = -(-trie_size // WORD_BITS)
        self._words = -(-vocab_size // WORD_BITS)
        excess = self._words * WORD_BITS - vocab_size
        self._last_word = np.array([0xFFFFFFFF >> excess], np.uint32).view(np.int32)[0]
        self.threads = threads
        self._executors: dict[int, LLExecutor] = {}
        """By their number of threads, a power of two."""
        self._row_seconds = 0.0
        """Running mean of a thread's time per row."""
        self.seconds = Histogram(MASK_BUCKETS)
        """Seconds per step."""

    def fill_masks(self, grammars: Sequence[TokenConstraint]) -> tuple[PackedMasks, list[bool]]:
        """The masks, and for each row False where nothing is allowed (its mask is 0 then)."""
        masks = np.empty((len(grammars), self._words), np.int32)
        failed = self.fill_rows(list(enumerate(grammars)), masks)
        return masks, [row not in failed for row in range(len(grammars))]

    def fill_rows(self, rows: Sequence[ConstrainedRow], masks: PackedMasks) -> set[int]:
        """Overwrite these rows of the masks; returns those where nothing is allowed, which are 0.

        Args:
            masks: int32 [n, words of the vocabulary], contiguous. Other rows stay as they are, but
                for bits beyond the vocabulary, which become 0.
        """
        if not rows:
            return set()
        started = time.monotonic()
        # The matchers write rows as wide as the trie, which may have more ids than the model has
        # logits.
        if self._trie_words == self._words:
            self._fill_live_rows(rows, masks)
        else:
            wide = np.empty((len(masks), self._trie_words), np.int32)
            self._fill_live_rows(rows, wide)
            for row, _ in rows:
                masks[row] = wide[row, : self._words]
        masks[:, -1] &= self._last_word
        has_tokens = masks.view(np.uint32).max(axis=1).astype(np.bool_).tolist()
        failed = set()
        for row, grammar in rows:
            if not grammar.finish_mask(masks[row], has_tokens=has_tokens[row]):
                masks[row] = 0
                failed.add(row)
        self.seconds.observe(time.monotonic() - started)
        return failed

    def _fill_live_rows(self, rows: Sequence[ConstrainedRow], masks: PackedMasks) -> None:
        live = []
        for row, grammar in rows:
            matcher = grammar.fillable_matcher
            if matcher is None:
                masks[row] = 0
            else:
                live.append(LiveRow(id(grammar.lexer), matcher, row))
        if not live:
            return
        lexers = len({row.lexer for row in live})
        threads = min(self.threads, lexers)
        if len(live) * self._row_seconds < PARALLEL_SECS:
            threads = 1
        started = time.monotonic()
        if threads > 1:
            threads = self._fill_in_parallel(live, masks, threads)
        else:
            self._fill_here(live, masks)
        seconds = (time.monotonic() - started) * threads / len(live)
        self._row_seconds += NEWEST_WEIGHT * (seconds - self._row_seconds)

    def _fill_here(self, live: Sequence[LiveRow], masks: PackedMasks) -> None:
        start = masks.ctypes.data
        row_bytes = masks.strides[0]
        for _, matcher, row in live:
            matcher.unsafe_compute_mask_ptr(start + row * row_bytes, row_bytes)

    def _fill_in_parallel(self, live: Sequence[LiveRow], masks: PackedMasks, threads: int) -> int:
        """Returns the number of threads used. The executor halves the list until each of them has a
        part: rows of one lexer stay together.
        """
        size = 1 << threads.bit_length() - 1
        executor = self._executors.get(size)
        if executor is None:
            executor = LLExecutor(size)
            self._executors[size] = executor
        in_order = sorted(live, key=lambda row: row.lexer)
        fill_next_token_bitmask_par(executor, [(row.matcher, row.row) for row in in_order], masks)
        return size


def count_allowed(mask: NDArray[np.int32]) -> int:
    """Number of tokens that one row's mask allows."""
    return int.from_bytes(mask.tobytes(), "little").bit_count()


def allowed_ids(mask: NDArray[np.int32]) -> NDArray[np.int64]:
    """Ids that one row's mask allows, ascending. Cost: 30 us for a few of 152 k ids."""
    used_words = np.flatnonzero(mask)
    bits = np.flatnonzero(np.unpackbits(mask[used_words].view(np.uint8), bitorder="little"))
    return used_words[bits // WORD_BITS] * WORD_BITS + bits % WORD_BITS


def is_allowed(mask: NDArray[np.int32], token: int) -> bool:
    """True if one row's mask allows this token of the vocabulary."""
    return bool(int(mask[token // WORD_BITS]) >> (token % WORD_BITS) & 1)


def forbid_tokens(mask: NDArray[np.int32], tokens: Iterable[int]) -> None:
    """Clear the bits of these tokens in one row's mask. Ids beyond the mask are in none."""
    words = mask.view(np.uint32)
    for token in tokens:
        if token < len(words) * WORD_BITS:
            words[token // WORD_BITS] &= ALL_BITS ^ (1 << token % WORD_BITS)


def keep_tokens(mask: NDArray[np.int32], allowed: NDArray[np.uint8]) -> None:
    """Clear the bits that `allowed` (as `SamplingParams.allowed_tokens`) has not set."""
    packed = mask.view(np.uint8)
    packed[: len(allowed)] &= allowed[: len(packed)]
    packed[len(allowed) :] = 0
