"""The latent attention block of a layer: its sizes and its tensors. No torch here.

A token leaves a latent of `kv_rank` values, of which `kv_b_proj` makes each head's key and value,
and one rotated key that all heads share (multi-head latent attention, arXiv 2405.04434 §2.1). The
product with `kv_b_proj` is not done for each token of the past: its key part is multiplied into the
query, its value part into the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from baton.layers.shard import Shard
from baton.layers.spec import LatentSpec
from baton.models.spec.norm import NormSpec
from baton.models.spec.rope import RopeSpec
from baton.models.spec.tensors import (
    Param,
    TensorAxis,
    make_param,
    scale_slice,
    whole_axis,
)


@dataclass(frozen=True, slots=True)
class MlaBlockSpec:
    """qkv_a = [q_a_proj or q_proj; kv_a_proj_with_mqa], then q_b, kv_b, o."""

    num_heads: int
    plain_dim: int
    """Elements of a head's query and key that do not turn."""
    rope_dim: int
    """Elements of a head's query, and of the shared key, that turn."""
    value_dim: int
    """Elements of a head's value."""
    kv_rank: int
    """Elements of a latent."""
    q_rank: int | None
    """Elements of a query's latent; None: queries are projected in one step."""
    latent_norm: NormSpec
    """Of latents."""
    rope: RopeSpec | None = None
    is_interleaved: bool = True
    """Neighbors turn together; else element i of `rope_dim` with i + rope_dim / 2."""
    bias: bool = False
    """The projections to latents, and o, have one."""

    @property
    def q_head_dim(self) -> int:
        return self.plain_dim + self.rope_dim

    @property
    def rotated_dim(self) -> int:
        """Size of the vectors that `rope` turns."""
        return self.rope_dim

    @property
    def heads(self) -> LatentSpec:
        """The block as an attention backend computes it."""
        factor = 1.0 if self.rope is None else self.rope.score_factor
        return LatentSpec(
            self.num_heads,
            self.kv_rank,
            self.rope_dim,
            scale=self.q_head_dim**-0.5 * factor,
            is_interleaved=self.is_interleaved,
        )

    def of_layer(self, window: int, rope: RopeSpec | None, *, chunk: int = 0) -> MlaBlockSpec:
        """The block of a layer that turns so. Raises ValueError for a window or chunks."""
        if window or chunk:
            raise ValueError(
                f"latent attention sees everything, a window of {window} or chunks of {chunk} "
                "are given"
            )
        return replace(self, rope=rope)

    def with_rope(self, rope: RopeSpec) -> MlaBlockSpec:
        return replace(self, rope=rope)

    def params(self, prefix: str, hidden_size: int, shard: Shard) -> Iterator[Param]:
        """Tensors that a rank holds of the whole block; their checkpoint names start with
        `prefix`."""
        module = f"{prefix}self_attn."
        hidden = whole_axis(hidden_size)
        latent = whole_axis(self.kv_rank)
        own_heads = shard.slice_of(self.num_heads)

        def rows_of_heads(size: int) -> TensorAxis:
            return TensorAxis(self.num_heads * size, scale_slice(own_heads, size))

        q = rows_of_heads(self.q_head_dim)
        first = "q_proj" if self.q_rank is None else "q_a_proj"
        rows_of = {
            first: q if self.q_rank is None else whole_axis(self.q_rank),
            "kv_a_proj_with_mqa": whole_axis(self.kv_rank + self.rope_dim),
        }

        def named(kind: str) -> dict[str, TensorAxis]:
            return {f"{module}{name}.{kind}": rows for name, rows in rows_of.items()}

        yield make_param("qkv_a", named("weight"), hidden)
        if self.bias:
            yield make_param("qkv_a_bias", named("bias"))
        if self.q_rank is not None:
            q_latent = whole_axis(self.q_rank)
            yield from self.latent_norm.params("q_a_norm", f"{module}q_a_layernorm", q_latent)
            yield make_param("q_b", {f"{module}q_b_proj.weight": q}, q_latent)
        yield from self.latent_norm.params("kv_a_norm", f"{module}kv_a_layernorm", latent)
        kv = rows_of_heads(self.plain_dim + self.value_dim)
        yield make_param("kv_b", {f"{module}kv_b_proj.weight": kv}, latent)
        yield make_param("o", {f"{module}o_proj.weight": hidden}, rows_of_heads(self.value_dim))
        if self.bias and shard.rank == 0:
            yield make_param("o_bias", {f"{module}o_proj.bias": hidden})

    def num_parameters(self, hidden_size: int) -> int:
        """Weights that are multiplied, biases and norms left out."""
        q_size = self.num_heads * self.q_head_dim
        queries = hidden_size * q_size
        if self.q_rank is not None:
            queries = self.q_rank * (hidden_size + q_size)
        latents = hidden_size * (self.kv_rank + self.rope_dim)
        heads = self.num_heads * self.kv_rank * (self.plain_dim + self.value_dim)
        return queries + latents + heads + hidden_size * self.num_heads * self.value_dim

    def share(self, shard: Shard) -> MlaBlockSpec:
        """The block as one rank computes it: some heads, and all latents."""
        return replace(self, num_heads=self.num_heads // shard.size)

    def find_obstacle(self, shard: Shard) -> str | None:
        """Reason that keeps the block from being divided so; None: nothing."""
        if self.num_heads % shard.size:
            return f"the model's num_attention_heads = {self.num_heads} is no multiple of it"
        return None
