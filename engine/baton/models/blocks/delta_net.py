"""The gated delta net: projections, a short convolution, the delta rule on the states of the step's
rows, and a gated norm (arXiv 2412.06464, as in transformers' Qwen3-Next)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.layers import ops
from baton.layers.attention.base import AttentionBackend, ForwardBatch
from baton.layers.recurrent_state import StateRows
from baton.models.blocks.norm import NormBlock
from baton.models.blocks.rope import RopeTables
from baton.models.blocks.tensors import move_tensors
from baton.models.spec.delta_net import DeltaBlockSpec


@dataclass(slots=True)
class DeltaBlock:
    """Weights in compute dtype, contiguous. Matrices are [out, in]; see `spec.delta_net` for the
    stacked ones."""

    spec: DeltaBlockSpec
    """This rank's share."""
    qkvz: ops.Matrix
    gates: ops.Matrix
    conv: Tensor
    """float32 [taps, channels]"""
    rate: Tensor
    """float32 [value_heads]"""
    bias: Tensor
    """float32 [value_heads]"""
    out: ops.Matrix
    head_norm: NormBlock

    @staticmethod
    def make(spec: DeltaBlockSpec, tensors: dict[str, Tensor]) -> DeltaBlock:
        """Args: `tensors`: by the names of `DeltaBlockSpec.params`; they are removed."""
        return DeltaBlock(
            spec,
            tensors.pop("qkvz"),
            tensors.pop("gates"),
            tensors.pop("conv").squeeze(1).t().float().contiguous(),
            tensors.pop("rate"),
            tensors.pop("bias"),
            tensors.pop("out"),
            NormBlock.make(spec.norm, "head_norm", tensors),
        )

    def to(self, device: torch.device) -> None:
        move_tensors(self, device)
        self.head_norm.to(device)

    def pack(self) -> None:
        """Re-order the matrices for the CPU kernels."""
        self.qkvz = ops.pack_weight(self.qkvz)
        self.gates = ops.pack_weight(self.gates)
        self.out = ops.pack_weight(self.out)

    def attend(
        self,
        layer: int,
        x: Tensor,
        batch: ForwardBatch,
        attn: AttentionBackend,
        rope: RopeTables | None,
    ) -> Tensor:
        """x [T, hidden]: the heads' results [T, value_size], after the rows' states have seen the
        step's tokens.

        Args: `layer`: its number among the layers with a state.
        """
        assert batch.states is not None, "a runner keeps states for models that have them"
        states = batch.states
        state = states.layer(layer)
        delta = self.spec.delta
        projected = ops.linear(x, self.qkvz)
        inputs, z = projected.split((delta.channels, delta.value_size), dim=1)
        qkv = x.new_empty((len(x), delta.channels))
        gates = ops.linear(x, self.gates)
        results = x.new_empty((len(x), delta.value_size))

        def pass_conv(rows: StateRows) -> None:
            ops.causal_conv(inputs, self.conv, state=state.conv, rows=rows, out=qkv)

        def pass_rule(rows: StateRows) -> None:
            ops.gated_delta(
                qkv,
                gates,
                self.rate,
                self.bias,
                sizes=delta,
                state=state.matrix,
                rows=rows,
                out=results,
            )

        states.advance(layer, 0, pass_conv)
        states.advance(layer, 1, pass_rule)
        normed = self.head_norm.apply(results.view(-1, delta.value_dim)).view_as(results)
        # Rounded once, as transformers does: silu of a gate in float32.
        gate = z.float()
        gated: Tensor = (normed.float() * (gate * ops.sigmoid(gate))).to(x.dtype)
        return gated

    def project(self, attended: Tensor) -> Tensor:
        """attended [T, value_size]: this rank's part of the result [T, hidden]."""
        return ops.linear(attended, self.out)
