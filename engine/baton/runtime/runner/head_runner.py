"""Computes a head that drafts, beside the runner of the model that it drafts for.

1. `compute_model` computes a step of the model and returns its hidden states, too; it can be
   recorded;
2. `extend` takes them over; entries are stored for some tokens at a time, since that reads the
   head's matrices once;
3. `draft` stores the others, and makes drafts one after the other, while no step is in flight.

On a GPU all of this is queued behind the model's steps, and launched kernel by kernel. `draft`
alone waits for the device.

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
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.layers import ops
from baton.layers.attention.base import AttentionBackend, ForwardBatch
from baton.models.decoder import Decoder
from baton.models.draft_head import DraftHead
from baton.runtime.runner.capture import StatesRecording
from baton.runtime.runner.step_inputs import StepArrays, StepInputs
from baton.runtime.sampling.sampler import Put
from baton.runtime.sampling.step_sampler import choose_greedy
from baton.runtime.speculation.head_drafter import DraftRow, DraftStep

MOST_WAITING_TOKENS = 32
"""Entries of so many are stored together: a matrix takes little longer for 32 rows than for one."""

MOST_STORED_TOKENS = 2048
"""At a time: flashinfer's latent attention plans no more than some thousand rows of many heads."""

ReadRuns: TypeAlias = Callable[[], Sequence[int]]
"""Gives StepResult.runs of a step that has ended."""


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
        put: Put,
    ) -> None:
        """
        Args:
            put: arrays to the device of the head.
        """
        assert head.spec.head is not None, "a head says which states it reads"
        self._places = head.spec.head.state_layers
        self._head = head
        self._model = model
        self._attn = attn
        self._scratch = scratch
        self._put = put
        dtype = ops.TORCH_DTYPES[head.spec.dtype]
        device = put(np.zeros(0)).device
        self._states = torch.zeros(max_slots, head.spec.hidden_size, dtype=dtype, device=device)
        """Behind the last token but one of each slot's sequence: an entry of the last one is made
        of it."""
        self._waiting: list[_ModelStep] = []
        self._waiting_tokens = 0

    @property
    def recorded_states(self) -> StatesRecording:
        """For steps of the model that are recorded."""
        assert self._head.spec.head is not None, "a head says which states it reads"
        return StatesRecording(self.compute_model, self._head.spec.head.state_size)

    def compute_model(self, batch: ForwardBatch, attn: AttentionBackend) -> tuple[Tensor, Tensor]:
        """The model's `compute_hidden`, and the states that the head reads."""
        return self._model.compute_states(batch, attn, self._places)

    def extend(
        self,
        step: StepInputs,
        arrays: StepArrays,
        token_ids: Tensor,
        states: Tensor,
        read_runs: ReadRuns,
    ) -> None:
        """Take over a step of the model, which is computed or queued.

        Args:
            token_ids: the step's, all of them known, on the device.
            states: the model's, of all tokens.
            read_runs: called when a later step is taken over, or drafts are made.
        """
        self._store_if_due()
        self._waiting.append(_ModelStep(step, arrays, token_ids, states, read_runs))
        self._waiting_tokens += len(states)
        # Which drafts count is not known yet. Others do not have to wait, and states of long
        # prompts take much memory.
        if not step.num_drafted_rows:
            self._store_if_due()

    def _store_if_due(self) -> None:
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
        token_ids = torch.cat([each.token_ids for each in waiting])
        known = torch.cat((self._states, reduced))
        last = np.arange(len(self._states))
        """By slot: place of its last state in `known`."""
        place = len(last)
        found = []
        for each in waiting:
            found.append(each.find_entries(last, place))
            place += len(each.states)
        entries = _Entries(*map(np.concatenate, zip(*found, strict=True)))
        # A page may have got another owner in the meantime: the last one's entry counts.
        _, from_end = np.unique(entries.slots[::-1], return_index=True)
        entries = _Entries(*(part[::-1][from_end] for part in entries))
        self._states = known[self._put(last)]
        for first in range(0, len(entries.slots), MOST_STORED_TOKENS):
            some = _Entries(*(part[first : first + MOST_STORED_TOKENS] for part in entries))
            batch = self._single_tokens(token_ids[self._put(some.tokens - len(last))], some)
            self._head.store(batch, self._attn, known[self._put(some.states)])

    @torch.inference_mode()
    def draft(self, rows: Sequence[DraftRow]) -> list[DraftStep]:
        """Draft for each row, its most likely token and then the next."""
        queued: list[tuple[list[int], Tensor, float]] = []
        started = time.monotonic()
        self._store_entries()
        left = list(rows)
        tokens = self._put(np.array([row.token for row in left]))
        states = self._states[self._put(np.array([row.slot for row in left]))]
        for number in range(max(row.drafts for row in rows)):
            places = [place for place, row in enumerate(left) if row.drafts > number]
            if len(places) < len(left):
                left = [left[place] for place in places]
                kept = self._put(np.array(places))
                tokens = tokens[kept]
                states = states[kept]
            batch = self._make_batch(left, tokens, number)
            logits, states = self._head.draft(batch, self._attn, states)
            drafted = self._head.choose_tokens(choose_greedy(logits.float()))
            ended = time.monotonic()
            queued.append(([row.slot for row in left], drafted, ended - started))
            started = ended
            # One without a most likely token ends the drafts that count.
            tokens = drafted.clamp_min(0)
        known = torch.cat([drafted for _, drafted, _ in queued]).tolist()
        waited = (time.monotonic() - started) / len(queued)
        steps = []
        for slots, _, seconds in queued:
            steps.append(DraftStep(slots, known[: len(slots)], seconds + waited))
            known = known[len(slots) :]
        return steps

    def _make_batch(self, rows: Sequence[DraftRow], tokens: Tensor, number: int) -> ForwardBatch:
        """Rows of one token, which draft number `number` follows from."""
        scratch = [self._scratch.first + row.slot * self._scratch.per_row for row in rows]
        pages = []
        for row, first in zip(rows, scratch, strict=True):
            pages += [row.entries, np.arange(first, first + number + 1, dtype=np.int32)]
        lengths = np.array([len(row.entries) + number + 1 for row in rows], np.int32)
        positions = np.array([row.position + number - 1 for row in rows], np.int64)
        return ForwardBatch(
            token_ids=tokens,
            positions=self._put(positions),
            slot_mapping=self._put(np.array(scratch) + number),
            sample_index=self._put(np.arange(len(rows))),
            qo_indptr=torch.arange(len(rows) + 1, dtype=torch.int32),
            kv_lens=torch.from_numpy(lengths),
            page_indptr=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
            page_indices=torch.from_numpy(np.concatenate(pages)),
            num_decode=len(rows),
            max_kv_len=int(positions.max()) + 1,
        )

    def _single_tokens(self, token_ids: Tensor, entries: _Entries) -> ForwardBatch:
        """Tokens as rows of their own: K and V of an entry are made of nothing but its token and
        state, and what attention finds is not read."""
        count = len(entries.slots)
        # The state of the token in front turns as that token did.
        positions = entries.positions - 1
        places = torch.arange(count + 1, dtype=torch.int32)
        return ForwardBatch(
            token_ids=token_ids,
            positions=self._put(positions),
            slot_mapping=self._put(entries.slots),
            sample_index=self._put(np.empty(0, np.int64)),
            qo_indptr=places,
            kv_lens=torch.ones(count, dtype=torch.int32),
            page_indptr=places,
            page_indices=torch.from_numpy(entries.slots.astype(np.int32)),
            num_decode=count,
            max_kv_len=int(positions.max()) + 1,
        )


class _Entries(NamedTuple):
    """Of tokens whose preceding state is known."""

    tokens: NDArray[np.int64]
    """Places of their own states, which their token ids are numbered as."""
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    states: NDArray[np.int64]
    """Places of the states that they are made of, in `HeadRunner._store_entries`."""


class _ModelStep(NamedTuple):
    """A step of the model whose entries are yet to be stored."""

    step: StepInputs
    arrays: StepArrays
    token_ids: Tensor
    states: Tensor
    read_runs: ReadRuns

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
        if step.num_drafted_rows:
            drawing = np.flatnonzero(step.samples)
            lengths[drawing] -= step.count_draws()[drawing] - np.array(self.read_runs())
        has_entry = tokens < np.repeat(firsts + lengths, step.lengths)
        # In front of a sequence's first row here the slot's state is that of its last owner.
        begun = [growth.slot for growth in step.growth if growth.base == 0]
        has_entry[firsts[np.isin(step.slots, begun)]] = False
        last[step.slots] = place + firsts + lengths - 1
        kept = np.flatnonzero(has_entry)
        return _Entries(
            place + kept, arrays.positions[kept], arrays.slot_mapping[kept], before[kept]
        )
