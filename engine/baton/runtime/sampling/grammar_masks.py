"""Restriction of logits to the tokens that grammars allow.

Host: where few tokens are allowed their logits alone are gathered and drawn from, because writing a
mask into 152 k logits takes longer (0.7 ms) than finding it. Elsewhere, and on a device, forbidden
logits become -inf in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.runtime.grammar.sequence_grammar import GrammarState, SequenceGrammar
from baton.runtime.grammar.token_masks import MaskFiller, allowed_ids, count_allowed
from baton.runtime.sampling.sampler import Put
from baton.sched.types.plan import GRAMMAR_FAILED_TOKEN

FEW_TOKENS = 4096
"""So many logits are gathered in less time than a mask is applied to all."""
ROWS_AT_ONCE = 32
"""Bounds the unpacked masks on a device to 32 bytes per token of the vocabulary."""

AllowedTokens: TypeAlias = tuple[int, NDArray[np.int64]]
"""A row of the logits, and the ids that may be chosen in it, ascending."""


class GrammarMasks:
    """Masks of the constrained rows of a step."""

    def __init__(self, grammars: Sequence[tuple[int, SequenceGrammar]], filler: MaskFiller) -> None:
        """`grammars`: with their row of the logits; each stands behind all tokens of its sequence."""
        self._grammars = grammars
        self._masks, usable = filler.fill_masks([grammar for _, grammar in grammars])
        self._failed = [not is_usable for is_usable in usable]

    def split_by_size(self) -> tuple[list[AllowedTokens], list[int]]:
        """Rows with few allowed tokens, and indices into the masks of the others."""
        few: list[AllowedTokens] = []
        others: list[int] = []
        for index, (row, _) in enumerate(self._grammars):
            if self._failed[index]:
                continue
            mask = self._masks[index]
            if count_allowed(mask) <= FEW_TOKENS:
                few.append((row, allowed_ids(mask)))
            else:
                others.append(index)
        return few, others

    def apply(self, logits: Tensor, put: Put, indices: Sequence[int] | None = None) -> None:
        """Set forbidden logits to -inf, in place. Waits for nothing that `put` does not wait for.

        Args:
            logits: float32 [S, vocab].
            indices: of the masks that are applied; None: all.
        """
        chosen = np.arange(len(self._grammars)) if indices is None else np.array(indices, np.int64)
        rows = np.array([row for row, _ in self._grammars], np.int64)[chosen]
        packed = self._masks.view(np.uint8)
        for start in range(0, len(chosen), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            apply_packed_masks(logits, put(rows[part]), put(packed[chosen[part]]))

    def advance(self, tokens: list[int]) -> frozenset[int]:
        """Let the grammars take over the step's tokens; returns the rows whose answer is complete.

        A row whose grammar cannot be followed further gets GRAMMAR_FAILED_TOKEN. Rows without a
        token (INVALID_TOKEN) end anyway.
        """
        completed = []
        for (row, grammar), has_failed in zip(self._grammars, self._failed, strict=True):
            if has_failed:
                tokens[row] = GRAMMAR_FAILED_TOKEN
                continue
            if tokens[row] < 0:
                continue
            state = grammar.advance(tokens[row])
            if state is GrammarState.FAILED:
                tokens[row] = GRAMMAR_FAILED_TOKEN
            elif state is GrammarState.COMPLETE:
                completed.append(row)
        return frozenset(completed)


def apply_packed_masks(logits: Tensor, rows: Tensor, packed: Tensor) -> None:
    """Set the logits of tokens whose bit is 0 to -inf, in place.

    Args:
        logits: float32 [S, vocab].
        rows: int64 [n], no duplicates, on the device of logits.
        packed: uint8 [n, at least vocab / 8], lowest bit first, on the device of logits.
    """
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = (packed[:, :, None] >> bits) & 1
    forbidden = allowed.flatten(1)[:, : logits.shape[1]] == 0
    logits.index_copy_(0, rows, logits[rows].masked_fill_(forbidden, -torch.inf))
