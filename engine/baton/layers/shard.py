"""How a model is divided among tensor-parallel ranks. No torch here.

    divided by              heads          qkv (its output rows), o (its input columns), the KV pool
                            inner size     gate_up (rows), down (columns)
                            vocabulary     embedding and output head (rows)
    whole on every rank     norms, positions, the residual stream
    on the first rank only  biases of o and down: partial results are added up, so a bias may come once

Each rank has whole groups of query heads with their KV head. With more ranks than KV heads, several hold the same one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.errors import ConfigError
from baton.layers.model_spec import ModelSpec

MAX_SIZE = 64


@dataclass(frozen=True, slots=True)
class Shard:
    """Share `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def slice_of(self, n: int) -> slice:
        """This share of 0 … n; shares differ by one at most."""
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def kv_heads(self, n: int) -> slice:
        """The KV heads that this share's query heads read: at least one."""
        share = self.slice_of(n)
        return slice(share.start, max(share.stop, share.start + 1))


WHOLE = Shard()


def share_of(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """The model as one rank computes it: its heads and inner size; the vocabulary and the rest stay whole.

    Raises ConfigError when the model cannot be divided so.
    """
    if problem := _find_obstacle(spec, shard.size):
        fitting = [str(n) for n in range(1, MAX_SIZE + 1) if _find_obstacle(spec, n) is None]
        raise ConfigError(
            f"--tp-size {shard.size}: {problem}; this model takes {', '.join(fitting)}"
        )
    kv_heads = shard.kv_heads(spec.num_kv_heads)
    return replace(
        spec,
        num_heads=spec.num_heads // shard.size,
        num_kv_heads=kv_heads.stop - kv_heads.start,
        intermediate_size=spec.intermediate_size // shard.size,
    )


def _find_obstacle(spec: ModelSpec, size: int) -> str | None:
    for field, n in (
        ("num_attention_heads", spec.num_heads),
        ("intermediate_size", spec.intermediate_size),
    ):
        if n % size:
            return f"the model's {field} = {n} is no multiple of it"
    kv_heads = spec.num_kv_heads
    if kv_heads % size and size % kv_heads:
        return f"the model's num_key_value_heads = {kv_heads} is neither a multiple nor a divisor of it"
    if spec.vocab_size < size:
        return f"the model's vocab_size = {spec.vocab_size} is smaller"
    return None
