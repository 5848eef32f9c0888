"""The attention block: q, k, v of one product, norms, rotation, attention over the pages,
projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from baton.layers import ops
from baton.layers.attention.base import AttentionBackend, ForwardBatch, PagedAttention
from baton.models.blocks.rope import RopeTables
from baton.models.blocks.tensors import move_tensors
from baton.models.spec.attention import AttentionBlockSpec


@dataclass(slots=True)
class AttentionBlock:
    """Weights in compute dtype, contiguous. Matrices are [out, in]; see `spec.attention` for the
    stacked one."""

    spec: AttentionBlockSpec
    """This rank's share."""
    eps: float
    """Added to the mean square in the norms of q and k."""
    qkv: ops.Matrix
    o: ops.Matrix
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    o_bias: Tensor | None = None

    def to(self, device: torch.device) -> None:
        move_tensors(self, device)

    def pack(self) -> None:
        """Re-order the matrices for the CPU kernels."""
        self.qkv = ops.pack_weight(self.qkv)
        self.o = ops.pack_weight(self.o)

    def attend(
        self, layer: int, x: Tensor, batch: ForwardBatch, attn: AttentionBackend, rope: RopeTables
    ) -> Tensor:
        """x [T, hidden]: the heads' results [T, Hq * D], after K and V of the step are in the
        pages."""
        spec = self.spec.heads
        heads = ops.linear(x, self.qkv, self.qkv_bias).view(len(x), -1, spec.head_dim)
        if (store_heads := ops.head_kernel(x)) is not None:
            norms = None
            if self.q_norm is not None and self.k_norm is not None:
                norms = (self.q_norm, self.k_norm)
            paged = cast("PagedAttention", attn)
            store_heads(
                heads,
                spec.num_heads,
                norms,
                self.eps,
                batch.positions,
                (rope.cos, rope.sin),
                paged.pages(layer),
                batch.slot_mapping,
            )
            return paged.attend(layer, heads[:, : spec.num_heads])
        q, k, v = heads.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q = ops.rms_norm(q, self.q_norm, self.eps)
            k = ops.rms_norm(k, self.k_norm, self.eps)
        turned = self.spec.rope.rotary_dim(spec.head_dim)
        if turned == spec.head_dim:
            q, k = ops.apply_rope(q, k, batch.positions, rope.cos, rope.sin)
        else:
            # The first dimensions turn in place, the others pass.
            ops.apply_rope(q[..., :turned], k[..., :turned], batch.positions, rope.cos, rope.sin)
        return attn.forward(layer, q, k, v)

    def project(self, attended: Tensor) -> Tensor:
        """attended [T, Hq * D]: this rank's part of the result [T, hidden]."""
        return ops.linear(attended, self.o, self.o_bias)
