"""The attention block of a layer: its sizes and its tensors. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from baton.layers.shard import Shard
from baton.layers.spec import AttentionSpec
from baton.models.spec.norm import NormSpec
from baton.models.spec.rope import RopeSpec
from baton.models.spec.tensors import (
    Param,
    TensorAxis,
    fused_rows,
    make_param,
    rows_by_kind,
    scale_slice,
    whole_axis,
)


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """A query at position p is multiplied by 1 + factor * log(1 + floor((p + 1) / scale)) (arXiv
    2501.19399)."""

    factor: float
    scale: float


@dataclass(frozen=True, slots=True)
class AttentionBlockSpec:
    """Grouped queries: qkv = [q_proj; k_proj; v_proj], and gates, then o."""

    heads: AttentionSpec
    rope: RopeSpec | None
    """None: nothing turns."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: NormSpec | None = None
    """q and k are normed before they turn."""
    norms_all_heads: bool = False
    """All heads of q, and of k, are normed as one row; else each by itself."""
    is_interleaved: bool = False
    """Neighbors in a head turn together; else element i with i + head_dim / 2."""
    turned_norm_eps: float | None = None
    """Added to the mean square of q and k, which are divided by their root mean square after they
    have turned. None: they are not."""
    temperature: QueryTemperature | None = None
    """Of queries that do not turn."""
    is_fused: bool = False
    """Checkpoints hold q, k and v in one tensor, `qkv_proj`; it has no bias."""
    inputs: int = 1
    """Vectors of the hidden size, side by side, that q, k and v are made of."""
    has_output_gate: bool = False
    """Results are multiplied by the sigmoid of a gate. Checkpoints hold those of a head behind its
    query, in q_proj; ours come behind v."""

    @property
    def has_plain_heads(self) -> bool:
        """Whether each head of q and k is at most normed, by itself, and turns whole, in halves: a
        GPU's kernel does that in one launch (`ops.head_kernel`)."""
        norm = self.qk_norm
        is_turned_whole = self.rope is not None and self.rope.partial == 1.0
        return (
            is_turned_whole
            and not self.is_interleaved
            and not self.norms_all_heads
            and not self.has_output_gate
            and self.turned_norm_eps is None
            and (norm is None or (norm.kind == "rms" and not norm.is_float32))
        )

    @property
    def rotated_dim(self) -> int:
        """Size of the vectors that `rope` turns, or turns a part of."""
        return self.heads.head_dim

    def with_rope(self, rope: RopeSpec) -> AttentionBlockSpec:
        return replace(self, rope=rope)

    def of_layer(self, window: int, rope: RopeSpec | None, *, chunk: int = 0) -> AttentionBlockSpec:
        """The block of a layer that sees the last `window` tokens, or those of its `chunk` (0 is
        all), and turns so."""
        return replace(self, heads=replace(self.heads, window=window, chunk=chunk), rope=rope)

    def params(self, prefix: str, hidden_size: int, shard: Shard) -> Iterator[Param]:
        """Tensors that a rank holds of the whole block; their checkpoint names start with
        `prefix`."""
        heads = self.heads
        own_heads = shard.slice_of(heads.num_heads)
        own_kv_heads = shard.kv_heads(heads.num_kv_heads)
        q = TensorAxis(heads.q_size, scale_slice(own_heads, heads.head_dim))
        kv = TensorAxis(heads.kv_size, scale_slice(own_kv_heads, heads.head_dim))
        hidden = whole_axis(hidden_size)
        joined = whole_axis(self.inputs * hidden_size)
        rows_of = {"q_proj": q, "k_proj": kv, "v_proj": kv}

        def named(kind: str) -> list[tuple[str, TensorAxis]]:
            rows = [(f"{prefix}self_attn.{name}.{kind}", axis) for name, axis in rows_of.items()]
            if not self.has_output_gate:
                return rows
            kinds = (heads.head_dim, heads.head_dim)
            queries_and_gates = rows_by_kind(
                rows[0][0], kinds, groups=heads.num_heads, own=own_heads
            )
            own = len(queries_and_gates) // 2
            return [*queries_and_gates[:own], *rows[1:], *queries_and_gates[own:]]

        if self.is_fused:
            fused = fused_rows(f"{prefix}self_attn.qkv_proj.weight", (q, kv, kv))
            yield make_param("qkv", fused, joined)
        else:
            yield make_param("qkv", named("weight"), joined)
        if self.qkv_bias:
            yield make_param("qkv_bias", named("bias"))
        if self.qk_norm is not None:
            dim = whole_axis(heads.head_dim)
            axes = {"q_norm": q, "k_norm": kv}
            for name, axis in axes.items():
                rows = axis if self.norms_all_heads else dim
                yield from self.qk_norm.params(name, f"{prefix}self_attn.{name}", rows)
        if heads.has_sinks:
            sinks = TensorAxis(heads.num_heads, own_heads)
            yield make_param("sinks", {f"{prefix}self_attn.sinks": sinks}, is_float32=True)
        yield make_param("o", {f"{prefix}self_attn.o_proj.weight": hidden}, q)
        if self.o_bias and shard.rank == 0:
            yield make_param("o_bias", {f"{prefix}self_attn.o_proj.bias": hidden})

    def num_parameters(self, hidden_size: int) -> int:
        """Weights that are multiplied, biases and norms left out."""
        gates = self.heads.q_size if self.has_output_gate else 0
        return hidden_size * (2 * (self.heads.q_size + self.heads.kv_size) + gates)

    def share(self, shard: Shard) -> AttentionBlockSpec:
        """The block as one rank computes it."""
        kv_heads = shard.kv_heads(self.heads.num_kv_heads)
        heads = replace(
            self.heads,
            num_heads=self.heads.num_heads // shard.size,
            num_kv_heads=kv_heads.stop - kv_heads.start,
            first_kv_head=kv_heads.start,
        )
        return replace(self, heads=heads)

    def find_obstacle(self, shard: Shard) -> str | None:
        """Reason that keeps the block from being divided so; None: nothing."""
        size = shard.size
        heads = self.heads.num_heads
        if heads % size:
            return f"the model's num_attention_heads = {heads} is no multiple of it"
        kv_heads = self.heads.num_kv_heads
        if kv_heads % size and size % kv_heads:
            return f"the model's num_key_value_heads = {kv_heads} is neither a multiple nor a divisor of it"
        return None
