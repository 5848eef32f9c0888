"""Decode steps recorded once and replayed: CUDA graphs, which launch a whole step in one call.

1. At start one graph is recorded per capture size (`paged_indices.capture_sizes`), the largest
first, in one memory pool; 2. a step of decode rows only is padded to the next capture size: its
rows are written to buffers at fixed places (`GraphInputs`), the backend plans for them, the graph
is replayed; 3. logits and argmax lie in fixed buffers, the argmax also in the token table. Any
other step, and a larger one, runs eagerly.

    rows          | row 0 | row 1 | row 2 | padding |  → capture size 4
    pages             7 3     9       1      dummy      one page beyond those the scheduler knows
    token table       slots of the rows      dummy      one entry beyond the slots

A row with drafts is as many rows of a recording as it has tokens, each over the pages up to its
own. All of them write the entry of its slot, in no order: no step behind drafts reads the table.

Where a head drafts, a recording keeps the hidden states that the head reads, and the token ids that
the table stood for.

A padding row reads and writes the dummy page and the dummy entry only, so it changes no other row's
tokens. It chooses no experts, and no state is its own.

A recorded step reads only `GraphInputs`, the table, the weights, the states and the pool, because
Python runs at recording only. Copies of states are queued before and behind it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.config import EngineConfig
from baton.layers import ops
from baton.layers.attention.base import (
    NOTHING,
    ForwardBatch,
    GraphAttention,
    GraphInputs,
    PageTable,
)
from baton.layers.attention.paged_indices import (
    PagedRows,
    capture_size,
    capture_sizes,
    decode_rows,
    pad_decode,
    pad_slots,
)
from baton.layers.cuda.stream import CudaStream
from baton.layers.kv_pool import KvTensors
from baton.layers.recurrent_state import StateRows, StepStates
from baton.models.served import ServedModel
from baton.runtime.runner.slot_states import SlotStates
from baton.runtime.runner.step_inputs import StepArrays, StepInputs
from baton.runtime.runner.token_table import TokenTable
from baton.runtime.sampling.step_sampler import greedy_tokens

log = logging.getLogger("baton.graphs")

PROGRESS_SECS = 1.0
MOST_ROWS = 256
"""Most rows of a recorded step, by default (--cuda-graph-max-bs): 35 graphs.

