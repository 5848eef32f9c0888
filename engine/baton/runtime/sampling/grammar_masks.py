"""Restriction of logits to the tokens that grammars and requests allow.

A row's mask holds the tokens that its grammar allows and that the request lists (`allowed_tokens`),
without those that are banned for now (`SampleRow.banned_tokens`).

Host: a greedy row needs no mask if its largest logit is of an allowed token. Where few tokens are
allowed their logits alone are gathered and drawn from. Elsewhere, and on a device, forbidden logits
become -inf in place, on a GPU by a kernel (`layers.kernels.masks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.layers import kernels
from baton.runtime.grammar.token_constraint import GrammarState, TokenConstraint
from baton.runtime.grammar.token_masks import (
    WORD_BITS,
    MaskFiller,
    PackedMasks,
    allowed_ids,
    count_allowed,
    forbid_tokens,
    is_allowed,
    keep_tokens,
)
from baton.runtime.sampling.sampler import Put, SampleRow
from baton.sched.types.plan import GRAMMAR_FAILED_TOKEN

FEW_TOKENS = 4096
"""So many logits are gathered in less time than a mask is applied to all."""
ROWS_AT_ONCE = 32
"""Bounds the unpacked masks on a device to 32 bytes per token of the vocabulary."""

AllowedTokens: TypeAlias = tuple[int, NDArray[np.int64]]
"""A row of the logits, and the ids that may be chosen in it, ascending."""


class HostChoices(NamedTuple):
    """How the rows of a step on the host are restricted."""

    few: list[AllowedTokens]
    """Rows with few allowed tokens."""
    masked: list[int]
    """Greedy rows whose forbidden logits have been set to -inf, as those of other rows have
    been.
    """


class GrammarMasks:
    """Masks of the restricted rows of a step."""

    def __init__(
        self, rows: Sequence[tuple[int, SampleRow]], vocab: int, filler: MaskFiller | None
    ) -> None:
        """
        Args:
            rows: those that are restricted, with their row of the logits. A grammar stands behind
                all tokens of its sequence.
            filler: needed where a row has a grammar.
        """
        self._grammars = [(i, row.grammar) for i, row in rows if row.grammar is not None]
        self._rows = [(i, row) for i, row in rows if row.is_masked]
        self._masks, self._failed = _fill_masks([row for _, row in self._rows], vocab, filler)

    @property
    def rows(self) -> list[int]:
        """Rows of the logits that have a mask."""
        return [row for row, _ in self._rows]

    @property
    def greedy_rows(self) -> list[int]:
        """Those of them whose token is the largest allowed logit."""
        return [row for row, sample_row in self._rows if sample_row.is_greedy]

    def restrict_on_host(self, logits: Tensor, largest: Sequence[int]) -> HostChoices:
        """Apply the masks that cannot be avoided, in place.

        Args:
            logits: float32 [S, vocab], on the host.
            largest: the token with the largest logit of each row; negative: none.
        """
        choices = HostChoices([], [])
        table = logits.numpy()
        for index, (row, sample_row) in enumerate(self._rows):
            # The row gets no token: its mask allows nothing, or its logits are not finite.
            if index in self._failed or largest[row] < 0:
                continue
            mask = self._masks[index]
            # No larger logit is allowed, so that the mask would change nothing.
            if sample_row.is_greedy and is_allowed(mask, largest[row]):
                continue
            if count_allowed(mask) <= FEW_TOKENS:
                choices.few.append((row, allowed_ids(mask)))
            else:
                apply_mask(table[row], mask)
                if sample_row.is_greedy:
                    choices.masked.append(row)
        return choices

    def apply(self, logits: Tensor, rows: Tensor, put: Put) -> None:
        """Set forbidden logits to -inf, in place. Waits for nothing that `put` does not wait for.

        Args:
            logits: float32 [S, vocab].
            rows: `rows`, int64 on the device of logits.
        """
        apply_packed_masks(logits, rows, put(self._masks))

    def bar_second_choices(self, logits: Tensor, first: Tensor, put: Put) -> None:
        """Set optional tokens that are not the model's first choice to -inf, in place. Waits for
        nothing that `put` does not wait for.

        Args:
            logits: float32 [S, vocab].
            first: int64 [S], the largest of each row without a mask, on the device of logits;
                negative: none.
        """
        optional = [
            (row, token) for row, grammar in self._grammars for token in grammar.optional_ids
        ]
        if not optional:
            return
        rows, ids = put(np.array(optional).T.copy())
        kept = torch.where(first[rows] == ids, logits[rows, ids], -torch.inf)
        logits.index_put_((rows, ids), kept)

    def advance(self, tokens: list[int]) -> frozenset[int]:
        """Let the grammars take over the step's tokens; returns the rows whose answer is complete.

        A row whose grammar cannot be followed further, or whose mask allows nothing, gets
        GRAMMAR_FAILED_TOKEN. Rows without a token (INVALID_TOKEN) end anyway.
        """
        for index in self._failed:
            row, _ = self._rows[index]
            tokens[row] = GRAMMAR_FAILED_TOKEN
        completed = []
        for row, grammar in self._grammars:
            # A row without a token ends with this step; its grammar would refuse the id.
            if tokens[row] < 0:
                continue
            state = grammar.advance(tokens[row])
            if state is GrammarState.FAILED:
                tokens[row] = GRAMMAR_FAILED_TOKEN
            elif state is GrammarState.COMPLETE:
                completed.append(row)
        return frozenset(completed)


def _fill_masks(
    rows: Sequence[SampleRow], vocab: int, filler: MaskFiller | None
) -> tuple[PackedMasks, set[int]]:
    """The masks, and those of the rows where nothing is allowed (their mask is 0 then)."""
    grammars = [
        (i, row.grammar)
        for i, row in enumerate(rows)
        if row.grammar is not None and row.grammar.has_mask
    ]
    masks = np.empty((len(rows), -(-vocab // WORD_BITS)), np.int32)
    if len(grammars) < len(rows):
        masks.fill(-1)
    failed: set[int] = set()
    if grammars:
        assert filler is not None, "rows with grammars come from an engine that has a filler"
        failed = filler.fill_rows(grammars, masks)
    for i, row in enumerate(rows):
        # The token of such a row is not used, and an empty mask would count as a failure.
        if i in failed or _is_complete(row.grammar):
            continue
        if not _narrow_mask(masks[i], row):
            failed.add(i)
    return masks, failed


def _is_complete(grammar: TokenConstraint | None) -> bool:
    """True for a step that was planned before the end of the answer was known."""
    return grammar is not None and grammar.state is GrammarState.COMPLETE


def _narrow_mask(mask: NDArray[np.int32], row: SampleRow) -> bool:
    """Leave in a mask that allows some tokens what the request allows; returns False if that is
    nothing.
    """
    has_bans = row.has_bans
    if not has_bans and not len(row.allowed_bytes):
        return True
    if len(row.allowed_bytes):
        keep_tokens(mask, row.allowed_bytes)
    if has_bans:
        forbid_tokens(mask, row.banned_tokens())
    return bool(mask.any())


def apply_mask(logits: NDArray[np.float32], mask: NDArray[np.int32]) -> None:
    """Set forbidden logits of one row [vocab] on the host to -inf, in place.

    Cost: 0.1 ms for 152 k, half of what torch takes for the same.
    """
    forbidden = np.unpackbits(~mask.view(np.uint8), count=len(logits), bitorder="little")
    np.copyto(logits, -np.inf, where=forbidden.view(np.bool_))


def apply_packed_masks(logits: Tensor, rows: Tensor, packed: Tensor) -> None:
    """Set the logits of tokens whose bit is 0 to -inf, in place.

    Args:
        logits: float32 [S, vocab], each row contiguous.
        rows: int64 [n], no duplicates, on the device of logits.
        packed: int32 [n, at least vocab / 32], lowest bit first, contiguous, on the device of
            logits.
    """
    if logits.is_cuda and kernels.usable:
        from baton.layers.kernels.masks import mask_rows  # imports Triton

        mask_rows(logits, rows, packed)
        return
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        allowed = (packed[part].view(torch.uint8)[:, :, None] >> bits) & 1
        forbidden = allowed.flatten(1)[:, : logits.shape[1]] == 0
        masked = logits[rows[part]].masked_fill_(forbidden, -torch.inf)
        logits.index_copy_(0, rows[part], masked)
