"""Attention by flashinfer's paged kernels, for a pool in CUDA memory.

1. `FlashInferAttention(layers, kv)` makes a decode and one or two prefill wrappers per view of the
model's layers (a table of the pool, and what a layer sees of it), since a wrapper is planned for
one window and one list of pages; 2. `plan(batch)` leaves out the pages that a view does not see
(`see_rows`), cuts the step into decode and prefill rows (`split_step`) and plans the wrappers that
have rows; 3. `forward` per layer writes K and V into the pages and runs them; 4. the next `plan`
replaces the step.

The kernels know no sinks. A sink s is one more score without a value, so it scales a head's result:
with the log-sum-exp l of the other scores, by exp(l) / (exp(l) + exp(s)).

What is assumed of flashinfer 0.6:

* The cache is given as a tuple (K, V) of NHD views [pages, page_size, heads, dim] into the
page-major pool. A view's
  pages lie page_bytes apart instead of back to back; kernels take that stride from the tensor
  (flashinfer pull request 513), K's and V's strides are equal, and the last dimension is
  contiguous.
* q may be a view into the fused projection: strides of tokens and heads are free (pull request
553).
* With `causal`, the last query of a row is its last KV position; `window_left` counts the tokens to
the left of a query
  that it sees besides itself: our window W, which includes the token itself, is W - 1.
* `lse` is the base-2 logarithm of the sum of exp(score), float32 [tokens, heads], of scores with
scale and soft cap
  (attention/state.cuh, hopper/attention_updater.cuh in 0.6.18).
* Pages of FP8 codes are multiplied by queries of the compute type; `k_scale` multiplies scores, and
`v_scale` the results once they are rounded.
* Slots behind a row's last token may hold anything, NaN included, without touching the result.
* Wrappers that run one after the other on one stream may share the float workspace; the integer one
is each its own.
* `plan` stages its arrays in pinned memory that it uses again, and copies them asynchronously: the
next `plan` has to
  wait until that copy is done.
* In CUDA-graph mode a wrapper is for one batch size and reads the index arrays from the buffers it
was made with. How
  the work is divided is in its integer workspace, whose layout depends on the batch size alone, and
  whose content on the rows' lengths and the window; wrappers of which one runs at a time may share
  it, and wrappers that differ in their pages alone one plan. `fast_decode_plan` fills only that
  workspace, given arrays on the host: ours are in the buffers already, and `plan` would also
  compare lengths in a loop of Python. It wants a `plan` before it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.errors import ConfigError
from baton.layers import flashinfer_loader
from baton.layers.attention.base import ForwardBatch, GraphInputs, PagedAttention
from baton.layers.attention.paged_indices import (
    PagedRows,
    View,
    see_rows,
    split_step,
)
from baton.layers.flashinfer_loader import SLOWER
from baton.layers.kv_pool import KvTensors
from baton.layers.spec import AttentionSpec, Sight, common_heads

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
MAX_PAGE_SIZE = 128
LEAST_WORKSPACE_BYTES = 128 << 20
"""Workspace that flashinfer's documentation recommends for a wrapper."""
CAPTURE_INT_WORKSPACE_BYTES = 1 << 20
"""For the wrappers of all captures with one window or chunk together. A capture takes some 30 bytes
for each row and each thread block, of which there are a few thousand."""
KERNELS = "fa2"
"""Kernel family for all GPUs since Ampere: strides and windows are taken the same way
everywhere."""
LONG_KERNELS = "fa3"
"""Kernel family of GPUs of compute capability 9.x (H100, H200) for steps that compute long parts of
prompts. It does not divide a row's KV among thread blocks, as `fa2` does."""
LONG_HEAD_DIMS = (64, 128)
LONG_TOKENS = 256
"""A step whose longest row computes so many tokens uses LONG_KERNELS."""


def find_obstacle(spec: AttentionSpec, kv: KvTensors) -> str | None:
    """Reason that keeps flashinfer from serving this model and pool, as the middle of a sentence;
    None: nothing."""
    device = kv.data.device.type
    missing = None if device == "cuda" else f"it needs a CUDA device, the KV pool is on {device}"
    return _find_unsupported(spec, kv) or missing or flashinfer_loader.find_obstacle()