Larger steps keep a GPU busy anyway.
"""
BYTES_EACH = 8 << 20
"""Memory of one graph besides what all share. On an H200 all 35 graphs of Qwen3-0.6B took 0.28 GiB,
shared memory included.
"""


def rows_to_record(config: EngineConfig) -> int:
    """Rows of the largest step recorded on a CUDA device as the flags have it, where a drafted
    token is one, too; 0: nothing is recorded.
    """
    if config.disable_cuda_graph or config.tp_size > 1 or config.disaggregation_mode == "prefill":
        return 0
    return min(config.cuda_graph_max_bs or MOST_ROWS, config.most_answer_tokens)


class CudaRecorder:
    """All graphs share one memory pool: they run one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record what `work` queues on the device, to be queued again by each call.

        `work` runs, perhaps twice.
        """
        # kernels are loaded and libraries set up outside of the recording, where they may allocate
        work()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        return graph.replay


class StatesRecording(NamedTuple):
    """Makes recorded steps keep what a head reads."""

    compute: Callable[[ForwardBatch, GraphAttention], tuple[Tensor, Tensor]]
    """HeadRunner.compute_model"""
    state_size: int


class ReplayedStep(NamedTuple):
    """Of n tokens. All but what a head reads is overwritten by the next replay."""

    logits: Tensor
    """float32 [n, vocab]"""
    greedy: Tensor
    """int64 [n]: their `greedy_tokens`, in the token table already."""
    entries: Tensor
    """int64 [n]: where in the table."""
    states: Tensor | None = None
    """[n, state_size], with `StatesRecording`."""
    token_ids: Tensor | None = None
    """int64 [n], all known; with `StatesRecording`."""


@dataclass(eq=False)
class DecodeGraphs:
    """Recorded when it is made, which takes a while."""

    model: ServedModel
    kv: KvTensors
    attn: GraphAttention
    table: TokenTable
    stream: CudaStream
    recorder: CudaRecorder
    largest: int
    """Rows of the largest recorded step."""
    context: int
    """Longest row [tokens]."""
    states: SlotStates | None = None
    """Of layers that keep a state per sequence, where there are some."""
    most_drafts: int = 0
    """Of a row."""
    recorded_states: StatesRecording | None = None
    """None: no head reads along."""

    def __post_init__(self) -> None:
        kv = self.kv
        largest = self.largest
        assert kv.dummy_page is not None, "the pool has no page for padding rows"
        self.sizes = capture_sizes(largest)
        device = kv.data.device
        # Rows may share pages, so there can be more entries than pages; beyond twice as many a step
        # runs eagerly. Each draft names the pages of its row again.
        most_entries = (2 + self.most_drafts) * kv.num_pages
        pages = min(largest * -(-self.context // kv.page_size), most_entries) + largest
        self._static = GraphInputs(largest, pages, device, kv.spec.num_tables, len(self.attn.views))
        self._logits = torch.zeros(
            largest, self.model.spec.vocab_size, dtype=torch.float32, device=device
        )
        self._greedy = torch.zeros(largest, dtype=torch.int64, device=device)
        self._token_ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self._every_row = torch.arange(largest, device=device)
        self._head_states: Tensor | None = None
        if self.recorded_states is not None:
            dtype = ops.TORCH_DTYPES[self.model.spec.dtype]
            shape = (largest, self.recorded_states.state_size)
            self._head_states = torch.zeros(shape, dtype=dtype, device=device)
        self.model.reserve(
            self.context
        )  # the tables of rotary embedding stay where they are from now on
        self._replays = self._record_all()

    def _record_all(self) -> dict[int, Callable[[], None]]:
        started = logged_at = time.monotonic()
        replays: dict[int, Callable[[], None]] = {}
        no_rows = PagedRows(np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32))
        for count, size in enumerate(reversed(self.sizes), 1):
            self.attn.prepare_capture(size, self._static)
            no_slots = [np.zeros(0, np.int64)] * self.kv.spec.num_tables
            views = [no_rows] * len(self.attn.views)
            self._load_rows(size, np.zeros((3, 0), np.int64), no_slots, views)
            replays[size] = self.recorder.record(lambda size=size: self._decode_step(size))  # type: ignore[misc]
            now = time.monotonic()
            if count == len(self.sizes) or now - logged_at >= PROGRESS_SECS:
                logged_at = now
                log.info(
                    "capturing CUDA graphs: %d/%d, %.1f s", count, len(self.sizes), now - started
                )
        return replays

    def _decode_step(self, size: int) -> None:
        """Compute a decode step; this is recorded."""
        static = self._static
        rows = slice(size)
        slots, *further = (mapping[rows] for mapping in static.slot_mappings)
        self.attn.use_capture(size, (slots, *further))
        is_padding = static.entries[rows] == self.table.dummy
        batch = ForwardBatch(
            token_ids=self.table.resolve_tokens(static.token_ids[rows]),
            positions=static.positions[rows],
            slot_mapping=slots,
            sample_index=self._every_row[rows],
            num_decode=size,
            further=tuple(PageTable(mapping, NOTHING) for mapping in further),
            is_padding=is_padding,
            states=self._read_states(static.entries[rows], is_padding),
        )
        if self.recorded_states is None or self._head_states is None:
            hidden = self.model.compute_hidden(batch, self.attn)
        else:
            hidden, states = self.recorded_states.compute(batch, self.attn)
            self._head_states[rows].copy_(states)
            self._token_ids[rows].copy_(batch.token_ids)
        self._logits[rows].copy_(self.model.compute_logits(hidden))
        self._greedy[rows].copy_(greedy_tokens(self._logits[rows]))
        self.table.write_tokens(static.entries[rows], self._greedy[rows])

    def _read_states(self, entries: Tensor, is_padding: Tensor) -> StepStates | None:
        """States of a recorded step, whose rows are read on the device. A table entry is a slot."""
        if self.states is None:
            return None
        starts = torch.arange(len(entries), dtype=torch.int32, device=entries.device)
        ends = starts + (~is_padding).to(torch.int32)
        return self.states.step_of(StateRows(starts, ends, entries.to(torch.int32), longest=1))

    def _load_rows(
        self,
        size: int,
        columns: NDArray[np.int64],
        slots: Sequence[NDArray[np.int64]],
        views: Sequence[PagedRows],
    ) -> None:
        """Args: `columns`: token ids, positions and table entries; `slots`: of KV, by table of the
        pool."""
        n = columns.shape[1]
        dummy_page = self.kv.dummy_page
        assert dummy_page is not None, "pools of recorded steps have a page for padding"
        padded = [pad_decode(rows, size, dummy_page) for rows in views]
        filled = np.zeros((3 + len(slots), size), np.int64)
        filled[:3, :n] = columns
        filled[2, n:] = self.table.dummy
        for column, of_table in zip(filled[3:], slots, strict=True):
            column[:] = pad_slots(of_table, size, dummy_page, self.kv.page_size)
        self._static.fill(self.stream, filled, padded)
        self.attn.plan_replay(size, padded)

    def size_for(self, step: StepInputs, indices: StepArrays) -> int | None:
        """Capture size that runs this step, whose drafts are rows (`separate_drafts`); None: it
        runs eagerly."""
        rows = len(indices.kv_lens)
        # A recording has one token per row, each sampled: prompts have more, or sample none.
        if step.num_answering_tokens < rows or len(indices.sample_index) < rows:
            return None
        size = capture_size(self.sizes, rows)
        # Rows that share a long prefix name its pages once each, which may exceed the recorded
        # buffer.
        if size is None or len(indices.page_indices) + size - rows > self._static.pages:
            return None
        return size

    def load_step(self, size: int, step: StepInputs, indices: StepArrays) -> None:
        """Queue the step's index arrays, and plan for them.

        Waits for nothing but the plan before.
        """
        tables = [indices.page_indices, *(pages for _, pages in indices.further)]
        views = decode_rows(
            indices.kv_lens, indices.page_indptr, tables, self.attn.views, self.kv.page_size
        )
        entries = np.repeat(step.slots, step.lengths)
        columns = np.stack((indices.token_ids, indices.positions, entries))
        slots = [indices.slot_mapping, *(slots for slots, _ in indices.further)]
        self._load_rows(size, columns, slots, views)

    def replay_step(self, size: int, n: int) -> ReplayedStep:
        """Queue the step of n tokens that was loaded."""
        self._replays[size]()
        replayed = ReplayedStep(self._logits[:n], self._greedy[:n], self._static.entries[:n])
        if self._head_states is None:
            return replayed
        # A head stores entries of several steps together.
        return replayed._replace(
            states=self._head_states[:n].clone(), token_ids=self._token_ids[:n].clone()
        )
