"""Computes a head that drafts, beside the runner of the model that it drafts for.

1. `compute_model` computes a step of the model and returns its hidden states, too;
2. `extend` takes them over; entries are stored for some tokens at a time, since that reads the
   head's matrices once;
3. `draft` stores the others, and makes drafts one after the other, while no step is in flight.

The entry of position p is made of token p and of the model's state behind token p - 1. Its K and V
lie in the head's pool where those of token p lie in the model's: the head has pages of one token,
numbered as the model's slots. So what the tree shares is shared here, and an entry may be missing:
one whose state another sequence or node computed, if any did. That is a sequence's first token
here, and the first one behind pages that its prompt adopted. Attention leaves it out.

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

MOST_WAITING_TOKENS = 32
"""Entries of so many are stored together: a matrix takes little longer for 32 rows than for one."""


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
        self._waiting: list[_ModelStep] = []
        self._waiting_tokens = 0

    def compute_model(self, batch: ForwardBatch, attn: AttentionBackend) -> tuple[Tensor, Tensor]:
        """The model's `compute_hidden`, and the states that the head reads."""
        return self._model.compute_states(batch, attn, self._places)

    def extend(
        self, step: StepInputs, arrays: StepArrays, states: Tensor, runs: Sequence[int]
    ) -> None:
        """Take over a step of the model.

        Args:
            states: the model's, of all tokens.
            runs: StepResult.runs.
        """
        self._waiting.append(_ModelStep(step, arrays, states, runs))
        self._waiting_tokens += len(states)
        if self._waiting_tokens >= MOST_WAITING_TOKENS:
            self._store_entries()

    def _store_entries(self) -> None:
        """Store the entries of all tokens that wait, and keep the last state of each slot."""
        waiting = self._waiting
        self._waiting = []
        self._waiting_tokens = 0
        if not waiting:
            return
        reduced = self._head.reduce_states(torch.cat([each.states for each in waiting]))
        known = torch.cat((self._states, reduced))
        last = np.arange(len(self._states))
        """By slot: place of its last state in `known`."""
        place = len(last)
        found = []
        for each in waiting:
            found.append(each.find_entries(last, place))
            place += len(each.states)
        self._states = known[torch.from_numpy(last)]
        entries = _Entries(*map(np.concatenate, zip(*found, strict=True)))
        # A page may have got another owner in the meantime: the last one's entry counts.
        _, from_end = np.unique(entries.slots[::-1], return_index=True)
        entries = _Entries(*(part[::-1][from_end] for part in entries))
        if len(entries.slots):
            states = known[torch.from_numpy(entries.places)]
            self._head.store(_single_tokens(entries), self._attn, states)

    @torch.inference_mode()
    def draft(self, rows: Sequence[DraftRow]) -> list[DraftStep]:
        """Draft for each row, its most likely token and then the next."""
        steps = []
        started = time.monotonic()
        self._store_entries()
        left = list(rows)
        tokens = [row.token for row in left]
        states = self._states[[row.slot for row in left]]
        for number in range(max(row.drafts for row in rows)):
            places = [place for place, row in enumerate(left) if row.drafts > number]
            if len(places) < len(left):
                left = [left[place] for place in places]
                tokens = [tokens[place] for place in places]
                states = states[places]
            batch = self._make_batch(left, tokens, number)
            logits, states = self._head.draft(batch, self._attn, states)
            drafted = self._head.choose_tokens(choose_greedy(logits.float())).tolist()
            ended = time.monotonic()
            steps.append(DraftStep([row.slot for row in left], drafted, ended - started))
            started = ended
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


class _Entries(NamedTuple):
    """Of tokens whose preceding state is known."""

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    places: NDArray[np.int64]
    """Of the states that they are made of, in `HeadRunner._store_entries`."""


class _ModelStep(NamedTuple):
    """A step of the model whose entries are yet to be stored."""

    step: StepInputs
    arrays: StepArrays
    states: Tensor
    runs: Sequence[int]

    def find_entries(self, last: NDArray[np.int64], place: int) -> _Entries:
        """
        Args:
            last: by slot, the place of its last state; becomes that behind this step.
            place: of this step's first state.
        """
        step = self.step
        arrays = self.arrays
        tokens = np.arange(len(self.states))
        firsts = arrays.qo_indptr[:-1].astype(np.int64)
        before = place + tokens - 1
        before[firsts] = last[step.slots]
        # Rejected drafts are no tokens of their sequence.
        lengths = step.lengths.copy()
        if self.runs:
            drawing = np.flatnonzero(step.samples)
            lengths[drawing] -= step.count_draws()[drawing] - np.array(self.runs)
        has_entry = tokens < np.repeat(firsts + lengths, step.lengths)
        # In front of a sequence's first row here the slot's state is that of its last owner.
        begun = [growth.slot for growth in step.growth if growth.base == 0]
        has_entry[firsts[np.isin(step.slots, begun)]] = False
        last[step.slots] = place + firsts + lengths - 1
        kept = np.flatnonzero(has_entry)
        return _Entries(
            arrays.token_ids[kept], arrays.positions[kept], arrays.slot_mapping[kept], before[kept]
        )


def _single_tokens(entries: _Entries) -> ForwardBatch:
    """Tokens as rows of their own: K and V of an entry are made of nothing but its token and state,
    and what attention finds is not read."""
    count = len(entries.slots)
    # The state of the token in front turns as that token did.
    positions = entries.positions - 1
    places = torch.arange(count + 1, dtype=torch.int32)
    return ForwardBatch(
        token_ids=torch.from_numpy(entries.token_ids),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(entries.slots),
        sample_index=torch.arange(0),
        qo_indptr=places,
        kv_lens=torch.ones(count, dtype=torch.int32),
        page_indptr=places,
        page_indices=torch.from_numpy(entries.slots.astype(np.int32)),
        num_decode=count,
        max_kv_len=int(positions.max()) + 1,
    )
