"""Computes a head that drafts, beside the runner of the model that it drafts for.

1. `compute_model` computes a step of the model and returns its hidden states, too;
2. `extend` stores the entries of the step's tokens, and keeps the last state of each slot;
3. `draft` makes drafts one after the other, while no step is in flight.

The entry of position p is made of token p and of the model's state behind token p - 1. Its K and V
lie in the head's pool where those of token p lie in the model's: the head has pages of one token,
numbered as the model's slots. So what the tree shares is shared here, and an entry may be missing:
that of a sequence's first token here, whose state was computed by another sequence or node, if at
all. Attention leaves it out.

Entries of drafts lie in slots of their own behind these: they are not kept, because the model's
step stores those that were right, of the model's own states.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.layers import ops
from baton.layers.attention.base import AttentionBackend, ForwardBatch
from baton.models.decoder import Decoder
from baton.models.draft_head import DraftHead
from baton.runtime.runner.step_inputs import StepArrays, StepInputs
from baton.runtime.sampling.step_sampler import choose_greedy
from baton.runtime.speculation.head_drafter import DraftRow, DraftStep


class ScratchSlots(NamedTuple):
    """Slots of the head's pool for entries of drafts."""

    first: int
    per_row: int
    """Of each slot of the runner."""


class HeadRunner:
    """Not thread-safe: the runner's thread calls it."""

    def __init__(
        self,
        head: DraftHead,
        model: Decoder,
        attn: AttentionBackend,
        max_slots: int,
        scratch: ScratchSlots,
    ) -> None:
        assert head.spec.head is not None, "a head says which states it reads"
        self._places = head.spec.head.state_layers
        self._head = head
        self._model = model
        self._attn = attn
        self._scratch = scratch
        dtype = ops.TORCH_DTYPES[head.spec.dtype]
        self._states = torch.zeros(max_slots, head.spec.hidden_size, dtype=dtype)
        """Behind the last token but one of each slot's sequence: an entry of the last one is made
        of it."""

    def compute_model(self, batch: ForwardBatch, attn: AttentionBackend) -> tuple[Tensor, Tensor]:
        """The model's `compute_hidden`, and the states that the head reads."""
        return self._model.compute_states(batch, attn, self._places)

    def extend(
        self, step: StepInputs, arrays: StepArrays, states: Tensor, runs: Sequence[int]
    ) -> None:
        """Store the entries of a step's tokens.

        Args:
            states: the model's, of all tokens.
            runs: StepResult.runs: rejected drafts are stored too, and overwritten later.
        """
        reduced = self._head.reduce_states(states)
        firsts = arrays.qo_indptr[:-1].astype(np.int64)
        before = np.arange(-1, len(reduced) - 1)
        before[firsts] = len(reduced) + step.slots
        begun = [growth.slot for growth in step.growth if growth.base == 0]
        has_state = np.ones(len(reduced), np.bool_)
        # A sequence's first row here: the slot's state is that of its last owner.
        has_state[firsts[np.isin(step.slots, begun)]] = False
        kept = np.flatnonzero(has_state)
        if len(kept):
            known = torch.cat((reduced, self._states))
            batch = _single_tokens(arrays, kept)
            self._head.store(batch, self._attn, known[torch.from_numpy(before[kept])])
        ends = arrays.qo_indptr[1:].astype(np.int64) - 1
        if runs:
            drawing = np.flatnonzero(step.samples)
            ends[drawing] -= step.count_draws()[drawing] - np.array(runs)
        self._states[torch.from_numpy(step.slots)] = reduced[torch.from_numpy(ends)]

    @torch.inference_mode()
    def draft(self, rows: Sequence[DraftRow]) -> list[DraftStep]:
        """Draft for each row, its most likely token and then the next."""
        steps = []
        left = list(rows)
        tokens = [row.token for row in left]
        states = self._states[[row.slot for row in left]]
        for number in range(max(row.drafts for row in rows)):
            started = time.monotonic()
            places = [place for place, row in enumerate(left) if row.drafts > number]
            if len(places) < len(left):
                left = [left[place] for place in places]
                tokens = [tokens[place] for place in places]
                states = states[places]
            batch = self._make_batch(left, tokens, number)
            logits, states = self._head.draft(batch, self._attn, states)
            drafted = self._head.choose_tokens(choose_greedy(logits.float())).tolist()
            seconds = time.monotonic() - started
            steps.append(DraftStep([row.slot for row in left], drafted, seconds))
            # One without a most likely token ends the drafts that count.
            tokens = [max(token, 0) for token in drafted]
        return steps

    def _make_batch(
        self, rows: Sequence[DraftRow], tokens: Sequence[int], number: int
    ) -> ForwardBatch:
        """Rows of one token, which draft number `number` follows from."""
        scratch = [self._scratch.first + row.slot * self._scratch.per_row for row in rows]
        pages = []
        for row, first in zip(rows, scratch, strict=True):
            pages += [row.entries, np.arange(first, first + number + 1, dtype=np.int32)]
        lengths = np.array([len(row.entries) + number + 1 for row in rows], np.int32)
        positions = np.array([row.position + number - 1 for row in rows], np.int64)
        return ForwardBatch(
            token_ids=torch.tensor(tokens),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.tensor(scratch) + number,
            sample_index=torch.arange(len(rows)),
            qo_indptr=torch.arange(len(rows) + 1, dtype=torch.int32),
            kv_lens=torch.from_numpy(lengths),
            page_indptr=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
            page_indices=torch.from_numpy(np.concatenate(pages)),
            num_decode=len(rows),
            max_kv_len=int(positions.max()) + 1,
        )


def _single_tokens(arrays: StepArrays, kept: NDArray[np.int64]) -> ForwardBatch:
    """Tokens as rows of their own: K and V of an entry are made of nothing but its token and state,
    and what attention finds is not read."""
    slots = arrays.slot_mapping[kept]
    # The state of the token in front turns as that token did.
    positions = arrays.positions[kept] - 1
    places = torch.arange(len(kept) + 1, dtype=torch.int32)
    return ForwardBatch(
        token_ids=torch.from_numpy(arrays.token_ids[kept]),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(slots),
        sample_index=torch.arange(0),
        qo_indptr=places,
        kv_lens=torch.ones(len(kept), dtype=torch.int32),
        page_indptr=places,
        page_indices=torch.from_numpy(slots.astype(np.int32)),
        num_decode=len(kept),
        max_kv_len=int(positions.max()) + 1,
    )
