"""The attention block: q, k, v of one product, norms, rotation, attention over the pages,
projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from baton.layers import ops
from baton.layers.attention.base import AttentionBackend, ForwardBatch, PagedAttention
from baton.layers.collectives import ALONE, Collectives
from baton.models.blocks.norm import NormBlock
from baton.models.blocks.rope import RopeTables
from baton.models.blocks.tensors import move_tensors
from baton.models.spec.attention import AttentionBlockSpec


@dataclass(slots=True)
class AttentionBlock:
    """Weights in compute dtype, contiguous. Matrices are [out, in]; see `spec.attention` for the
    stacked one."""

    spec: AttentionBlockSpec
    """This rank's share."""
    qkv: ops.Matrix
    o: ops.Matrix
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    sinks: Tensor | None = None
    """float32 [Hq], where the heads have them."""
    q_norm: NormBlock | None = None
    k_norm: NormBlock | None = None
    ones: Tensor | None = None
    """[D], the weight of the norm of heads that have turned."""
    tp: Collectives = ALONE
    """The ranks that norm all heads together."""

    @staticmethod
    def make(
        spec: AttentionBlockSpec, tensors: dict[str, Tensor], tp: Collectives
    ) -> AttentionBlock:
        """Args: `tensors`: by the names of `AttentionBlockSpec.params`; they are removed."""
        block = AttentionBlock(
            spec,
            tensors.pop("qkv"),
            tensors.pop("o"),
            tensors.pop("qkv_bias", None),
            tensors.pop("o_bias", None),
            tensors.pop("sinks", None),
            tp=tp,
        )
        if spec.turned_norm_eps is not None:
            block.ones = torch.ones(spec.heads.head_dim, dtype=block.qkv.dtype)
        if spec.qk_norm is not None:
            block.q_norm = NormBlock.make(spec.qk_norm, "q_norm", tensors)
            block.k_norm = NormBlock.make(spec.qk_norm, "k_norm", tensors)
        return block

    def to(self, device: torch.device) -> None:
        move_tensors(self, device)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.to(device)

    def pack(self) -> None:
        """Re-order the matrices for the CPU kernels."""
        self.qkv = ops.pack_weight(self.qkv)
        self.o = ops.pack_weight(self.o)

    def attend(
        self,
        layer: int,
        x: Tensor,
        batch: ForwardBatch,
        attn: AttentionBackend,
        rope: RopeTables | None,
    ) -> Tensor:
        """x [T, hidden]: the heads' results [T, Hq * D], after K and V of the step are in the
        pages."""
        spec = self.spec.heads
        heads = ops.linear(x, self.qkv, self.qkv_bias).view(len(x), -1, spec.head_dim)
        store_heads = ops.head_kernel(x)
        paged = cast("PagedAttention", attn)
        if store_heads is not None and self.spec.has_plain_heads and not paged.keeps_codes:
            assert rope is not None, "plain heads turn"
            norms = None
            eps = 0.0
            if self.q_norm is not None and self.k_norm is not None:
                norms = (self.q_norm.weight, self.k_norm.weight)
                eps = self.q_norm.eps
            store_heads(
                heads,
                spec.num_heads,
                norms,
                eps,
                batch.positions,
                (rope.cos, rope.sin),
                paged.pages(layer),
                paged.slot_mapping(layer),
            )
            return paged.attend(layer, heads[:, : spec.num_heads], self.sinks)
        q, k, v, gates = heads.split(
            (
                spec.num_heads,
                spec.num_kv_heads,
                spec.num_kv_heads,
                spec.num_heads if self.spec.has_output_gate else 0,
            ),
            dim=1,
        )
        if self.q_norm is not None and self.k_norm is not None:
            if self.spec.norms_all_heads:
                q, k = self._norm_all_heads(q, k, self.q_norm, self.k_norm)
            else:
                q = self.q_norm.apply(q)
                k = self.k_norm.apply(k)
        if rope is not None:
            turned = rope.rotary_dim
            if turned == spec.head_dim:
                q, k = ops.apply_rope(
                    q,
                    k,
                    batch.positions,
                    rope.cos,
                    rope.sin,
                    is_interleaved=self.spec.is_interleaved,
                )
            else:
                # The first dimensions turn in place, the others pass.
                first = (q[..., :turned], k[..., :turned])
                ops.apply_rope(*first, batch.positions, rope.cos, rope.sin)
        if rope is not None and self.ones is not None and self.spec.turned_norm_eps is not None:
            q = ops.rms_norm(q, self.ones, self.spec.turned_norm_eps)
            k = ops.rms_norm(k, self.ones, self.spec.turned_norm_eps)
        if rope is None and (temperature := self.spec.temperature) is not None:
            steps = torch.floor((batch.positions.float() + 1.0) / temperature.scale)
            factors = torch.log1p(steps) * temperature.factor + 1.0
            q = (q * factors[:, None, None]).to(q.dtype)
        results = attn.forward(layer, q, k, v, self.sinks)
        if self.spec.has_output_gate:
            results = results * ops.sigmoid(gates.flatten(1))
        return results

    def _norm_all_heads(
        self, q: Tensor, k: Tensor, q_norm: NormBlock, k_norm: NormBlock
    ) -> tuple[Tensor, Tensor]:
        """q [T, Hq, D] and k [T, Hk, D], each normed as one row over the heads of all ranks."""
        if self.tp.size == 1:
            return q_norm.apply(q.flatten(1)).view_as(q), k_norm.apply(k.flatten(1)).view_as(k)
        wide = [x.flatten(1).float() for x in (q, k)]
        # Ranks have as many heads, and where several hold the same ones, all heads are held as
        # often: the mean over ranks is the mean over heads.
        means = torch.stack([x.square().mean(-1) for x in wide], dim=-1)
        means = self.tp.all_reduce(means) / self.tp.size
        normed = []
        for i, (x, norm) in enumerate(zip(wide, (q_norm, k_norm), strict=True)):
            unit = x * torch.rsqrt(means[:, i, None] + norm.eps)
            normed.append((norm.weight * unit).to(q.dtype))
        return normed[0].view_as(q), normed[1].view_as(k)

    def project(self, attended: Tensor) -> Tensor:
        """attended [T, Hq * D]: this rank's part of the result [T, hidden]."""
        return ops.linear(attended, self.o, self.o_bias)
