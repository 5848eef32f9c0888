"""Norms with their weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.layers import ops
from baton.models.blocks.tensors import move_tensors
from baton.models.spec.norm import NormSpec


@dataclass(slots=True)
class NormBlock:
    """A norm over the last dimension."""

    weight: Tensor
    eps: float
    bias: Tensor | None = None
    """None: the quotient is by the root mean square, and nothing is added."""

    @staticmethod
    def make(spec: NormSpec, name: str, tensors: dict[str, Tensor]) -> NormBlock:
        """Args: `tensors`: by the names of `NormSpec.params`; those of the norm called `name` are
        removed."""
        weight = tensors.pop(name)
        if spec.adds_one:
            weight += 1
        return NormBlock(weight, spec.eps, tensors.pop(f"{name}_bias", None))

    def to(self, device: torch.device) -> None:
        move_tensors(self, device)

    def apply(self, x: Tensor) -> Tensor:
        """The norm of x [..., N]: a new tensor."""
        if self.bias is not None:
            return ops.layer_norm(x, self.weight, self.bias, self.eps)
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, both [T, N], and that sum; either input may be overwritten."""
        if self.bias is not None:
            total = x + residual
            return self.apply(total), total
        return ops.add_rms_norm(x, residual, self.weight, self.eps)
