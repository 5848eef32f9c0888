"""Norm, rotate and store the heads of one layer in one launch, in Triton.

The heads are the fused projection [q | k | v] of each token. One program takes HEADS of them:

    q   RMS norm (models that have it), rotation    written in place, for attention to read
    k   RMS norm (models that have it), rotation    written to the token's slot in the KV pool
    v                                               written to the token's slot in the KV pool

Arithmetic and rounding are those of plain torch (`layers.ops`): a norm's mean and the rotation in
float32; a norm's quotient, its product with the weight, and the rotated value are each rounded to
the heads' type.

The host waits for nothing and nothing is allocated, so it can be part of a CUDA graph. Tested on
the CPU by Triton's interpreter (tests/unit/layers/kernels/test_heads.py).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

HEADS = 4
WARPS = 4


def store_heads(
    heads: Tensor,
    num_heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    positions: Tensor,
    tables: tuple[Tensor, Tensor],
    pages: tuple[Tensor, Tensor],
    slots: Tensor,
) -> None:
    """Rotate heads and write K and V into their pages.

    Args:
        heads: [T, Hq + 2 * Hk, D], T >= 1, last dimension contiguous. The first Hq (`num_heads`)
        are overwritten.
        norms: weights [D] of the norms of q and k; None for models without.
        positions: int64 [T].
        tables: cos and sin, float32 [C, D/2] with equal strides; dimension i turns with i + D/2.
        pages: K and V, each [pages, page_size, Hk, D] with equal strides, the last dimension
        contiguous.
        slots: int64 [T]: page * page_size + offset; nothing is stored for a token whose slot is
        negative.
    """
    keys, values = pages
    cos, sin = tables
    tokens, every, dim = heads.shape
    assert keys.stride() == values.stride(), "K and V of one layer lie alike"
    assert cos.stride() == sin.stride(), "cos and sin lie alike"
    q_norm, k_norm = norms if norms is not None else (heads, heads)
    _store_heads[(tokens, triton.cdiv(every, HEADS))](
        heads, heads.stride(0), heads.stride(1), q_norm, k_norm, eps, positions, cos, sin, cos.stride(0), slots,
        keys, values, keys.stride(0), keys.stride(1), keys.stride(2), keys.shape[1],
        Q_HEADS=num_heads, KV_HEADS=keys.shape[2], HALF=dim // 2, BLOCK=triton.next_power_of_2(dim // 2), HEADS=HEADS,
        HAS_NORM=norms is not None, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _normalize_heads(x, scale, weight, is_v, DTYPE: tl.constexpr):
    quotient = (x * scale[:, None]).to(DTYPE).to(tl.float32)
    return tl.where(is_v[:, None], x, (quotient * weight).to(DTYPE).to(tl.float32))


# Where a step's arrays lie in their one copy depends on its size: without alignment there is one
# variant to compile.
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _store_heads(
    heads, token_stride, head_stride, q_norm, k_norm, eps, positions, cos, sin, table_stride, slots,
    keys, values, page_stride, slot_stride, kv_head_stride, page_size,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, BLOCK)
    is_q = head < Q_HEADS
    is_v = head >= Q_HEADS + KV_HEADS
    inside = (head < Q_HEADS + 2 * KV_HEADS)[:, None] & (dims < HALF)[None, :]
    there = heads + token * token_stride + head[:, None] * head_stride + dims[None, :]
    dtype: tl.constexpr = heads.dtype.element_ty
    x = tl.load(there, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(there + HALF, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * HALF) + eps)
        is_dim = (dims < HALF)[None, :]
        q_at = q_norm + dims[None, :]
        k_at = k_norm + dims[None, :]
        left = tl.where(is_q[:, None], tl.load(q_at, mask=is_dim), tl.load(k_at, mask=is_dim)).to(
            tl.float32
        )
        q_at = q_at + HALF
        k_at = k_at + HALF
        right = tl.where(is_q[:, None], tl.load(q_at, mask=is_dim), tl.load(k_at, mask=is_dim)).to(
            tl.float32
        )
        x = _normalize_heads(x, scale, left, is_v, dtype)
        y = _normalize_heads(y, scale, right, is_v, dtype)

    row = tl.load(positions + token) * table_stride + dims[None, :]
    c = tl.load(cos + row, mask=(dims < HALF)[None, :])
    s = tl.load(sin + row, mask=(dims < HALF)[None, :])
    rotated_x = x * c - y * s
    rotated_y = y * c + x * s
    x = tl.where(is_v[:, None], x, rotated_x)
    y = tl.where(is_v[:, None], y, rotated_y)

    tl.store(there, x.to(dtype), mask=inside & is_q[:, None])
    tl.store(there + HALF, y.to(dtype), mask=inside & is_q[:, None])
    slot = tl.load(slots + token)
    page = slot // page_size
    offset = slot % page_size
    kv_head = tl.where(is_v, head - Q_HEADS - KV_HEADS, head - Q_HEADS)
    kv_offsets = (
        page * page_stride
        + offset * slot_stride
        + kv_head[:, None] * kv_head_stride
        + dims[None, :]
    )
    if slot >= 0:
        is_k = inside & ((head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS))[:, None]
        tl.store(keys + kv_offsets, x.to(dtype), mask=is_k)
        tl.store(keys + kv_offsets + HALF, y.to(dtype), mask=is_k)
        tl.store(values + kv_offsets, x.to(dtype), mask=inside & is_v[:, None])
        tl.store(values + kv_offsets + HALF, y.to(dtype), mask=inside & is_v[:, None])
