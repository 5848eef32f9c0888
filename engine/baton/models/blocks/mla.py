"""The latent attention block: queries and latents, rotation, attention over the pages, projection.

Keys and values are never made of the latents in the pages. A head's query is multiplied by the key
part of kv_b_proj instead, and its result by the value part: the absorbed form, the same for prompts
and for single tokens, so that a resumed answer has the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.layers import ops
from baton.layers.attention.base import AttentionBackend, ForwardBatch
from baton.models.blocks.norm import NormBlock
from baton.models.blocks.rope import RopeTables
from baton.models.blocks.tensors import move_tensors
from baton.models.spec.mla import MlaBlockSpec


@dataclass(slots=True)
class MlaBlock:
    """Weights in compute dtype, contiguous. Matrices are [out, in]; see `spec.mla` for the
    stacked one."""

    spec: MlaBlockSpec
    """This rank's share."""
    qkv_a: ops.Matrix
    kv_a_norm: NormBlock
    key_up: ops.HeadMatrices
    """[heads, kv_rank, plain_dim]: of a head's query makes one for latents."""
    value_up: ops.HeadMatrices
    """[heads, value_dim, kv_rank]: of a head's sum of latents makes one of values."""
    o: ops.Matrix
    qkv_a_bias: Tensor | None = None
    o_bias: Tensor | None = None
    q_a_norm: NormBlock | None = None
    q_b: ops.Matrix | None = None

    @staticmethod
    def make(spec: MlaBlockSpec, tensors: dict[str, Tensor]) -> MlaBlock:
        """Args: `tensors`: by the names of `MlaBlockSpec.params`; they are removed."""
        kv_b = tensors.pop("kv_b").view(spec.num_heads, -1, spec.kv_rank)
        key_rows, value_rows = kv_b.split((spec.plain_dim, spec.value_dim), dim=1)
        block = MlaBlock(
            spec,
            tensors.pop("qkv_a"),
            NormBlock.make(spec.latent_norm, "kv_a_norm", tensors),
            key_rows.transpose(1, 2).contiguous(),
            value_rows.contiguous(),
            tensors.pop("o"),
            tensors.pop("qkv_a_bias", None),
            tensors.pop("o_bias", None),
        )
        if spec.q_rank is not None:
            block.q_a_norm = NormBlock.make(spec.latent_norm, "q_a_norm", tensors)
            block.q_b = tensors.pop("q_b")
        return block

    def to(self, device: torch.device) -> None:
        move_tensors(self, device)
        for norm in (self.q_a_norm, self.kv_a_norm):
            if norm is not None:
                norm.to(device)

    def pack(self) -> None:
        """Re-order the matrices for the CPU kernels."""
        self.qkv_a = ops.pack_weight(self.qkv_a)
        if self.q_b is not None:
            self.q_b = ops.pack_weight(self.q_b)
        self.key_up = ops.pack_heads(self.key_up)
        self.value_up = ops.pack_heads(self.value_up)
        self.o = ops.pack_weight(self.o)

    def attend(
        self,
        layer: int,
        x: Tensor,
        batch: ForwardBatch,
        attn: AttentionBackend,
        rope: RopeTables | None,
    ) -> Tensor:
        """x [T, hidden]: the heads' sums of latents [T, Hq * kv_rank], after the step's latents and
        rotated keys are in the pages."""
        spec = self.spec
        qkv_a = ops.linear(x, self.qkv_a, self.qkv_a_bias)
        kv_dim = spec.kv_rank + spec.rope_dim
        queries, latents, keys = qkv_a.split(
            (qkv_a.shape[1] - kv_dim, spec.kv_rank, spec.rope_dim), dim=1
        )
        if self.q_b is not None and self.q_a_norm is not None:
            queries = ops.linear(self.q_a_norm.apply(queries), self.q_b)
        heads = queries.unflatten(1, (spec.num_heads, spec.q_head_dim))
        plain, rotated = heads.split((spec.plain_dim, spec.rope_dim), dim=2)
        keys = keys.unsqueeze(1)
        if rope is not None:
            ops.apply_rope(
                rotated,
                keys,
                batch.positions,
                rope.cos,
                rope.sin,
                is_interleaved=spec.is_interleaved,
            )
        absorbed = x.new_empty(len(x), spec.num_heads, kv_dim)
        ops.linear_by_head(plain, self.key_up, absorbed[..., : spec.kv_rank])
        absorbed[..., spec.kv_rank :] = rotated
        normed = self.kv_a_norm.apply(latents).unsqueeze(1)
        return attn.forward(layer, absorbed, normed, keys)

    def project(self, attended: Tensor) -> Tensor:
        """attended [T, Hq * kv_rank]: this rank's part of the result [T, hidden]."""
        spec = self.spec
        values = attended.new_empty(len(attended), spec.num_heads, spec.value_dim)
        sums = attended.unflatten(1, (spec.num_heads, spec.kv_rank))
        ops.linear_by_head(sums, self.value_up, values)
        return ops.linear(values.flatten(1), self.o, self.o_bias)
