"""Attention by flashinfer's paged kernels, for a pool in CUDA memory.

1. `FlashInferAttention(spec, kv)` makes a decode and a prefill wrapper per window size of the model, since a wrapper is
planned for one window; 2. `plan(batch)` cuts the step into decode and prefill rows (`paged_plan`) and plans the
wrappers that have rows; 3. `forward` per layer writes K and V into the pages and runs them; 4. the next `plan` replaces
the step.

What is assumed of flashinfer 0.6:

* The cache is given as a tuple (K, V) of NHD views [pages, page_size, heads, dim] into the page-major pool. A view's
  pages lie page_bytes apart instead of back to back; kernels take that stride from the tensor (flashinfer pull request
  513), K's and V's strides are equal, and the last dimension is contiguous.
* q may be a view into the fused projection: strides of tokens and heads are free (pull request 553).
* With `causal`, the last query of a row is its last KV position; `window_left` counts the tokens to the left of a query
  that it sees besides itself: our window W, which includes the token itself, is W - 1.
* Slots behind a row's last token may hold anything, NaN included, without touching the result.
* Wrappers that run one after the other on one stream may share the float workspace; the integer one is each its own.
* `plan` stages its arrays in pinned memory that it uses again, and copies them asynchronously: the next `plan` has to
  wait until that copy is done.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.errors import ConfigError
from baton.models.spec import ModelSpec
from baton.runtime import flashinfer_library
from baton.runtime.attention.base import ForwardBatch
from baton.runtime.attention.paged_plan import PagedRows, split_step
from baton.runtime.kv_pool import KvTensors

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
MAX_PAGE_SIZE = 64
WORKSPACE_BYTES = 128 << 20
"""What flashinfer's documentation gives a wrapper; partial results of long rows that are split over thread blocks."""
KERNELS = "fa2"
"""One family of kernels for all GPUs since Ampere: strides and windows are taken the same way everywhere."""


def obstacle(spec: ModelSpec, kv: KvTensors) -> str | None:
    """What keeps flashinfer from serving this model and pool here, as the middle of a sentence; None: nothing."""
    return _unsupported(spec, kv) or _missing(kv.data.device)


def _unsupported(spec: ModelSpec, kv: KvTensors) -> str | None:
    if kv.data.dtype not in DTYPES:
        return f"it computes in float16 or bfloat16, the KV pool is {str(kv.data.dtype).removeprefix('torch.')}"
    if spec.head_dim not in HEAD_DIMS:
        return f"it takes heads of {', '.join(map(str, HEAD_DIMS))}, the model's have {spec.head_dim}"
    if spec.num_heads % spec.num_kv_heads:
        return f"it takes whole groups, the model has {spec.num_heads} query and {spec.num_kv_heads} KV heads"
    if kv.page_size > MAX_PAGE_SIZE:
        return f"it is used with pages up to {MAX_PAGE_SIZE} tokens, --page-size is {kv.page_size}"
    return None


def _missing(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, the KV pool is on {device.type}"
    return flashinfer_library.obstacle()


@dataclass(frozen=True, slots=True)
class _Wrappers:
    decode: Any
    prefill: Any


class FlashInferAttention:
    """Paged causal attention with grouped queries, per-layer windows and soft-capped logits.

    Args:
        library: the flashinfer module; None imports it. The rest of this class knows no CUDA.
        logits_soft_cap: c > 0 turns a logit x into c * tanh(x / c), for all layers; 0 leaves it.
    Raises:
        ConfigError: this model or pool is outside what the kernels take, or flashinfer cannot run here.
    """

    def __init__(self, spec: ModelSpec, kv: KvTensors, library: Any = None, *, logits_soft_cap: float = 0.0) -> None:
        problem = obstacle(spec, kv) if library is None else _unsupported(spec, kv)
        if problem is not None:
            raise ConfigError(f"--attention-backend flashinfer: {problem}; use auto or torch")
        library = library or flashinfer_library.load()
        self._spec = spec
        self._kv = kv
        self._scale = 1.0 / math.sqrt(spec.head_dim)
        self._soft_cap = logits_soft_cap
        self._layers = [(kv.data[:, layer, 0], kv.data[:, layer, 1]) for layer in range(spec.num_layers)]
        self._wrappers = self._make_wrappers(library)
        self._planned = torch.cuda.Event() if kv.data.is_cuda else None
        self._slots: tuple[Tensor, Tensor] | None = None
        self._num_decode = 0

    def _make_wrappers(self, library: Any) -> dict[int, _Wrappers]:
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._kv.data.device)
        # The kernels without tensor cores are built for groups of 1 and 2 here; from 4 on tensor cores are faster.
        group = self._spec.num_heads // self._spec.num_kv_heads
        return {
            window: _Wrappers(
                library.BatchDecodeWithPagedKVCacheWrapper(
                    workspace, "NHD", use_tensor_cores=group > 2, backend=KERNELS
                ),
                library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=KERNELS),
            )
            for window in sorted(set(self._spec.windows))
        }

    def plan(self, batch: ForwardBatch) -> None:
        """Takes the batch's index tensors on the host. Raises ValueError when they contradict each other."""
        if self._planned is not None:
            self._planned.synchronize()
        size = self._kv.page_size
        arrays = (batch.qo_indptr, batch.kv_lens, batch.page_indptr, batch.page_indices)
        indices = split_step(*(x.numpy() for x in arrays), batch.num_decode, size)
        slots = batch.slot_mapping.to(self._kv.data.device)
        self._slots = (slots // size, slots % size)
        self._num_decode = len(indices.decode)
        for window, wrappers in self._wrappers.items():
            if len(indices.decode):
                self._plan(wrappers.decode, window, _tensors(indices.decode))
            if len(indices.prefill):
                rows = (torch.from_numpy(indices.qo_indptr), *_tensors(indices.prefill))
                self._plan(wrappers.prefill, window, rows, causal=True)
        if self._planned is not None:
            self._planned.record()

    def _plan(self, wrapper: Any, window: int, rows: tuple[Tensor, ...], **only_prefill: bool) -> None:
        spec, dtype = self._spec, self._kv.data.dtype
        wrapper.plan(
            *rows,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            self._kv.page_size,
            window_left=window - 1 if window else -1,
            logits_soft_cap=self._soft_cap,
            sm_scale=self._scale,
            q_data_type=dtype,
            kv_data_type=dtype,
            **only_prefill,
        )

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self._slots is not None, "plan() comes first"
        keys, values = pages = self._layers[layer]
        keys[self._slots] = k
        values[self._slots] = v
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        wrappers, n = self._wrappers[self._spec.windows[layer]], self._num_decode
        if n:
            wrappers.decode.run(q[:n], pages, out=out[:n])
        if n < len(q):
            wrappers.prefill.run(q[n:], pages, out=out[n:])
        return out.view(len(q), self._spec.q_size)


def _tensors(rows: PagedRows) -> tuple[Tensor, Tensor, Tensor]:
    return torch.from_numpy(rows.kv_indptr), torch.from_numpy(rows.kv_indices), torch.from_numpy(rows.last_page_len)
