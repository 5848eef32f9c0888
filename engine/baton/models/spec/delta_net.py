"""The gated delta net of a layer: its sizes and its tensors. No torch here.

Checkpoints have the rows of a projection grouped by key head; here all queries come first, then all
keys, values and gates, so that the convolution reads one run of channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from baton.layers.shard import Shard
from baton.layers.spec import DeltaSpec
from baton.models.spec.norm import NormSpec
from baton.models.spec.tensors import (
    Param,
    TensorAxis,
    make_param,
    rows_by_kind,
    scale_slice,
    whole_axis,
)


@dataclass(frozen=True, slots=True)
class DeltaBlockSpec:
    """qkvz and gates, a convolution over q, k and v, the delta rule, a norm gated by z, then out
    (arXiv 2412.06464)."""

    delta: DeltaSpec
    norm: NormSpec
    """Of each head's result."""
    rope: None = None
    """Nothing turns."""

    @property
    def values_per_key(self) -> int:
        """Value heads of a key head."""
        return self.delta.value_heads // self.delta.key_heads

    def params(self, prefix: str, hidden_size: int, shard: Shard) -> Iterator[Param]:
        """Tensors that a rank holds of the whole block; their checkpoint names start with
        `prefix`."""
        delta = self.delta
        module = f"{prefix}linear_attn."
        hidden = whole_axis(hidden_size)
        own_keys = shard.slice_of(delta.key_heads)
        own_values = scale_slice(own_keys, self.values_per_key)
        group_values = self.values_per_key * delta.value_dim
        yield make_param(
            "qkvz",
            rows_by_kind(
                f"{module}in_proj_qkvz.weight",
                (delta.key_dim, delta.key_dim, group_values, group_values),
                groups=delta.key_heads,
                own=own_keys,
            ),
            hidden,
        )
        yield make_param(
            "gates",
            rows_by_kind(
                f"{module}in_proj_ba.weight",
                (self.values_per_key, self.values_per_key),
                groups=delta.key_heads,
                own=own_keys,
            ),
            hidden,
        )
        queries = scale_slice(own_keys, delta.key_dim)
        keys = slice(queries.start + delta.key_size, queries.stop + delta.key_size)
        values = scale_slice(own_values, delta.value_dim)
        first_value = 2 * delta.key_size
        values_behind = slice(values.start + first_value, values.stop + first_value)
        conv = f"{module}conv1d.weight"
        channels = [
            (conv, TensorAxis(delta.channels, share)) for share in (queries, keys, values_behind)
        ]
        yield make_param("conv", channels, whole_axis(1), whole_axis(delta.taps))
        heads = TensorAxis(delta.value_heads, own_values)
        yield make_param("rate", {f"{module}A_log": heads}, is_float32=True)
        yield make_param("bias", {f"{module}dt_bias": heads}, is_float32=True)
        yield from self.norm.params("head_norm", f"{module}norm", whole_axis(delta.value_dim))
        columns = TensorAxis(delta.value_size, values)
        yield make_param("out", {f"{module}out_proj.weight": hidden}, columns)

    def num_parameters(self, hidden_size: int) -> int:
        """Weights that are multiplied, norms and gates of heads left out."""
        delta = self.delta
        projections = delta.channels + 2 * delta.value_size + 2 * delta.value_heads
        return hidden_size * projections + delta.channels * delta.taps

    def share(self, shard: Shard) -> DeltaBlockSpec:
        """The block as one rank computes it: some key heads, and their value heads."""
        own_keys = shard.slice_of(self.delta.key_heads)
        delta = replace(
            self.delta,
            key_heads=self.delta.key_heads // shard.size,
            value_heads=self.delta.value_heads // shard.size,
            first_value_head=own_keys.start * self.values_per_key,
        )
        return replace(self, delta=delta)

    def find_obstacle(self, shard: Shard) -> str | None:
        """Reason that keeps the block from being divided so; None: nothing."""
        heads = self.delta.key_heads
        if heads % shard.size:
            return f"the model's linear_num_key_heads = {heads} is no multiple of it"
        return None
