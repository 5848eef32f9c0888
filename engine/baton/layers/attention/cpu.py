"""Attention by the native CPU kernels: the default backend.

1. `CpuAttention(layers, kv)` describes each layer of the pool to the kernels once; 2. `plan(batch)`
checks the step's index tensors and hands over their addresses; 3. `forward` per layer writes K and
V into the pages and attends, in two native calls that release the GIL; 4. the next `plan` replaces
the step.

Exact, bit for bit (see engine/kernels/src/lib.rs): a token's output does not depend on the other
rows of the batch, on how its prompt was cut into chunks, on prefill or decode, nor on the number of
threads. It may differ in rounding between CPUs of different instruction levels
(`baton._native.cpu_isa()`).

Shapes and layout are checked here and nowhere below: the kernels take addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton import _native
from baton.errors import ConfigError
from baton.layers.attention.base import ForwardBatch
from baton.layers.kv_pool import KvTensors
from baton.layers.ops_cpu import checked_address
from baton.layers.spec import AttentionSpec, common_heads

MAX_HEAD_DIM = 256
_DTYPES = (torch.float32, torch.bfloat16)


class CpuAttention:
    """Paged causal attention with grouped queries, per-layer windows and soft-capped scores, on CPU
    tensors in float32 or bfloat16."""

    def __init__(self, layers: Sequence[AttentionSpec], kv: KvTensors) -> None:
        data = kv.data
        heads = common_heads(layers)
        _check_pool(heads, data)
        self._kv = kv  # keeps the memory the layers point into
        self._windows = tuple(layer.window for layer in layers)
        """By layer."""
        self._dtype = data.dtype
        self._scale = heads.scale
        self._soft_cap = heads.soft_cap
        bf16 = data.dtype == torch.bfloat16
        shape = (kv.page_size, heads.num_kv_heads, heads.head_dim)
        self._layers = [
            _native.KvLayer(data[0, layer, 0].data_ptr(), bf16, data.stride(0), *shape)
            for layer in range(len(layers))
        ]
        self._q_shape = (heads.num_heads, heads.head_dim)
        self._kv_shape = (heads.num_kv_heads, heads.head_dim)
        self._batch: ForwardBatch | None = None
        self._rows: _native.KvRows | None = None
        self._tokens = 0

    def plan(self, batch: ForwardBatch) -> None:
        """Raises ValueError when an index tensor has the wrong type or length, or leads out of the
        pool."""
        rows = len(batch.kv_lens)
        tokens = len(batch.slot_mapping)
        pages = len(batch.page_indices)
        lengths = {
            "qo_indptr": rows + 1,
            "kv_lens": rows,
            "page_indptr": rows + 1,
            "page_indices": pages,
        }
        arrays = [
            checked_address(name, getattr(batch, name), torch.int32, (n,))
            for name, n in lengths.items()
        ]
        slots = checked_address("slot_mapping", batch.slot_mapping, torch.int64, (tokens,))
        self._rows = _native.KvRows(
            self._kv.num_pages, self._kv.page_size, rows, tokens, pages, *arrays, slots
        )
        self._batch = batch  # keeps the tensors the rows point to
        self._tokens = tokens

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v may be views into one projection: only the stride between tokens is free."""
        assert self._rows is not None, "plan() comes first"
        q_stride = self._token_stride("q", q, self._q_shape)
        k_stride = self._token_stride("k", k, self._kv_shape)
        v_stride = self._token_stride("v", v, self._kv_shape)
        heads, dim = self._q_shape
        out = torch.empty(self._tokens, heads * dim, dtype=self._dtype)
        pages = self._layers[layer]
        _native.append(pages, self._rows, k.data_ptr(), k_stride, v.data_ptr(), v_stride)
        window = self._windows[layer]
        _native.attend(
            pages,
            self._rows,
            q.data_ptr(),
            q_stride,
            out.data_ptr(),
            heads,
            self._scale,
            window,
            self._soft_cap,
        )
        return out

    def _token_stride(self, name: str, x: Tensor, heads: tuple[int, int]) -> int:
        strides = x.stride()
        if (
            x.shape != (self._tokens, *heads)
            or x.dtype != self._dtype
            or strides[1:] != (heads[1], 1)
        ):
            expected_layout = (
                f"{self._dtype} [{self._tokens}, {heads[0]}, {heads[1]}] with contiguous heads"
            )
            raise ValueError(
                f"{name} is {x.dtype} {list(x.shape)} with strides {strides}, not {expected_layout}"
            )
        return strides[0]


def _check_pool(spec: AttentionSpec, data: Tensor) -> None:
    if data.dtype not in _DTYPES or not data.is_cpu or not data.is_contiguous():
        raise ConfigError(
            f"--attention-backend cpu: the KV pool is {data.dtype} on {data.device}; use torch"
        )
    if (
        not 0 < spec.head_dim <= MAX_HEAD_DIM
        or spec.head_dim % 2
        or spec.num_heads % spec.num_kv_heads
    ):
        shape = f"{spec.num_heads} query and {spec.num_kv_heads} KV heads of {spec.head_dim}"
        raise ConfigError(
            f"--attention-backend cpu: {shape}; it takes even head sizes up to {MAX_HEAD_DIM} and whole groups: "
            "use torch"
        )
