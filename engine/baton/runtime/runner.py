"""Carries a StepPlan out on the device: plan → index tensors → forward → one token per sampling row.

Pages that the plan moves between device and host are copied before its rows run, in the plan's order.

Per slot it keeps what plans leave out: the page table (plans carry only its growth), the last sampled token (the token
table that lets step n+1 be planned before step n's tokens are known) and the sampler's view of the sequence.

Not thread-safe: one thread calls `execute`, in plan order.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.models.decoder import Decoder
from baton.runtime.attention.base import AttentionBackend, ForwardBatch
from baton.runtime.kv_pool import KvTensors, copy_pages
from baton.runtime.sampler import SampleRow, sample
from baton.sched.plan import UNKNOWN_TOKEN, Row, StepPlan, StepResult


class Runner:
    """Args: `announces_writes`: tell the native pool which pages get new content, because peers may be reading it.

    `host`: the pool that plans copy to and from (kv_pool.make_host_pool).
    """

    def __init__(
        self,
        model: Decoder,
        kv: KvTensors,
        attn: AttentionBackend,
        max_slots: int,
        *,
        announces_writes: bool = False,
        host: Tensor | None = None,
    ) -> None:
        self._model = model
        self._kv = kv
        self._host = host
        self._attn = attn
        self._page_size = kv.page_size
        longest = -(-model.spec.max_context // kv.page_size) + 1
        self._page_table: NDArray[np.int32] = np.zeros((max_slots, min(longest, kv.num_pages)), np.int32)
        self._last_token: NDArray[np.int64] = np.full(max_slots, UNKNOWN_TOKEN, np.int64)
        self._sample_rows: list[SampleRow | None] = [None] * max_slots
        self._native_pool = kv.native if announces_writes else None
        self._compute_device = kv.data.device

    @property
    def page_bytes(self) -> int:
        return self._kv.page_bytes

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step to its end. Raises what torch raises; the runner is then unusable."""
        for adm in plan.admitted:
            self._sample_rows[adm.slot] = SampleRow(adm.params, adm.prompt_tokens, adm.history)
        if self._native_pool is not None and plan.new_pages:
            self._native_pool.begin_write(plan.new_pages.tobytes())
        copy_seconds = self._copy(plan)
        if not plan.rows:
            return StepResult((), copy_seconds=copy_seconds)
        sampling = [row for row in plan.rows if row.sample]
        logits = self._model.forward(self._batch(plan), self._attn)
        if not sampling:
            return StepResult((), copy_seconds=copy_seconds)
        sample_rows = [self._sample_row(row) for row in sampling]
        # Elsewhere than on the CPU this waits for the step: sampling is written for the host.
        result = sample(logits.cpu(), sample_rows)
        for row, sample_row, token in zip(sampling, sample_rows, result.tokens, strict=True):
            sample_row.append(token)
            self._last_token[row.slot] = token
        return replace(result, copy_seconds=copy_seconds)

    def _copy(self, plan: StepPlan) -> float:
        """Returns the seconds it took; 0 on a device that copies while the host goes on, which cannot tell."""
        if not plan.copies:
            return 0.0
        assert self._host is not None, "the plan moves pages to a host pool that is not there"
        started = time.monotonic()
        for run in plan.copies:
            copy_pages(self._kv.data, self._host, run)
        return time.monotonic() - started if self._kv.data.device.type == "cpu" else 0.0

    def _sample_row(self, row: Row) -> SampleRow:
        sample_row = self._sample_rows[row.slot]
        assert sample_row is not None, f"slot {row.slot} was never admitted"
        return sample_row

    def _batch(self, plan: StepPlan) -> ForwardBatch:
        """Index tensors of a step, vectorised over its rows."""
        rows = plan.rows
        count = len(rows)
        slots = np.fromiter((row.slot for row in rows), np.int64, count)
        starts = np.fromiter((row.start for row in rows), np.int64, count)
        lengths = np.fromiter((row.n for row in rows), np.int64, count)
        for row in rows:
            if row.pages:
                self._page_table[row.slot, row.page_base : row.page_base + len(row.pages)] = row.pages
        qo_indptr = np.zeros(count + 1, np.int32)
        np.cumsum(lengths, out=qo_indptr[1:])
        kv_lens = starts + lengths
        row_of_token = np.repeat(np.arange(count), lengths)
        positions = np.arange(qo_indptr[-1], dtype=np.int64) - qo_indptr[row_of_token] + starts[row_of_token]
        token_ids = np.concatenate([np.frombuffer(row.tokens, np.int32) for row in rows]).astype(np.int64)
        unknown = token_ids == UNKNOWN_TOKEN
        if unknown.any():
            token_ids[unknown] = self._last_token[slots[row_of_token[unknown]]]
        pages = self._page_table[slots[row_of_token], positions // self._page_size].astype(np.int64)
        num_pages = -(-kv_lens // self._page_size)
        page_indptr = np.zeros(count + 1, np.int32)
        np.cumsum(num_pages, out=page_indptr[1:])
        page_indices = np.concatenate([self._page_table[slot, :n] for slot, n in zip(slots, num_pages, strict=True)])
        sample_index = np.fromiter((i for i, row in enumerate(rows) if row.sample), np.int64)
        return ForwardBatch(
            token_ids=self._on_device(token_ids),
            positions=self._on_device(positions),
            qo_indptr=torch.from_numpy(qo_indptr),
            kv_lens=torch.from_numpy(kv_lens.astype(np.int32)),
            page_indptr=torch.from_numpy(page_indptr),
            page_indices=torch.from_numpy(page_indices),
            slot_mapping=self._on_device(pages * self._page_size + positions % self._page_size),
            sample_index=self._on_device(qo_indptr[1:][sample_index].astype(np.int64) - 1),
            num_decode=plan.num_decode,
            max_kv_len=int(kv_lens.max()),
        )

    def _on_device(self, ids: NDArray[np.int64]) -> Tensor:
        """On the CPU a view of `ids`."""
        return torch.from_numpy(ids).to(self._compute_device)
