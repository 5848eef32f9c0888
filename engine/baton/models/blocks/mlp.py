"""The gated MLP: down(activation(gate(x)) * up(x))."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.layers import ops
from baton.models.blocks.tensors import move_tensors
from baton.models.spec.mlp import Activation, MlpSpec


@dataclass(slots=True)
class MlpBlock:
    """Weights in compute dtype, contiguous. Matrices are [out, in]; see `spec.mlp` for the stacked
    ones."""

    gate_up: ops.Matrix
    down: ops.Matrix
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: Activation = "silu"

    @staticmethod
    def make(spec: MlpSpec, tensors: dict[str, Tensor]) -> MlpBlock:
        """Args: `tensors`: by the names of `MlpSpec.params`."""
        return MlpBlock(
            tensors["gate_up"],
            tensors["down"],
            tensors.get("gate_up_bias"),
            tensors.get("down_bias"),
            spec.activation,
        )

    def to(self, device: torch.device) -> None:
        move_tensors(self, device)

    def pack(self) -> None:
        """Re-order the matrices for the CPU kernels."""
        self.gate_up = ops.pack_weight(self.gate_up)
        self.down = ops.pack_weight(self.down)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden]: this rank's part of the result [T, hidden]; parts of all ranks are to be
        summed."""
        gate_up = ops.linear(x, self.gate_up, self.gate_up_bias)
        inner = ops.silu_mul(gate_up) if self.activation == "silu" else ops.gelu_mul(gate_up)
        return ops.linear(inner, self.down, self.down_bias)
