"""Delta nets of a layer: their sizes and their tensors. No torch here.

All queries come first, then all keys and values, so that the convolution reads one run of channels.
Files of Qwen3-Next have the rows of a projection grouped by key head instead, those of Qwen3.5 have
a tensor for each gate.
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
    """inputs = [q; k; v; z] and gates = [b; a], a convolution over q, k and v, the delta rule, a
    norm gated by z, then out (the gated delta net, arXiv 2412.06464)."""

    delta: DeltaSpec
    norm: NormSpec
    """Of each head's result."""
    is_grouped: bool = True
    """Files have the rows of a projection grouped by key head."""
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
        queries = scale_slice(own_keys, delta.key_dim)
        keys = slice(queries.start + delta.key_size, queries.stop + delta.key_size)
        values = scale_slice(own_values, delta.value_dim)
        first_value = 2 * delta.key_size
        values_behind = slice(values.start + first_value, values.stop + first_value)

        def channels_of(source: str) -> list[tuple[str, TensorAxis]]:
            return [
                (f"{module}{source}.weight", TensorAxis(delta.channels, share))
                for share in (queries, keys, values_behind)
            ]

        heads = TensorAxis(delta.value_heads, own_values)
        columns = TensorAxis(delta.value_size, values)
        if self.is_grouped:
            inputs, gates = self._grouped_rows(module, own_keys)
        else:
            inputs = [*channels_of("in_proj_qkv"), (f"{module}in_proj_z.weight", columns)]
            gates = [(f"{module}in_proj_{gate}.weight", heads) for gate in "ba"]
        yield make_param("inputs", inputs, hidden)
        yield make_param("gates", gates, hidden)
        yield make_param("conv", channels_of("conv1d"), whole_axis(1), whole_axis(delta.taps))
        yield make_param("rate", {f"{module}A_log": heads}, is_float32=True)
        yield make_param("bias", {f"{module}dt_bias": heads}, is_float32=True)
        yield from self.norm.params("head_norm", f"{module}norm", whole_axis(delta.value_dim))
        yield make_param("out", {f"{module}out_proj.weight": hidden}, columns)

    def _grouped_rows(
        self, module: str, own_keys: slice
    ) -> tuple[list[tuple[str, TensorAxis]], list[tuple[str, TensorAxis]]]:
        """Rows of `inputs` and of `gates`."""
        group_values = self.values_per_key * self.delta.value_dim
        sizes = {
            "qkvz": (self.delta.key_dim, self.delta.key_dim, group_values, group_values),
            "ba": (self.values_per_key, self.values_per_key),
        }
        inputs, gates = (
            rows_by_kind(
                f"{module}in_proj_{name}.weight",
                kinds,
                groups=self.delta.key_heads,
                own=own_keys,
            )
            for name, kinds in sizes.items()
        )
        return inputs, gates

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


@dataclass(frozen=True, slots=True)
class KimiDeltaBlockSpec(DeltaBlockSpec):
    """inputs = [q; k; v] and gates = [f_a; g_a; b], then f_b makes decays of f_a, one for each key
    element, and g_b makes z of g_a; the rest as in the gated delta net (Kimi delta attention, arXiv
    2510.26692). Each key has one value, of its size."""

    def params(self, prefix: str, hidden_size: int, shard: Shard) -> Iterator[Param]:
        delta = self.delta
        module = f"{prefix}self_attn."
        hidden = whole_axis(hidden_size)
        inner = whole_axis(delta.key_dim)
        own = shard.slice_of(delta.value_heads)
        heads = TensorAxis(delta.value_heads, own)
        elements = TensorAxis(delta.value_size, scale_slice(own, delta.value_dim))

        def of_qkv(kind: str) -> dict[str, TensorAxis]:
            return {f"{module}{name}_{kind}.weight": elements for name in "qkv"}

        yield make_param("inputs", of_qkv("proj"), hidden)
        gates = {"f_a": inner, "g_a": inner, "b": heads}
        rows_of = {f"{module}{name}_proj.weight": rows for name, rows in gates.items()}
        yield make_param("gates", rows_of, hidden)
        yield make_param("conv", of_qkv("conv1d"), whole_axis(1), whole_axis(delta.taps))
        yield make_param("decay_up", {f"{module}f_b_proj.weight": elements}, inner)
        yield make_param("z_up", {f"{module}g_b_proj.weight": elements}, inner)
        only = TensorAxis(1, 0)
        yield make_param("rate", {f"{module}A_log": only}, only, heads, only, is_float32=True)
        yield make_param("bias", {f"{module}dt_bias": elements}, is_float32=True)
        yield from self.norm.params("head_norm", f"{module}o_norm", whole_axis(delta.value_dim))
        yield make_param("out", {f"{module}o_proj.weight": hidden}, elements)

    def num_parameters(self, hidden_size: int) -> int:
        delta = self.delta
        of_hidden = delta.channels + 2 * delta.key_dim + delta.value_heads + delta.value_size
        of_inner = 2 * delta.value_size * delta.key_dim
        return hidden_size * of_hidden + of_inner + delta.channels * delta.taps

    def find_obstacle(self, shard: Shard) -> str | None:
        heads = self.delta.value_heads
        if heads % shard.size:
            return f"the model's linear_num_heads = {heads} is no multiple of it"
        return None
