"""Norms of the residual stream and of heads. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from baton.models.spec.tensors import Param, TensorAxis, make_param

NormKind = Literal["rms", "layer"]
NormPlaces = Literal["before", "after", "around"]
"""Where a layer has norms: in front of each block, behind it, or both."""


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A norm over the last dimension, with a weight for each of its values."""

    eps: float
    """Added to the mean square."""
    kind: NormKind = "rms"
    """rms: x / rms(x); layer: (x - mean) / deviation, and a bias beside the weight."""
    is_float32: bool = False
    """The weight is kept in float32, and its product with a row is rounded once."""
    adds_one: bool = False
    """Files hold the weight less 1."""

    def params(self, name: str, source: str, axis: TensorAxis) -> Iterator[Param]:
        """Tensors of the norm called `name`, which checkpoints keep under `source`."""
        is_float32 = self.is_float32
        yield make_param(name, {f"{source}.weight": axis}, is_float32=is_float32)
        if self.kind == "layer":
            bias = make_param(f"{name}_bias", {f"{source}.bias": axis}, is_float32=is_float32)
            yield bias


@dataclass(frozen=True, slots=True)
class LayerNormsSpec:
    """The norms of a layer, all of one kind."""

    norm: NormSpec
    places: NormPlaces = "before"

    @property
    def sources(self) -> dict[str, str]:
        """Checkpoint names of a layer's norms, by our names."""
        if self.places == "before":
            return {
                "before_attention_norm": "input_layernorm",
                "before_mlp_norm": "post_attention_layernorm",
            }
        after = {
            "after_attention_norm": "post_attention_layernorm",
            "after_mlp_norm": "post_feedforward_layernorm",
        }
        if self.places == "after":
            return after
        before = {
            "before_attention_norm": "input_layernorm",
            "before_mlp_norm": "pre_feedforward_layernorm",
        }
        return before | after

    def params(self, prefix: str, axis: TensorAxis) -> Iterator[Param]:
        """Tensors of all norms of the layer whose checkpoint names start with `prefix`."""
        for name, source in self.sources.items():
            yield from self.norm.params(name, f"{prefix}{source}", axis)