def _find_unsupported(spec: AttentionSpec, kv: KvTensors) -> str | None:
    if kv.compute_dtype not in DTYPES:
        kind = str(kv.compute_dtype).removeprefix("torch.")
        return f"it computes in float16 or bfloat16, the model in {kind}"
    if spec.head_dim not in HEAD_DIMS:
        return (
            f"it takes heads of {', '.join(map(str, HEAD_DIMS))}, the model's have {spec.head_dim}"
        )
    if spec.num_heads % spec.num_kv_heads:
        return f"it takes whole groups, the model has {spec.num_heads} query and {spec.num_kv_heads} KV heads"
    if kv.page_size > MAX_PAGE_SIZE:
        return f"it is used with pages up to {MAX_PAGE_SIZE} tokens, --page-size is {kv.page_size}"
    return None


class _Wrappers(NamedTuple):
    decode: Any
    prefill: Any
    """None for a capture: it has decode rows only."""
    long_prefill: Any
    """For steps with long rows; `prefill` itself where the GPU has one kernel family only."""


class FlashInferAttention(PagedAttention):
    """Paged causal attention with grouped queries, per-layer windows or chunks, soft-capped logits
    and sinks.

    Args:
        library: the flashinfer module; None imports it. The rest of this class knows no CUDA.
    Raises:
        ConfigError: this model or pool is outside what the kernels take, or flashinfer cannot run
        here.
    """

    def __init__(
        self,
        layers: Sequence[AttentionSpec],
        kv: KvTensors,
        library: Any = None,
    ) -> None:
        heads = common_heads(layers)
        problem = find_obstacle(heads, kv) if library is None else _find_unsupported(heads, kv)
        if problem is not None:
            raise ConfigError(
                f"--attention-backend flashinfer: {problem}; use --attention-backend {SLOWER}"
            )
        library = library or flashinfer_loader.load_flashinfer()
        super().__init__(layers, kv)
        for chunk in {sight.chunk for sight in self._sights}:
            # A page with tokens of two chunks would be seen by both.
            if chunk % kv.page_size:
                raise ConfigError(
                    f"--attention-backend flashinfer: the model's layers see chunks of {chunk} "
                    f"tokens, which are no whole pages of {kv.page_size}; set --page-size to a "
                    f"divisor, or use --attention-backend {SLOWER}"
                )
        self._layer_views = [
            View(place.table, sight)
            for place, sight in zip(self._places, self._sights, strict=True)
        ]
        self.views = tuple(sorted(set(self._layer_views)))
        self._planned_views = {view.sight: view for view in reversed(self.views)}
        """The first view of each sight: captures plan for that one."""
        self._sizes = (heads.num_heads, heads.num_kv_heads, heads.head_dim, kv.page_size)
        self._arithmetic = {
            "logits_soft_cap": heads.soft_cap,
            "sm_scale": heads.scale,
            "q_data_type": kv.compute_dtype,
            "kv_data_type": kv.data.dtype,
        }
        """Arguments that are the same for all plans."""
        self._library = library
        # The kernels without tensor cores are built for groups of 1 and 2 here; from 4 on tensor
        # cores are faster.
        self._group = heads.num_heads // heads.num_kv_heads
        self._tensor_cores = self._group > 2
        self._make_decode = functools.partial(
            library.BatchDecodeWithPagedKVCacheWrapper,
            use_tensor_cores=self._tensor_cores,
            backend=KERNELS,
        )
        self._workspace = self._allocate_bytes(
            max(LEAST_WORKSPACE_BYTES, self._eager_workspace_bytes())
        )
        self._wrappers = {
            view: self._make_wrappers(view.sight, library.BatchPrefillWithPagedKVCacheWrapper)
            for view in self.views
        }
        self._captured: dict[int, dict[View, _Wrappers]] = {}
        """By rows, then by view."""
        self._capture_workspaces: tuple[Tensor, dict[Sight, Tensor]] | None = None
        """Floats for all, and integers by sight."""
        self._running = self._wrappers
        """Wrappers that `forward` uses: the eager ones, or a capture's."""
        self._planned = torch.cuda.Event() if kv.data.is_cuda else None
        self._num_decode = 0
        self._has_long_rows = False

    def _make_wrappers(self, sight: Sight, make_prefill: Callable[..., Any]) -> _Wrappers:
        decode = self._make_decode(self._workspace, "NHD")
        prefill = make_prefill(self._workspace, "NHD", backend=KERNELS)
        long_prefill = prefill
        if self._has_long_kernels(sight):
            long_prefill = make_prefill(self._workspace, "NHD", backend=LONG_KERNELS)
        return _Wrappers(decode, prefill, long_prefill)

    def _has_long_kernels(self, sight: Sight) -> bool:
        """Return whether this GPU has LONG_KERNELS, tried for such layers
        (tests/gpu/test_attention.py)."""
        data = self._kv.data
        if not data.is_cuda or torch.cuda.get_device_capability(data.device)[0] != 9:
            return False
        is_plain = sight.window == 0 and self._heads.soft_cap == 0.0
        return is_plain and data.dtype == torch.bfloat16 and self._heads.head_dim in LONG_HEAD_DIMS

    def _prefill_of(self, wrappers: _Wrappers) -> Any:
        return wrappers.long_prefill if self._has_long_rows else wrappers.prefill

    def _allocate_bytes(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self._kv.data.device)

    def plan(self, batch: ForwardBatch) -> None:
        """Takes the batch's index tensors on the host. Raises ValueError when they contradict each
        other."""
        self._await_last_plan()
        self._running = self._wrappers
        qo_indptr = batch.qo_indptr.numpy()
        tables = batch.tables
        self._set_slots(*(table.slot_mapping for table in tables))
        self._num_decode = batch.num_decode
        longest = np.diff(qo_indptr[batch.num_decode :]).max(initial=0)
        self._has_long_rows = int(longest) >= LONG_TOKENS
        row_arrays = (qo_indptr, batch.kv_lens.numpy(), batch.page_indptr.numpy())
        page_size = self._kv.page_size
        seen = {sight: see_rows(*row_arrays, sight, page_size) for sight in self._planned_views}
        for view, wrappers in self._wrappers.items():
            rows = seen[view.sight]
            indices = split_step(
                rows.qo_indptr,
                rows.kv_lens,
                rows.page_indptr,
                tables[view.table].page_indices.numpy()[rows.places],
                batch.num_decode,
                page_size,
            )
            window = view.sight.window
            if len(indices.decode):
                self._plan_wrapper(wrappers.decode.plan, window, self._row_tensors(indices.decode))
            if len(indices.prefill):
                arrays = (self._host_tensor(indices.qo_indptr), *self._row_tensors(indices.prefill))
                self._plan_wrapper(self._prefill_of(wrappers).plan, window, arrays, causal=True)
        self._note_plan()

    def _await_last_plan(self) -> None:
        if self._planned is not None:
            self._planned.synchronize()

    def _note_plan(self) -> None:
        if self._planned is not None:
            self._planned.record()

    def capture_bytes(self, largest: int) -> int:
        needed = self._capture_workspace_bytes(largest)
        return len(self._planned_views) * CAPTURE_INT_WORKSPACE_BYTES + (
            needed if needed > len(self._workspace) else 0
        )

    def prepare_capture(self, size: int, static: GraphInputs) -> None:
        if self._capture_workspaces is None:
            needed = self._capture_workspace_bytes(size)
            floats = (
                self._workspace if needed <= len(self._workspace) else self._allocate_bytes(needed)
            )
            self._capture_workspaces = (
                floats,
                {
                    sight: self._allocate_bytes(CAPTURE_INT_WORKSPACE_BYTES)
                    for sight in self._planned_views
                },
            )
        floats, integers = self._capture_workspaces
        any_rows = PagedRows(
            np.arange(size + 1, dtype=np.int32), np.zeros(size, np.int32), np.ones(size, np.int32)
        )
        captured = {}
        for view, inputs in zip(self.views, static.views, strict=True):
            wrapper = self._make_decode(
                floats,
                "NHD",
                use_cuda_graph=True,
                paged_kv_indptr_buffer=inputs.page_indptr[: size + 1],
                paged_kv_indices_buffer=inputs.page_indices,
                paged_kv_last_page_len_buffer=inputs.last_page_len[:size],
            )
            wrapper.reset_workspace_buffer(floats, integers[view.sight])
            self._plan_wrapper(wrapper.plan, view.sight.window, self._row_tensors(any_rows))
            captured[view] = _Wrappers(wrapper, None, None)
        self._note_plan()
        self._captured[size] = captured

    def _eager_workspace_bytes(self) -> int:
        """The most that splitting the rows of a step takes: into at most two thread blocks per
        multiprocessor."""
        tile = 64 if self._heads.head_dim >= 256 else 128
        return self._split_bytes(
            2 * self._count_multiprocessors() // self._heads.num_kv_heads, tile
        )

    def _capture_workspace_bytes(self, size: int) -> int:
        """Workspace for splitting the rows of the largest capture; there are at least two blocks
        per multiprocessor."""
        if not self._tensor_cores:
            return 0  # a head's share of few blocks: some MiB
        tile = (
            16
            if self._group <= 16
            else 64
            if self._group <= 64 or self._heads.head_dim >= 256
            else 128
        )
        least = 2 * self._count_multiprocessors() // self._heads.num_kv_heads
        return self._split_bytes(max(least, size - 1 + -(-size * self._group // tile)), tile)

    def _split_bytes(self, blocks: int, tile: int) -> int:
        """Partial results of thread blocks of `tile` queries (flashinfer's scheduler.cuh,
        PrefillPlan, step 2)."""
        return self._heads.num_heads * blocks * tile * (self._heads.head_dim + 1) * 4 + (1 << 20)

    def _count_multiprocessors(self) -> int:
        if not self._kv.data.is_cuda:
            return 132
        return int(torch.cuda.get_device_properties(self._kv.data.device).multi_processor_count)

    def plan_replay(self, size: int, views: Sequence[PagedRows]) -> None:
        self._await_last_plan()
        captured = self._captured[size]
        for view, rows in zip(self.views, views, strict=True):
            # The other views of a sight have rows of the same lengths, and read the same division.
            if self._planned_views[view.sight] == view:
                wrapper = captured[view].decode
                replan = functools.partial(self._library.fast_decode_plan, wrapper)
                self._plan_wrapper(replan, view.sight.window, _view_rows(rows))
        self._note_plan()

    def use_capture(self, size: int, slot_mappings: Sequence[Tensor]) -> None:
        self._running = self._captured[size]
        self._num_decode = size
        self._set_slots(*slot_mappings)

    def _plan_wrapper(
        self, plan: Callable[..., None], window: int, rows: tuple[Tensor, ...], **only_prefill: bool
    ) -> None:
        window_left = window - 1 if window else -1
        plan(*rows, *self._sizes, window_left=window_left, **self._arithmetic, **only_prefill)

    def attend(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        pages = self._pages[layer]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        wrappers = self._running[self._layer_views[layer]]
        n = self._num_decode
        factors = {}
        if self._scales:
            scales = self._scales[layer]
            factors = {"k_scale": scales.key, "v_scale": scales.value}
        sums: Tensor | None = None
        parts: list[dict[str, Any]] = [{"out": out[:n]}, {"out": out[n:]}]
        if sinks is not None:
            sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
            parts[0] |= {"lse": sums[:n], "return_lse": True}
            parts[1] |= {"lse": sums[n:], "return_lse": True}
        if n:
            wrappers.decode.run(q[:n], pages, **parts[0], **factors)
        if n < len(q):
            self._prefill_of(wrappers).run(q[n:], pages, **parts[1], **factors)
        if sinks is not None and sums is not None:
            out.mul_(torch.sigmoid(sums * math.log(2.0) - sinks).unsqueeze(-1))
        return out.view(len(q), self._heads.q_size)

    def _row_tensors(self, rows: PagedRows) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self._host_tensor(rows.kv_indptr),
            self._host_tensor(rows.kv_indices),
            self._host_tensor(rows.last_page_len),
        )

    def _host_tensor(self, x: NDArray[np.int32]) -> Tensor:
        """Where `plan` can copy it from without waiting for the device."""
        here = torch.from_numpy(x)
        return here.pin_memory() if self._kv.data.is_cuda else here


def _view_rows(rows: PagedRows) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.from_numpy(rows.kv_indptr),
        torch.from_numpy(rows.kv_indices),
        torch.from_numpy(rows.last_page_len),
    )
