"""Attention by the native CPU kernels: the default backend.

1. `CpuAttention(layers, kv)`, or `CpuLatentAttention` for layers with latents, describes each layer
of the pool to the kernels once; 2. `plan(batch)` checks the step's index tensors and hands over
their addresses; 3. `forward` per layer writes the step's tokens into the pages and attends, in two
native calls that release the GIL; 4. the next `plan` replaces the step.

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
from baton.layers.spec import AttentionSpec, LatentSpec, common_heads

MAX_HEAD_DIM = 256
MAX_ROW_DIM = 576
"""Of a latent and its key together."""
_DTYPES = (torch.float32, torch.bfloat16)


class _StepRows:
    """What the backends of this module have alike: a pool, and the rows of a step."""

    def __init__(self, kv: KvTensors) -> None:
        """Raises ConfigError for a pool that the kernels cannot read."""
        data = kv.data
        if kv.compute_dtype not in _DTYPES or not data.is_cpu or not data.is_contiguous():
            raise ConfigError(
                f"--attention-backend cpu: the KV pool is {data.dtype} on {data.device}; use torch"
            )
        self._kv = kv  # keeps the memory the layers point into
        self._dtype = kv.compute_dtype
        self._batch: ForwardBatch | None = None
        self._places = kv.spec.layer_places
        self._rows: list[_native.KvRows] = []
        """By table of the pool."""
        self._tokens = 0

    def plan(self, batch: ForwardBatch) -> None:
        """Raises ValueError when an index tensor has the wrong type or length, or leads out of the
        pool."""
        rows = len(batch.kv_lens)
        tokens = len(batch.slot_mapping)
        pages = len(batch.page_indices)
        lengths = {"qo_indptr": rows + 1, "kv_lens": rows, "page_indptr": rows + 1}
        arrays = [
            checked_address(name, getattr(batch, name), torch.int32, (n,))
            for name, n in lengths.items()
        ]
        sizes = (self._kv.num_pages, self._kv.page_size, rows, tokens, pages)
        self._rows = []
        for table in batch.tables:
            indices = checked_address("page_indices", table.page_indices, torch.int32, (pages,))
            slots = checked_address("slot_mapping", table.slot_mapping, torch.int64, (tokens,))
            self._rows.append(_native.KvRows(*sizes, *arrays, indices, slots))
        self._batch = batch  # keeps the tensors the rows point to
        self._tokens = tokens

    def _token_stride(self, name: str, x: Tensor, heads: tuple[int, int]) -> int:
        """Elements from a token of x [T, *heads] to the next. Raises ValueError for another shape
        or type, and for heads that are apart."""
        strides = x.stride()
        has_dense_heads = strides[2] == 1 and (strides[1] == heads[1] or heads[0] == 1)
        if x.shape != (self._tokens, *heads) or x.dtype != self._dtype or not has_dense_heads:
            expected_layout = (
                f"{self._dtype} [{self._tokens}, {heads[0]}, {heads[1]}] with contiguous heads"
            )
            raise ValueError(
                f"{name} is {x.dtype} {list(x.shape)} with strides {strides}, not {expected_layout}"
            )
        return strides[0]


class CpuAttention(_StepRows):
    """Paged causal attention with grouped queries, windows or chunks by layer, soft-capped scores
    and sinks, on CPU tensors in float32 or bfloat16, over pages of that type or of FP8 codes."""

    def __init__(self, layers: Sequence[AttentionSpec], kv: KvTensors) -> None:
        super().__init__(kv)
        data = kv.data
        heads = common_heads(layers)
        _check_heads(heads)
        self._sights = tuple(layer.sight for layer in layers)
        """By layer."""
        self._scale = heads.scale
        self._soft_cap = heads.soft_cap
        bf16 = self._dtype == torch.bfloat16
        scales: list[tuple[float, float] | None] = [None] * len(layers)
        if kv.scales:
            scales = [(layer.key, layer.value) for layer in kv.scales]
        shape = (kv.page_size, heads.num_kv_heads, heads.head_dim)
        self._layers = [
            _native.KvLayer(data[0, place.row, 0].data_ptr(), bf16, scale, data.stride(0), *shape)
            for place, scale in zip(self._places, scales, strict=True)
        ]
        self._q_shape = (heads.num_heads, heads.head_dim)
        self._kv_shape = (heads.num_kv_heads, heads.head_dim)

    def forward(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """q, k, v may be views into one projection: only the stride between tokens is free."""
        assert self._rows, "plan() comes first"
        q_stride = self._token_stride("q", q, self._q_shape)
        k_stride = self._token_stride("k", k, self._kv_shape)
        v_stride = self._token_stride("v", v, self._kv_shape)
        heads, dim = self._q_shape
        out = torch.empty(self._tokens, heads * dim, dtype=self._dtype)
        pages = self._layers[layer]
        rows = self._rows[self._places[layer].table]
        _native.append(pages, rows, k.data_ptr(), k_stride, v.data_ptr(), v_stride)
        sinks_at = 0
        if sinks is not None:
            sinks_at = checked_address("sinks", sinks, torch.float32, (heads,))
        _native.attend(
            pages,
            rows,
            q.data_ptr(),
            q_stride,
            out.data_ptr(),
            heads,
            self._scale,
            *self._sights[layer],
            self._soft_cap,
            sinks_at,
        )
        return out


class CpuLatentAttention(_StepRows):
    """Paged causal attention over latents, on CPU tensors in float32 or bfloat16."""

    def __init__(self, latents: LatentSpec, num_layers: int, kv: KvTensors) -> None:
        super().__init__(kv)
        _check_latents(latents)
        self._spec = latents
        self._q_shape = (latents.num_heads, latents.row_dim)
        data = kv.data
        bf16 = data.dtype == torch.bfloat16
        shape = (kv.page_size, latents.latent_dim, latents.key_dim)
        self._layers = [
            _native.LatentLayer(data[0, layer].data_ptr(), bf16, data.stride(0), *shape)
            for layer in range(num_layers)
        ]

    def forward(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """q is contiguous; of k (latents) and v (rotated keys) the stride between tokens is free."""
        assert self._rows, "plan() comes first"
        (rows,) = self._rows
        spec = self._spec
        q_at = checked_address("q", q, self._dtype, (self._tokens, *self._q_shape))
        latent_stride = self._token_stride("k", k, (1, spec.latent_dim))
        key_stride = self._token_stride("v", v, (1, spec.key_dim))
        out = torch.empty(self._tokens, spec.result_size, dtype=self._dtype)
        pages = self._layers[layer]
        _native.append_latents(pages, rows, k.data_ptr(), latent_stride, v.data_ptr(), key_stride)
        _native.attend_latents(pages, rows, q_at, out.data_ptr(), spec.num_heads, spec.scale)
        return out


def _check_heads(spec: AttentionSpec) -> None:
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


def _check_latents(spec: LatentSpec) -> None:
    if spec.row_dim > MAX_ROW_DIM or spec.latent_dim % 2 or spec.key_dim % 2:
        raise ConfigError(
            f"--attention-backend cpu: latents of {spec.latent_dim} with keys of {spec.key_dim}; "
            f"it takes even sizes up to {MAX_ROW_DIM} together: use torch"
        )
