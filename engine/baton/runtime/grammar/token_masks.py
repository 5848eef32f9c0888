"""Allowed tokens of the rows of a step, as packed bits and as ids.

`fill_masks` asks the constraints' matchers; `masks[i]` has bit t % 32 of word t // 32 set where token t may come
next in row i. llguidance fills a mask in 20 to 100 us, without the GIL; several rows are filled on
several threads.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from baton.runtime.grammar.token_constraint import TokenConstraint
from baton.sched.metrics.histogram import Histogram, exponential

PackedMasks = NDArray[np.int32]
"""[rows, words], 32 tokens to a word, lowest bit first."""
WORD_BITS = 32
MASK_BUCKETS = exponential(0.00001, 4.0, 1.0)
ALL_BITS = 2**WORD_BITS - 1


class MaskFiller:
    """Fills masks for one tokenizer and one model."""

    def __init__(self, trie_size: int, vocab_size: int, threads: int) -> None:
        """
        Args:
            trie_size: ids of the trie, at least `vocab_size`.
            vocab_size: width of the model's logits.
            threads: for steps with several constrained rows.
        """
        self._trie_words = -(-trie_size // WORD_BITS)
        self._words = -(-vocab_size // WORD_BITS)
        excess = self._words * WORD_BITS - vocab_size
        self._last_word = np.array([0xFFFFFFFF >> excess], np.uint32).view(np.int32)[0]
        self._executor = LLExecutor(threads) if threads > 1 else None
        self.seconds = Histogram(MASK_BUCKETS)
        """Seconds per step."""

    def fill_masks(self, grammars: Sequence[TokenConstraint]) -> tuple[PackedMasks, list[bool]]:
        """The masks, and for each row False where nothing is allowed (its mask is 0 then)."""
        if not grammars:
            return np.zeros((0, self._words), np.int32), []
        started = time.monotonic()
        masks = np.zeros((len(grammars), self._trie_words), np.int32)
        live: list[tuple[LLMatcher, int]] = [
            (matcher, i)
            for i, grammar in enumerate(grammars)
            if (matcher := grammar.fillable_matcher) is not None
        ]
        if len(live) > 1 and self._executor is not None:
            fill_next_token_bitmask_par(self._executor, live, masks)
        else:
            for matcher, i in live:
                fill_next_token_bitmask(matcher, masks, i)
        masks = np.ascontiguousarray(masks[:, : self._words])
        masks[:, -1] &= self._last_word
        usable = [grammar.finish_mask(mask) for grammar, mask in zip(grammars, masks, strict=True)]
        masks[np.logical_not(usable)] = 0
        self.seconds.observe(time.monotonic() - started)
        return masks, usable


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
