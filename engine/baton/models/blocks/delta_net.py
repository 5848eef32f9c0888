"""Delta nets: projections, a short convolution, the delta rule on the states of the step's rows, and
a gated norm (arXiv 2412.06464 and 2510.26692, as in transformers' Qwen3-Next and Kimi-Linear)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baton.layers import ops
from baton.layers.attention.base import AttentionBackend, ForwardBatch
from baton.layers.recurrent_state import StateRows
from baton.models.blocks.norm import NormBlock
from baton.models.blocks.rope import RopeTables
from baton.models.blocks.tensors import move_tensors
from baton.models.spec.delta_net import DeltaBlockSpec, KimiDeltaBlockSpec


class DeltaInputs(NamedTuple):
    """A step's projections, each [T, ...] in rows."""

    qkv: Tensor
    """Before the convolution."""
    strengths: Tensor
    decays: Tensor
    """As `ops.gated_delta` has them."""
    z: Tensor
    """Gates of results."""


@dataclass(slots=True)
class DeltaBlock:
    """Weights in compute dtype, contiguous. Matrices are [out, in]; see `spec.delta_net` for the
    stacked ones."""

    spec: DeltaBlockSpec
    """This rank's share."""
    inputs: ops.Matrix
    gates: ops.Matrix
    conv: Tensor
    """float32 [taps, channels]"""
    rate: Tensor
    """float32 [value_heads]"""
    bias: Tensor
    """float32, one for each decay."""
    out: ops.Matrix
    head_norm: NormBlock

    @staticmethod
    def make(spec: DeltaBlockSpec, tensors: dict[str, Tensor]) -> DeltaBlock:
        """Args: `tensors`: by the names of `DeltaBlockSpec.params`; they are removed."""
        parts: dict[str, Any] = {
            "spec": spec,
            "conv": tensors.pop("conv").squeeze(1).t().float().contiguous(),
            "head_norm": NormBlock.make(spec.norm, "head_norm", tensors),
        }
        for name in ("inputs", "gates", "rate", "bias", "out"):
            parts[name] = tensors.pop(name)
        if isinstance(spec, KimiDeltaBlockSpec):
            return KimiDeltaBlock(
                **parts, decay_up=tensors.pop("decay_up"), z_up=tensors.pop("z_up")
            )
        return DeltaBlock(**parts)

    def to(self, device: torch.device) -> None:
        move_tensors(self, device)
        self.head_norm.to(device)

    def pack(self) -> None:
        """Re-order the matrices for the CPU kernels."""
        self.inputs = ops.pack_weight(self.inputs)
        self.gates = ops.pack_weight(self.gates)
        self.out = ops.pack_weight(self.out)

    def project_inputs(self, x: Tensor) -> DeltaInputs:
        """The projections of x [T, hidden]."""
        delta = self.spec.delta
        qkv, z = ops.linear(x, self.inputs).split((delta.channels, delta.value_size), dim=1)
        strengths, decays = ops.linear(x, self.gates).chunk(2, dim=1)
        return DeltaInputs(qkv, strengths, decays, z)

    def gate_results(self, results: Tensor, z: Tensor) -> Tensor:
        """The norms of the heads' results [T, value_size], times silu(z)."""
        normed = self.norm_heads(results)
        # Rounded once, as transformers does: silu of a gate in float32.
        gate = z.float()
        gated: Tensor = (normed.float() * (gate * ops.sigmoid(gate))).to(results.dtype)
        return gated

    def norm_heads(self, results: Tensor) -> Tensor:
        """The norm of each head's result; [T, value_size] as `results`."""
        heads = results.view(-1, self.spec.delta.value_dim)
        return self.head_norm.apply(heads).view_as(results)

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
        inputs = self.project_inputs(x)
        qkv = x.new_empty((len(x), delta.channels))
        results = x.new_empty((len(x), delta.value_size))

        def pass_conv(rows: StateRows) -> None:
            ops.causal_conv(inputs.qkv, self.conv, state=state.conv, rows=rows, out=qkv)

        def pass_rule(rows: StateRows) -> None:
            ops.gated_delta(
                qkv,
                inputs.strengths,
                inputs.decays,
                rate=self.rate,
                bias=self.bias,
                sizes=delta,
                state=state.matrix,
                rows=rows,
                out=results,
            )

        states.advance(layer, 0, pass_conv)
        states.advance(layer, 1, pass_rule)
        return self.gate_results(results, inputs.z)

    def project(self, attended: Tensor) -> Tensor:
        """attended [T, value_size]: this rank's part of the result [T, hidden]."""
        return ops.linear(attended, self.out)


@dataclass(slots=True)
class KimiDeltaBlock(DeltaBlock):
    """Decays and gates of results pass a narrow projection first."""

    decay_up: ops.Matrix
    z_up: ops.Matrix

    def pack(self) -> None:
        DeltaBlock.pack(self)
        self.decay_up = ops.pack_weight(self.decay_up)
        self.z_up = ops.pack_weight(self.z_up)

    def project_inputs(self, x: Tensor) -> DeltaInputs:
        delta = self.spec.delta
        narrow = (delta.key_dim, delta.key_dim, delta.value_heads)
        decays, z, strengths = ops.linear(x, self.gates).split(narrow, dim=1)
        return DeltaInputs(
            ops.linear(x, self.inputs),
            strengths,
            ops.linear(decays, self.decay_up),
            ops.linear(z, self.z_up),
        )

    def gate_results(self, results: Tensor, z: Tensor) -> Tensor:
        """The norms of the heads' results [T, value_size], times sigmoid(z)."""
        # Rounded once, behind the gate, as transformers does.
        normed = self.norm_heads(results.float())
        return (normed * ops.sigmoid(z.float())).to(results.dtype)
