"""Executes a StepPlan: plan → index tensors → forward → one token per sampling row.

`ModelRunner` executes on the CPU, to the end; `cuda_runner.DeviceRunner` inherits the work on the
host.

Pages that the plan moves between device and host are copied before its rows run, in the plan's
order.

With tensor parallelism the first rank executes plans and tells the others each step
(runtime.runner.step_inputs), before it computes its own part; they run `execute_remote`.

Per slot it keeps the state that plans leave out: the page table (plans carry only its growth), the
last sampled token (the token table that lets step n+1 be planned before step n's tokens are known),
the sampler's view of the sequence, and the states of layers that have some
(slot_states).

Not thread-safe: one thread calls `execute` or `execute_remote`, in plan order.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.layers.attention.base import AttentionBackend, ForwardBatch, PageTable
from baton.layers.host_pool import HostPool
from baton.layers.kv_pool import KvTensors
from baton.layers.recurrent_state import StepStates
from baton.models.served import ServedModel
from baton.runtime.grammar.store import GrammarStore
from baton.runtime.grammar.token_masks import MaskFiller
from baton.runtime.runner.slot_states import SlotStates
from baton.runtime.runner.step_inputs import (
    Growth,
    StepArrays,
    StepInputs,
    StepMismatch,
    checksum_step,
    decode_step,
    encode_step,
    separate_drafts,
)
from baton.runtime.sampling.prompt_logprobs import SLICE_ROWS, PromptRows, PromptTable
from baton.runtime.sampling.sampler import Put, SampleRow
from baton.runtime.sampling.step_sampler import sample_tokens
from baton.runtime.sampling.verification import DraftedRows
from baton.sched.types.plan import INVALID_TOKEN, UNKNOWN_TOKEN, Row, StepPlan, StepResult

if TYPE_CHECKING:
    from baton.runtime.engine_loop import LaunchedStep
    from baton.runtime.runner.head_runner import HeadRunner

NO_ROWS: NDArray[np.int64] = np.empty(0, np.int64)


def read_damaged(is_damaged: Tensor | None) -> tuple[int, ...]:
    """StepResult.damaged_pages of what `HostPool.carry_out` gave, once it is on the host."""
    return () if is_damaged is None else tuple(is_damaged.nonzero().flatten().tolist())


class ModelRunner:
    """Args: `announces_writes`: tell the native pool which pages get new content, because peers may
    be reading it.

    `host`: the pool that plans copy to and from (--host-kv-gib).
    `broadcast`: on the first of several tensor-parallel ranks, sends a step's order to all others.
    """

    def __init__(
        self,
        model: ServedModel,
        kv: KvTensors,
        attn: AttentionBackend,
        max_slots: int,
        *,
        announces_writes: bool = False,
        host: HostPool | None = None,
        broadcast: Callable[[bytes], None] | None = None,
    ) -> None:
        self.vocab_size = model.spec.vocab_size
        self._model = model
        self._kv = kv
        self._host = host
        self._attn = attn
        longest = -(-model.spec.max_context // kv.page_size) + 1
        self._page_table: NDArray[np.int32] = np.zeros(
            (max_slots, min(longest, kv.num_pages)), np.int32
        )
        self._further_tables: list[NDArray[np.int32]] = [
            np.zeros((*self._page_table.shape, rule.width), np.int32)
            for rule in kv.spec.rules
            if rule is not kv.spec.snapshots
        ]
        """Page tables of the further page groups: [slots, pages of tokens, width]. Entries of pages
        that no row sees any more are those of the last owner of the slot.
        """
        self._states: SlotStates | None = None
        """Of layers that keep a state per sequence, where there are some."""
        if model.spec.states:
            layers = tuple(model.spec.states.values())
            self._states = SlotStates(layers, kv, max_slots, self._put)
        self._last_token: NDArray[np.int64] = np.full(max_slots, UNKNOWN_TOKEN, np.int64)
        self._sample_rows: list[SampleRow | None] = [None] * max_slots
        self._prompts = PromptTable()
        self._native_pool = kv.native if announces_writes else None
        self._broadcast = broadcast
        self.grammars: GrammarStore | None = None
        """Where sequences whose answers follow a grammar get its matcher."""
        self.head: HeadRunner | None = None
        """Drafts by the hidden states of this runner's steps."""
        self._check = 0
        """Checksum of the last step, with `broadcast` or `execute_remote`."""

    def expert_counts(self) -> list[Tensor]:
        """How many tokens chose each expert so far, by layer that has experts: int64 [experts]."""
        return self._model.expert_counts()

    @property
    def state_bytes(self) -> int:
        """Size of a sequence's states; 0 for models without."""
        return 0 if self._states is None else self._states.slot_bytes

    def reserve_drafts(self, most: int) -> None:
        """Take the memory that rows of so many drafts need beside a step's."""
        if self._states is not None:
            self._states.reserve_drafts(most)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult | LaunchedStep:
        """Run one step to its end. Raises what torch raises; the runner is then unusable."""
        step, indices, prompt_rows = self._begin_step(plan)
        started = time.monotonic()
        is_damaged = self._copy_pages(step)
        copy_seconds = time.monotonic() - started if step.copies else 0.0
        damaged_pages = read_damaged(is_damaged)
        self._park_states(step)
        # A step without rows is executed for its copies.
        if indices is None:
            return StepResult((), copy_seconds=copy_seconds, damaged_pages=damaged_pages)
        sampling = [row for row in plan.rows if row.sample]
        sample_rows = [self._sample_row(row) for row in sampling]
        drafted = None
        if plan.drafted:
            drafted = DraftedRows(sampling, plan.drafted, plan.num_decode)
            sample_rows = drafted.along_drafts(sample_rows)
        batch = self._make_batch(step, indices, self._begin_states(step))
        hidden, states, result = self._compute_draws(batch, sample_rows)
        if drafted is not None and INVALID_TOKEN in result.tokens and self._can_compute_again:
            # K and V of a wrong draft that are no numbers spoil the tokens in front of it.
            arrays = separate_drafts(step, indices, self._kv.page_size)
            apart = self._make_batch(step, arrays, None)
            batch = replace(apart, num_decode=step.num_answering_tokens)
            hidden, states, result = self._compute_draws(batch, sample_rows)
        self._end_states()
        num_draws = len(sample_rows)
        if drafted is None:
            self._append_tokens(sampling, sample_rows, result.tokens)
        else:
            result = self._keep_runs(sampling, drafted, result)
        if self.head is not None and states is not None:
            runs = result.runs
            self.head.extend(step, indices, batch.token_ids, states, lambda: runs)
        if prompt_rows is not None:
            records = self._prompt_records(prompt_rows, hidden[num_draws:], torch.from_numpy)
            found = prompt_rows.split_records(map(Tensor.numpy, records), self.vocab_size)
            result = replace(result, prompt_logprobs=found)
        return replace(result, copy_seconds=copy_seconds, damaged_pages=damaged_pages)

    def _compute_draws(
        self, batch: ForwardBatch, rows: Sequence[SampleRow]
    ) -> tuple[Tensor, Tensor | None, StepResult]:
        """Hidden states of `sample_index` [S, hidden], those that a head reads, and what is drawn
        at the first ones, one for each row."""
        self._model.prepare(batch, self._attn)
        states = None
        if self.head is None:
            hidden = self._model.compute_hidden(batch, self._attn)
        else:
            hidden, states = self.head.compute_model(batch, self._attn)
        logits = self._model.compute_logits(hidden[: len(rows)]).float()
        return hidden, states, sample_tokens(logits, rows, self._mask_filler)

    @property
    def _can_compute_again(self) -> bool:
        """Whether a step leaves the same when it is computed twice: states have gone on by then,
        and other ranks would have to be told."""
        return self._states is None and self._broadcast is None

    def _keep_runs(
        self, rows: Sequence[Row], drafted: DraftedRows, result: StepResult
    ) -> StepResult:
        """The result of a step with drafts, of what it drew at all positions; its rows go on where
        their runs end.

        Args:
            rows: those that sample.
        """
        result = drafted.keep_runs(result)
        last_tokens = [result.tokens[end - 1] for end in itertools.accumulate(result.runs)]
        self._append_tokens(rows, drafted.rows_at_ends(result.runs), last_tokens)
        return result

    def _append_tokens(
        self, rows: Sequence[Row], sample_rows: Sequence[SampleRow], tokens: Sequence[int]
    ) -> None:
        """The rows continue with these tokens.

        Args:
            sample_rows: where the tokens were drawn.
        """
        for row, sample_row, token in zip(rows, sample_rows, tokens, strict=True):
            token = max(
                token, 0
            )  # of a row that has ended (INVALID_TOKEN) another step may be planned already
            sample_row.append(token)
            self._sample_rows[row.slot] = sample_row
            self._last_token[row.slot] = token

    def run_to_end(self, plan: StepPlan) -> StepResult:
        """Execute a step and wait for its result."""
        outcome = self.execute(plan)
        return outcome if isinstance(outcome, StepResult) else outcome.wait()[0]

    @torch.inference_mode()
    def execute_remote(self, order: bytes) -> None:
        """Do this rank's part of a step that the first tensor-parallel rank has sent.

        Raises StepMismatch, and what torch and the group raise; the runner is then unusable.
        """
        step, check = decode_step(order)
        indices = self._make_indices(step)
        self._check = checksum_step(step, indices, self._check)
        # Checked before anything is written: with another page table this rank would overwrite
        # pages of other requests.
        if self._check != check:
            raise StepMismatch(
                f"step {step.number}: what this tensor-parallel rank would compute is not what the "
                f"first rank planned (checks {self._check:08x} and {check:08x}); nothing was "
                "computed"
            )
        self._begin_write(step)
        self._copy_pages(step)
        self._park_states(step)
        if indices is not None:
            batch = self._make_batch(step, indices, self._begin_states(step))
            self._model.prepare(batch, self._attn)
            hidden = self._model.compute_hidden(batch, self._attn)
            self._end_states()
            num_sampling = len(hidden) - len(step.prompt_rows)
            self._model.compute_logits(hidden[:num_sampling])
            for _ in self._prompt_logits(hidden[num_sampling:]):
                pass  # they are gathered at the first rank

    def _prompt_logits(self, hidden: Tensor) -> Iterator[Tensor]:
        """Logits of the rows that predict prompt tokens, a slice at a time: float32 [m, vocab]."""
        for first in range(0, len(hidden), SLICE_ROWS):
            yield self._model.compute_logits(hidden[first : first + SLICE_ROWS]).float()

    def _prompt_records(self, rows: PromptRows, hidden: Tensor, put: Put) -> Iterator[Tensor]:
        """Records of the rows that predict prompt tokens, a slice at a time, on the device."""
        first = 0
        for logits in self._prompt_logits(hidden):
            yield rows.describe_tokens(logits, first, put)
            first += len(logits)

    def _begin_step(
        self, plan: StepPlan
    ) -> tuple[StepInputs, StepArrays | None, PromptRows | None]:
        """All that comes before the device has work: what the plan says, sent to the other
        ranks.
        """
        for adm in plan.admitted:
            grammar = None
            if adm.params.is_constrained:
                assert self.grammars is not None, "the engine loop refuses grammars without a store"
                grammar = self.grammars.start_sequence(adm)
            row = SampleRow(adm.params, adm.prompt_tokens, adm.history, grammar)
            self._sample_rows[adm.slot] = row
            self._prompts.admit(adm)
        prompt_rows = self._prompts.rows_of(plan.rows)
        step = self._make_step(plan, prompt_rows)
        self._begin_write(step)
        indices = self._make_indices(step)
        # Before this rank computes, so that all ranks of the group run the step together.
        if self._broadcast is not None:
            self._check = checksum_step(step, indices, self._check)
            self._broadcast(encode_step(step, self._check))
        return step, indices, prompt_rows

    def _begin_write(self, step: StepInputs) -> None:
        # Peers read pages of a native pool while this step runs: they must not take the new content
        # for the old.
        if self._native_pool is not None and step.new_pages:
            self._native_pool.begin_write(step.new_pages.tobytes())

    def _copy_pages(self, step: StepInputs) -> Tensor | None:
        """Carry out a step's copies. Returns which of the pages that came back are damaged
        (`HostPool.carry_out`).
        """
        if not step.copies:
            return None
        assert self._host is not None, "the plan moves pages to a host pool that is not there"
        return self._host.carry_out(step.copies)

    @property
    def _mask_filler(self) -> MaskFiller | None:
        return None if self.grammars is None else self.grammars.filler

    def _sample_row(self, row: Row) -> SampleRow:
        sample_row = self._sample_rows[row.slot]
        assert sample_row is not None, f"slot {row.slot} was never admitted"
        return sample_row

    def _make_step(self, plan: StepPlan, prompt_rows: PromptRows | None) -> StepInputs:
        """The plan with its open tokens filled in, vectorized over its rows."""
        rows = plan.rows
        _, of_slot, of_start, of_n, of_sample, of_tokens, _, _ = (
            zip(*rows, strict=True) if rows else ((),) * 8
        )
        slots = np.array(of_slot, np.int64)
        lengths = np.array(of_n, np.int64)
        token_ids = np.frombuffer(b"".join(of_tokens), np.int32).astype(np.int64)
        unknown = token_ids == UNKNOWN_TOKEN
        if unknown.any():
            token_ids[unknown] = self._open_tokens(np.repeat(slots, lengths)[unknown])
        starts = np.array(of_start, np.int64)
        samples = np.array(of_sample, np.bool_)
        growth = [Growth(row.slot, row.page_base, row.pages) for row in rows if row.pages]
        new_pages = plan.new_pages if self._native_pool is not None else array("i")
        return StepInputs(
            plan.step,
            plan.num_decode,
            slots,
            starts,
            lengths,
            samples,
            token_ids,
            NO_ROWS if prompt_rows is None else prompt_rows.index,
            growth,
            plan.copies,
            new_pages,
            plan.further,
            len(plan.drafted),
            plan.states,
        )

    def forced_tokens(self, slot: int) -> list[int]:
        """Tokens that come next in this slot whatever the model likes, as far as that is known. No
        step may be in progress.
        """
        row = self._sample_rows[slot]
        return [] if row is None or row.grammar is None else row.grammar.forced_tokens()

    def count_admitted(self, slot: int, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first on, the grammar of this slot's answer admits. No
        step may be in progress.
        """
        row = self._sample_rows[slot]
        if row is None or row.grammar is None:
            return len(tokens)
        return row.grammar.count_admitted(tokens)

    def _open_tokens(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """The last token sampled in each of these slots."""
        return self._last_token[slots]

    def _make_indices(self, step: StepInputs) -> StepArrays | None:
        """Index arrays of a step, after its pages joined the page table; None when it has no
        rows.
        """
        count = len(step.slots)
        if not count:
            return None
        for slot, base, pages in step.growth:
            self._page_table[slot, base : base + len(pages)] = pages
        for slot, group, base, pages in step.further:
            # Snapshots of states are no pages of attention.
            if group == len(self._further_tables):
                continue
            self._further_tables[group][slot].reshape(-1)[base : base + len(pages)] = pages
        slots = step.slots
        starts = step.starts
        qo_indptr = np.zeros(count + 1, np.int32)
        np.cumsum(step.lengths, out=qo_indptr[1:])
        kv_lens = starts + step.lengths
        row_of_token = np.repeat(np.arange(count), step.lengths)
        positions = (
            np.arange(qo_indptr[-1], dtype=np.int64)
            - qo_indptr[row_of_token]
            + starts[row_of_token]
        )
        page_size = self._kv.page_size
        row_slots = slots[row_of_token]
        blocks = positions // page_size
        offsets = positions % page_size
        num_pages = -(-kv_lens // page_size)

        def indices_of(table: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
            """KV slot of each token, and the rows' pages, by a table [slots, pages of tokens]."""
            pages = table[row_slots, blocks].astype(np.int64)
            rows = [table[slot, :n] for slot, n in zip(slots, num_pages, strict=True)]
            return pages * page_size + offsets, np.concatenate(rows)

        slot_mapping, page_indices = indices_of(self._page_table)
        draws = step.count_draws()
        last_draws = np.cumsum(draws)
        places_back = np.repeat(last_draws, draws) - np.arange(draws.sum())
        sampling = np.repeat(qo_indptr[1:].astype(np.int64), draws) - places_back
        page_indptr = np.zeros(count + 1, np.int32)
        np.cumsum(num_pages, out=page_indptr[1:])
        return StepArrays(
            token_ids=step.token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            sample_index=np.concatenate((sampling, step.prompt_rows)),
            qo_indptr=qo_indptr,
            kv_lens=kv_lens.astype(np.int32),
            page_indptr=page_indptr,
            page_indices=page_indices,
            further=tuple(
                indices_of(table[:, :, part])
                for table in self._further_tables
                for part in range(table.shape[2])
            ),
        )

    def _park_states(self, step: StepInputs) -> None:
        if self._states is not None:
            self._states.park(step)

    def _begin_states(self, step: StepInputs) -> StepStates | None:
        return None if self._states is None else self._states.begin_step(step)

    def _end_states(self) -> None:
        if self._states is not None:
            self._states.end_step()

    def _put(self, x: NDArray[np.int32]) -> Tensor:
        """The array where the states are."""
        return torch.from_numpy(x)

    def _make_batch(
        self, step: StepInputs, indices: StepArrays, states: StepStates | None
    ) -> ForwardBatch:
        """Args: `states`: those that `_begin_states` gave."""
        return ForwardBatch(
            token_ids=torch.from_numpy(indices.token_ids),
            positions=torch.from_numpy(indices.positions),
            slot_mapping=torch.from_numpy(indices.slot_mapping),
            sample_index=torch.from_numpy(indices.sample_index),
            qo_indptr=torch.from_numpy(indices.qo_indptr),
            kv_lens=torch.from_numpy(indices.kv_lens),
            page_indptr=torch.from_numpy(indices.page_indptr),
            page_indices=torch.from_numpy(indices.page_indices),
            num_decode=step.num_decode,
            num_prompt_rows=len(step.prompt_rows),
            max_kv_len=int(indices.kv_lens.max()),
            further=tuple(
                PageTable(torch.from_numpy(slots), torch.from_numpy(pages))
                for slots, pages in indices.further
            ),
            states=states,
        )
