"""Sizes that kernels, attention backends and the KV pool need of a model. No torch here.

A model's own description (`models.spec`) makes them; nothing in this package knows more of a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Sight(NamedTuple):
    """Which tokens before it a token sees."""

    window: int = 0
    """W > 0: the last W, itself included; 0: all."""
    chunk: int = 0
    """C > 0: those from the last multiple of C on; 0: all. Not beside a window."""

    def first_seen(self, position: int) -> int:
        """Position of the first token that one at `position` sees."""
        if self.chunk:
            return position - position % self.chunk
        return max(0, position - self.window + 1) if self.window else 0


EVERYTHING = Sight()


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention of one layer, as a backend computes it on one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int = 0
    """As in `Sight`."""
    chunk: int = 0
    """As in `Sight`."""
    factor: float | None = None
    """Factor of the products of queries and keys; None: 1 / sqrt(head_dim)."""
    first_kv_head: int = 0
    """Number in the whole model of this rank's first KV head: the loader's slice of k_proj begins
    there."""
    soft_cap: float = 0.0
    """c > 0 makes c * tanh(x / c) of a score x, before the mask; 0 leaves it."""
    has_sinks: bool = False
    """Each query head has one more score, a learned one, whose probability weighs no value."""

    @property
    def sight(self) -> Sight:
        return Sight(self.window, self.chunk)

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


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Latent attention of one layer, as a backend computes it on one rank.

    A token leaves a latent, from which each head's key and value follow, and one rotated key. All
    heads share both, so every rank keeps them whole.
    """

    num_heads: int
    latent_dim: int
    key_dim: int
    """Of the rotated key, and of the rotated part of a query."""
    scale: float
    """Factor of the products of queries and keys."""
    is_interleaved: bool = True
    """Neighbors turn together; else element i turns with i + key_dim / 2. Keys are kept in this
    order."""

    @property
    def row_dim(self) -> int:
        """Elements of a token in the pages."""
        return self.latent_dim + self.key_dim

    @property
    def result_size(self) -> int:
        """Elements of a token's result: a latent for each head."""
        return self.num_heads * self.latent_dim


LayerAttention: TypeAlias = AttentionSpec | LatentSpec


_PART_ALIGNMENT = 64
"""Bytes that each part of a state begins at a multiple of: a cache line."""


def align_part(nbytes: int) -> int:
    """Size of a part of a state, with what lies behind it."""
    return -(-nbytes // _PART_ALIGNMENT) * _PART_ALIGNMENT


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """A layer of the gated delta rule, as one rank computes it: it keeps a state per sequence, and
    nothing per token."""

    key_heads: int
    value_heads: int
    """Those of a key head follow each other."""
    key_dim: int
    value_dim: int
    taps: int
    """Tokens that the convolution sees."""
    first_value_head: int = 0
    """Number of the rank's first value head in the whole model."""

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def conv_shape(self) -> tuple[int, int]:
        """The last inputs of the convolution."""
        return (self.taps - 1, self.channels)

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        return (self.value_heads, self.key_dim, self.value_dim)

    def state_bytes(self, dtype: str) -> int:
        """Size of a sequence's state, of which the matrix is float32. Args: `dtype`: of compute."""
        conv = math.prod(self.conv_shape) * DTYPE_BYTES[dtype]
        return align_part(conv) + align_part(math.prod(self.matrix_shape) * 4)


def common_heads(layers: Sequence[LayerAttention]) -> AttentionSpec:
    """The heads that all layers have, without their windows and chunks.

    Raises ValueError where layers differ, because the pool has one shape for all of them.
    """
    first = layers[0]
    for number, layer in enumerate(layers):
        if _without_window(layer) != _without_window(first):
            raise ValueError(f"layer {number} has {layer}, layer 0 has {first}")
    heads = _without_window(first)
    if isinstance(heads, LatentSpec):
        raise ValueError(f"layer 0 has latents in place of heads: {heads}")
    return heads


def _without_window(layer: LayerAttention) -> LayerAttention:
    return layer if isinstance(layer, LatentSpec) else replace(layer, window=0, chunk=0)


def common_latents(layers: Sequence[LayerAttention]) -> LatentSpec | None:
    """The latents that all layers have; None where the layers have heads.

    Raises ValueError where layers differ.
    """
    first = layers[0]
    if not isinstance(first, LatentSpec):
        return None
    for number, layer in enumerate(layers):
        if layer != first:
            raise ValueError(f"layer {number} has {layer}, layer 0 has {first}")
    return first


@dataclass(frozen=True, slots=True)
class ClampedSilu:
    """gate * sigmoid(gain * gate) * (up + 1), of gates up to `limit`, and of up as far from 0."""

    gain: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """What experts compute beside their products."""

    clamped: ClampedSilu | None = None
    """None: silu(gate) * up."""
    weighs_inputs: bool = False
    """A token's weight for an expert multiplies what enters it, and not its result."""


PLAIN_EXPERTS = ExpertForm()


@dataclass(frozen=True, slots=True)
class ExpertShapes:
    """Sizes of a mixture of experts on one rank."""

    inner_size: int
    experts_per_token: int


@dataclass(frozen=True, slots=True)
class KernelShapes:
    """Sizes of one rank's share of a model that decide which GPU kernels can compute it."""

    dtype: str
    vocab_size: int
    hidden_size: int
    inner_sizes: dict[str, int]
    """Width behind each activation, by the name of its field in config.json."""
    heads: AttentionSpec | None
    """None: the layers have latents."""
    experts: tuple[ExpertShapes, ...] = ()
    """Those of all layers, each once."""
    is_quantized: bool = False
    """Whether matrices stay quantized."""
    state: DeltaSpec | None = None
    """Of the layers that keep a state per sequence, which are alike; None: no layer does."""
