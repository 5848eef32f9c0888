"""Executes a StepPlan on a CUDA device asynchronously: `execute` queues a step and does not wait
for it.

1. The step's index arrays go to the device in one copy; 2. a token the plan leaves open, being
sampled by the step before, is read on the device from the token table (one entry per slot), so that
no step waits for it; 3. the model runs, the draw follows (`sampler`), and the drawn tokens go into
the table; 4. tokens and logprobs are copied to the host, a mark is set, and collecting the result
waits for that mark.

    host      plan n+1 | launch n+1 | collect n ...
    device    ... step n ...........| step n+1 ...........

    both queued: the device does not wait for the host

A step of decode rows only, with drafts or without, is replayed from a recording where there is one
(`graphs`). Copies of states (slot_states) are queued around it: those that rows begin with before,
those that they leave behind it.

Drafts: each token of a row with drafts is a decode row of its own, and a step draws behind all of
them at once. Which draws count is decided on the host, where the result is read; no step is planned
before, and the next one names all of its tokens. So such a step leaves the token table alone.

The host needs to know the tokens of earlier steps, and waits for them, in three cases: a row with
penalties is drawn (they count its tokens), a row with a grammar is drawn (they decide what it
allows next), or other tensor-parallel ranks receive the step. In the first two the step's model is
queued before the host waits, so that the device computes meanwhile; only the draw is delayed.

Nothing here knows CUDA: `stream` does.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.layers.attention.base import (
    AttentionBackend,
    ForwardBatch,
    GraphAttention,
    PageTable,
)
from baton.layers.cuda.stream import CudaMark, CudaStream
from baton.layers.kv_pool import KvTensors
from baton.layers.recurrent_state import StepStates
from baton.models.served import ServedModel
from baton.runtime.runner.capture import CudaRecorder, DecodeGraphs
from baton.runtime.runner.model_runner import ModelRunner, read_damaged
from baton.runtime.runner.step_inputs import StepArrays, StepInputs, separate_drafts
from baton.runtime.runner.token_table import TokenTable
from baton.runtime.sampling.prompt_logprobs import PromptRows
from baton.runtime.sampling.sampler import SampleRow
from baton.runtime.sampling.step_sampler import SamplingLaunch, SamplingResult
from baton.runtime.sampling.verification import DraftedRows
from baton.sched.types.plan import UNKNOWN_TOKEN, PromptLogprobs, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class FetchedPrompts:
    """Records of prompt tokens on the host, to be read when the step has ended."""

    rows: PromptRows
    slices: list[Tensor]
    vocab: int

    def read_logprobs(self) -> dict[int, PromptLogprobs]:
        return self.rows.split_records(map(Tensor.numpy, self.slices), self.vocab)


@dataclass(slots=True)
class InFlight:
    """A launched step (loop.Launched).

    Its commit comes after its end, also when nothing was sampled: from then on peers may read the
    pages it wrote, and transfers may write those it used (layers.cuda.device_pages).
    """

    began: CudaMark
    ended: CudaMark
    draw: SamplingLaunch | None = None
    """None: no row samples."""
    drawn: SamplingResult | None = None
    """On the host; to be read after `ended`."""
    prompts: FetchedPrompts | None = None
    """Logprobs of prompt tokens that the step's rows predict."""
    is_damaged: Tensor | None = None
    """Of the pages that came back from the host pool (HostPool.carry_out); on the host."""
    keep_runs: Callable[[StepResult], StepResult] | None = None
    """What becomes of the draws of a step with drafts; None: it has none."""
    result: StepResult | None = None
    """Set once it has been read."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """The thread that launches may read the result, too, and it must be read once."""

    def wait(self) -> tuple[StepResult, float]:
        return self.wait_for_result(), self.ended.seconds_since(self.began)

    def wait_for_result(self) -> StepResult:
        """Waits for the step. From any thread."""
        self.ended.wait()
        with self.lock:
            if self.result is None:
                self.result = self._read_result()
            return self.result

    def _read_result(self) -> StepResult:
        result = StepResult(())
        if self.draw is not None and self.drawn is not None:
            result = self.draw.read_result(self.drawn)
        if self.keep_runs is not None:
            result = self.keep_runs(result)
        if self.prompts is not None:
            result = replace(result, prompt_logprobs=self.prompts.read_logprobs())
        damaged_pages = read_damaged(self.is_damaged)
        return replace(result, damaged_pages=damaged_pages) if damaged_pages else result


class ComputedStep(NamedTuple):
    """Output of the model for one step, on the device."""

    logits: Tensor
    """float32 [S, vocab], of the rows that sample."""
    greedy: Tensor | None
    """Their argmax, if the token table has it already."""
    slots: Tensor
    """int64 [S]"""
    prompt_hidden: Tensor | None = None
    """[L, hidden], of the rows that predict prompt tokens whose logprobs are missing."""
    states: Tensor | None = None
    """Of all tokens, for a head that reads along; None: there is none."""
    token_ids: Tensor | None = None
    """int64 [T], those of `states`."""


class DeviceRunner(ModelRunner):
    """A Runner whose steps are collected later."""

    def __init__(
        self,
        model: ServedModel,
        kv: KvTensors,
        attn: AttentionBackend,
        max_slots: int,
        *,
        stream: CudaStream,
        **more: Any,
    ) -> None:
        """`more`: the other arguments of `ModelRunner`."""
        super().__init__(model, kv, attn, max_slots, **more)
        self._stream = stream
        self.can_record = isinstance(attn, GraphAttention)
        """True if the attention backend can be part of a recording."""
        self._table = TokenTable(max_slots, kv.data.device)
        self._graphs: DecodeGraphs | None = None
        self._unread: list[tuple[InFlight, list[tuple[int, int, SampleRow]]]] = []
        """Steps with rows whose tokens the host has to know: which token of the step, the slot, the
        row.
        """
        self._verifying: InFlight | None = None
        """The last step with drafts."""

    @torch.inference_mode()
    def record_graphs(
        self, recorder: CudaRecorder, largest: int, context: int, most_drafts: int = 0
    ) -> None:
        """From now on steps of at most `largest` decode rows are replayed. Takes a while, and
        device memory.

        Args:
            context: no sequence gets longer.
            most_drafts: of a row, which is as many rows more.
        """
        assert isinstance(self._attn, GraphAttention), "this backend cannot be recorded"
        self._graphs = DecodeGraphs(
            self._model,
            self._kv,
            self._attn,
            self._table,
            self._stream,
            recorder,
            largest,
            context,
            self._states,
            most_drafts,
            None if self.head is None else self.head.recorded_states,
        )

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> InFlight:
        """Queue one step.

        Raises torch's errors, which may be of an earlier step; the runner is then unusable.
        """
        # The other ranks get tokens, because a reference to this rank's token table means nothing
        # to them.
        if self._broadcast is not None:
            self._read_tokens()
        assert self._verifying is None or self._verifying.result is not None, (
            "no step is planned before it is known which drafts count"
        )
        step, indices, prompt_rows = self._begin_step(plan)
        # A step without rows is executed for its copies.
        if indices is None:
            began = self._stream.mark()
            is_damaged = self._fetch_if_any(self._copy_pages(step))
            self._park_states(step)
            return InFlight(began, self._stream.mark(), is_damaged=is_damaged)
        is_damaged = self._fetch_if_any(self._copy_pages(step))
        self._park_states(step)
        began, computed = self._compute_logits(step, indices)
        prompts = self._fetch_prompts(prompt_rows, computed.prompt_hidden)
        if step.samples.any():
            launched = self._draw_rows(plan, step, computed, began)
        else:
            # Chunks in the middle of a prompt draw nothing. Their step has a mark all the same,
            # because peers read its pages after the commit.
            launched = InFlight(began, self._stream.mark())
        launched.prompts = prompts
        launched.is_damaged = is_damaged
        self._extend_head(step, indices, computed, launched)
        return launched

    def _draw_rows(
        self, plan: StepPlan, step: StepInputs, computed: ComputedStep, began: CudaMark
    ) -> InFlight:
        """Queue the draws of a step, at each position of rows with drafts, and the end of it."""
        sampling = [row for row in plan.rows if row.sample]
        rows = [self._sample_row(row) for row in sampling]
        keep_runs = None
        if plan.drafted:
            # The copies along the drafts stand behind all tokens before.
            self._read_tokens()
            drafted = DraftedRows(sampling, plan.drafted, plan.num_decode)
            rows = drafted.along_drafts(rows)
            keep_runs = functools.partial(self._keep_runs, sampling, drafted)
        draw, drawn = self._draw_tokens(rows, computed)
        # A replayed step has written its argmax into the table itself, and behind drafts no step
        # reads the table.
        if drawn.tokens is not computed.greedy and keep_runs is None:
            self._table.write_tokens(computed.slots, drawn.tokens)
        fetched = self._fetch_drawn(drawn)
        launched = InFlight(began, self._stream.mark(), draw, fetched, keep_runs=keep_runs)
        if keep_runs is None:
            self._advance_rows(rows, step.slots[step.samples], launched)
        else:
            self._verifying = launched
        return launched

    def _extend_head(
        self, step: StepInputs, indices: StepArrays, computed: ComputedStep, launched: InFlight
    ) -> None:
        """Queue what a head makes of the step, behind what its result waits for."""
        if self.head is None or computed.states is None or computed.token_ids is None:
            return

        def read_runs() -> Sequence[int]:
            return launched.wait_for_result().runs

        self.head.extend(step, indices, computed.token_ids, computed.states, read_runs)

    def execute_remote(self, order: bytes) -> None:
        super().execute_remote(order)
        if self._kv.native is not None:
            # the first rank may say next that the step's pages are final
            self._stream.mark().wait()

    def _compute_logits(
        self, step: StepInputs, indices: StepArrays
    ) -> tuple[CudaMark, ComputedStep]:
        """Queue the model.

        The mark is where the model's first kernel is queued: earlier it would count a device that
        waits for the host's planning as busy.
        """
        states = self._begin_states(step)
        indices = separate_drafts(step, indices, self._kv.page_size)
        size = None
        # A row that begins with a copy which another row of the step leaves needs that one's
        # layers first, one by one; a recording computes all rows together.
        if self._graphs is not None and not (states is not None and states.copies_within):
            size = self._graphs.size_for(step, indices)
        # Without a size (prompts, more rows or pages than any recording has) the step runs eagerly.
        if self._graphs is not None and size is not None:
            self._graphs.load_step(size, step, indices)
            began = self._stream.mark()
            replayed = self._graphs.replay_step(size, len(step.token_ids))
            self._end_states()
            return began, ComputedStep(
                replayed.logits,
                replayed.greedy,
                replayed.entries,
                states=replayed.states,
                token_ids=replayed.token_ids,
            )
        batch, slots = self._upload_step(step, indices, states)
        self._model.prepare(batch, self._attn)
        began = self._stream.mark()
        hidden_states = None
        if self.head is None:
            hidden = self._model.compute_hidden(batch, self._attn)
        else:
            hidden, hidden_states = self.head.compute_model(batch, self._attn)
        self._end_states()
        num_sampling = len(hidden) - len(step.prompt_rows)
        logits = self._model.compute_logits(hidden[:num_sampling]).float()
        prompt_hidden = hidden[num_sampling:]
        return began, ComputedStep(
            logits, None, slots, prompt_hidden, hidden_states, batch.token_ids
        )

    def _fetch_prompts(
        self, rows: PromptRows | None, hidden: Tensor | None
    ) -> FetchedPrompts | None:
        """Queue the logprobs of the prompt tokens that a step's rows predict, and their way to the
        host.
        """
        if rows is None or hidden is None:
            return None
        records = self._prompt_records(rows, hidden, self._stream.put)
        return FetchedPrompts(rows, [self._stream.fetch(part) for part in records], self.vocab_size)

    def _draw_tokens(
        self, rows: Sequence[SampleRow], computed: ComputedStep
    ) -> tuple[SamplingLaunch, SamplingResult]:
        """The draw, and what it will have drawn, on the device."""
        if any(row.needs_tokens for row in rows):
            self._read_tokens()
        draw = SamplingLaunch(rows, self.vocab_size, self._stream.put, self._mask_filler)
        return draw, draw.queue_draw(computed.logits, computed.greedy)

    def _fetch_drawn(self, drawn: SamplingResult) -> SamplingResult:
        """Queue its way to the host."""
        return SamplingResult(
            tokens=self._stream.fetch(drawn.tokens),
            chosen=self._fetch_if_any(drawn.chosen),
            top_ids=self._fetch_if_any(drawn.top_ids),
            top_logprobs=self._fetch_if_any(drawn.top_logprobs),
            id_logprobs=self._fetch_if_any(drawn.id_logprobs),
        )

    def _fetch_if_any(self, part: Tensor | None) -> Tensor | None:
        return None if part is None else self._stream.fetch(part)

    def _advance_rows(
        self, rows: Sequence[SampleRow], slots: NDArray[np.int64], launched: InFlight
    ) -> None:
        """The rows stand one token further, which the host does not know yet."""
        later = []
        for i, row in enumerate(rows):
            # Penalties and grammars of the row, and the other ranks, need the token later
            # (`_read_tokens`).
            if row.needs_tokens or self._broadcast is not None:
                later.append((i, int(slots[i]), row))
            elif not row.is_always_plain:
                row.append(UNKNOWN_TOKEN)
        if later:
            self._unread.append((launched, later))

    def _read_tokens(self) -> None:
        """Wait for the steps whose tokens the host has to know."""
        for launched, rows in self._unread:
            tokens = launched.wait_for_result().tokens
            for i, slot, sample_row in rows:
                token = max(
                    tokens[i], 0
                )  # of a row that has ended (INVALID_TOKEN) another step may be planned already
                sample_row.append(token)
                self._last_token[slot] = token
        self._unread.clear()

    def _open_tokens(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Known to the host only where other ranks need it; else a reference stands for what the
        table holds.
        """
        return (
            super()._open_tokens(slots)
            if self._broadcast is not None
            else self._table.make_references(slots)
        )

    def _put(self, x: NDArray[np.int32]) -> Tensor:
        return self._stream.put(x)

    def _make_batch(
        self, step: StepInputs, indices: StepArrays, states: StepStates | None
    ) -> ForwardBatch:
        indices = separate_drafts(step, indices, self._kv.page_size)
        return self._upload_step(step, indices, states)[0]

    def _upload_step(
        self, step: StepInputs, indices: StepArrays, states: StepStates | None
    ) -> tuple[ForwardBatch, Tensor]:
        """The step's tensors, and the slots of the rows that sample: int64 [S] on the device.

        Args: `indices`: with drafts as rows (`separate_drafts`).
        """
        token_ids, positions, slot_mapping, sample_index, slots, *further = self._stream.put_all(
            (
                indices.token_ids,
                indices.positions,
                indices.slot_mapping,
                indices.sample_index,
                step.slots[step.samples],
                *(mapping for mapping, _ in indices.further),
            )
        )
        # Ids below 0 refer to entries of the table: tokens that the step before draws.
        if (indices.token_ids < 0).any():
            token_ids = self._table.resolve_tokens(token_ids)
        batch = replace(
            super()._make_batch(step, indices, states),
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            sample_index=sample_index,
            num_decode=step.num_answering_tokens,
            further=tuple(
                PageTable(mapping, torch.from_numpy(pages))
                for mapping, (_, pages) in zip(further, indices.further, strict=True)
            ),
        )
        return batch, slots


def make_runner(
    model: ServedModel, kv: KvTensors, attn: AttentionBackend, max_slots: int, **more: Any
) -> ModelRunner:
    """Make a runner of the kind that suits the pool's device."""
    if kv.data.is_cuda:
        return DeviceRunner(model, kv, attn, max_slots, stream=CudaStream(kv.data.device), **more)
    return ModelRunner(model, kv, attn, max_slots, **more)
