"""Sizes that kernels, attention backends and the KV pool need of a model. No torch here.

A model's own description (`models.spec`) makes them; nothing in this package knows more of a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention of one layer, as a backend computes it on one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int = 0
    """0 sees everything before it, W > 0 the last W tokens including itself."""
    factor: float | None = None
    """Factor of the products of queries and keys; None: 1 / sqrt(head_dim)."""
    first_kv_head: int = 0
    """Number in the whole model of this rank's first KV head: the loader's slice of k_proj begins
    there."""
    soft_cap: float = 0.0
    """c > 0 makes c * tanh(x / c) of a score x, before the mask; 0 leaves it."""

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def scale(self) -> float:
        """Factor of the products of queries and keys."""
        return 1.0 / math.sqrt(self.head_dim) if self.factor is None else self.factor


def common_heads(layers: Sequence[AttentionSpec]) -> AttentionSpec:
    """The heads that all layers have, without their windows.

    Raises ValueError where layers differ, because the pool has one shape for all of them.
    """
    heads = replace(layers[0], window=0)
    for number, layer in enumerate(layers):
        if replace(layer, window=0) != heads:
            raise ValueError(f"layer {number} has {layer}, layer 0 has {layers[0]}")
    return heads


@dataclass(frozen=True, slots=True)
class KernelShapes:
    """Sizes of one rank's share of a model that decide which GPU kernels can compute it."""

    dtype: str
    vocab_size: int
    hidden_size: int
    inner_sizes: dict[str, int]
    """Width behind each activation, by the name of its field in config.json."""
    heads: AttentionSpec
