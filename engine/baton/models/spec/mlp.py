"""The gated MLP of a layer: its sizes and its tensors. No torch here."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from baton.layers.shard import Shard
from baton.models.spec.tensors import Param, TensorAxis, fused_rows, make_param, whole_axis

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """gate_up = [gate_proj; up_proj], then down."""

    inner_size: int
    bias: bool = False
    module: str = "mlp"
    """The block's place in a layer, in checkpoint names."""
    other_module: str | None = None
    """Another place, where some files have it."""
    size_field: str = "intermediate_size"
    """Field of config.json that states `inner_size`."""
    is_fused: bool = False
    """Checkpoints hold gate and up in one tensor, `gate_up_proj`."""
    activation: Activation = "silu"
    """Of the gate."""

    def params(
        self, prefix: str, hidden_size: int, shard: Shard, stored: Container[str] = ()
    ) -> Iterator[Param]:
        """Tensors that a rank holds of the whole block; their checkpoint names start with `prefix`.

        Args: `stored`: names of tensors, and of modules with a dot behind, in the checkpoint's
        files.
        """
        hidden = whole_axis(hidden_size)
        inner = TensorAxis(self.inner_size, shard.slice_of(self.inner_size))
        module = f"{prefix}{self.module}."
        other = f"{prefix}{self.other_module}."
        if f"{other}down_proj." in stored:
            module = other

        def gate_up(kind: str) -> dict[str, TensorAxis]:
            return {f"{module}{name}.{kind}": inner for name in ("gate_proj", "up_proj")}

        if self.is_fused:
            fused = fused_rows(f"{module}gate_up_proj.weight", (inner, inner))
            yield make_param("gate_up", fused, hidden)
        else:
            yield make_param("gate_up", gate_up("weight"), hidden)
        yield make_param("down", {f"{module}down_proj.weight": hidden}, inner)
        if self.bias:
            yield make_param("gate_up_bias", gate_up("bias"))
            if shard.rank == 0:
                yield make_param("down_bias", {f"{module}down_proj.bias": hidden})

    def num_parameters(self, hidden_size: int) -> int:
        """Weights that are multiplied, biases left out."""
        return 3 * hidden_size * self.inner_size

    @property
    def inner_sizes(self) -> dict[str, int]:
        """Width behind each activation, by its field in config.json."""
        return {self.size_field: self.inner_size}

    def share(self, shard: Shard) -> MlpSpec:
        """The block as one rank computes it."""
        return replace(self, inner_size=self.inner_size // shard.size)

    def find_obstacle(self, shard: Shard) -> str | None:
        """Reason that keeps the block from being divided so; None: nothing."""
        size = shard.size
        if self.inner_size % size:
            return f"the model's {self.size_field} = {self.inner_size} is no multiple of it"
        return None
