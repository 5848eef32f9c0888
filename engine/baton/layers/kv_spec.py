"""What the pages of a KV pool hold, by logical coordinates. No torch here.

A page group is the pages of one kind: the K and V of some layers and heads, or the latents of some
layers, `page_tokens` tokens a page. Its descriptor names layers and heads by their numbers in the
whole model, whatever share a rank has of it, so that two nodes can compare what their pages mean
before one reads the other's. The descriptors are given to the transfer runtime with the pool and
travel to peers (docs/protocol.md).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from baton.layers.spec import (
    DTYPE_BYTES,
    LatentSpec,
    LayerAttention,
    common_heads,
    common_latents,
)

NumberRange = tuple[int, int]
"""Ascending numbers: the first one, and the one after the last."""
GroupKind = Literal["full", "latent"]
"""Every token of a sequence has a place in a page: `full` for its K and V, `latent` for a latent
and a rotated key that all heads share."""
Retention = Literal["all"]
"""`all`: a sequence's pages are kept as long as the sequence."""
HASH_CHARS = 16


def to_ranges(numbers: Iterable[int]) -> tuple[NumberRange, ...]:
    """The fewest ranges that hold the numbers, which ascend.

    A descriptor has ranges in the place of lists because it travels in PUT /route, whose body is
    bounded.
    """
    ranges: list[NumberRange] = []
    for number in numbers:
        if ranges and number < ranges[-1][1]:
            raise ValueError(f"number {number} comes after {ranges[-1][1] - 1}")
        if ranges and number == ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], number + 1)
        else:
            ranges.append((number, number + 1))
    return tuple(ranges)


@dataclass(frozen=True, slots=True)
class GroupDescriptor:
    """Coordinates of a page group. Two groups are equal if and only if their pages can be
    exchanged byte for byte."""

    id: int
    """Names the group in calls and messages about its pages; equal on nodes that exchange them."""
    kind: GroupKind
    layers: tuple[NumberRange, ...]
    heads: tuple[NumberRange, ...]
    """KV heads of each layer; latents count as one."""
    dims: str
    """The axes of a page in the order of its bytes, the last one contiguous. An axis whose size no
    other coordinate gives states it, and the elements that only pad it: `head_dim=80+16`. Parts of
    an axis are separated by `|`. `pairs` is no axis: it says which elements of a key turned
    together."""
    dtype: str
    page_tokens: int
    page_bytes: int
    retain: Retention
    shape: tuple[int, ...]
    """Of a page as a tensor: the sizes of the axes of `dims`."""

    def to_wire(self) -> dict[str, object]:
        """The descriptor for peers: JSON values."""
        return {
            "id": self.id,
            "kind": self.kind,
            "layers": self.layers,
            "heads": self.heads,
            "dims": self.dims,
            "dtype": self.dtype,
            "page_tokens": self.page_tokens,
            "page_bytes": self.page_bytes,
            "retain": self.retain,
        }


def describe_heads(
    layers: Sequence[int],
    heads: Sequence[int],
    head_dim: int,
    *,
    dtype: str,
    page_tokens: int,
    head_padding: int = 0,
) -> GroupDescriptor:
    """The group of K and V of attention heads.

    Args:
        layers, heads: their numbers in the whole model, ascending.
        head_padding: unused elements behind the `head_dim` of each head.
    """
    padding = f"+{head_padding}" if head_padding else ""
    shape = (len(layers), 2, page_tokens, len(heads), head_dim + head_padding)
    return GroupDescriptor(
        id=0,
        kind="full",
        layers=to_ranges(layers),
        heads=to_ranges(heads),
        dims=f"layer,kv=2,slot,head,head_dim={head_dim}{padding}",
        dtype=dtype,
        page_tokens=page_tokens,
        page_bytes=math.prod(shape) * DTYPE_BYTES[dtype],
        retain="all",
        shape=shape,
    )


def describe_latents(
    layers: Sequence[int], latents: LatentSpec, *, dtype: str, page_tokens: int
) -> GroupDescriptor:
    """The group of latents and rotated keys, side by side in a row per token.

    It is the same on every tensor-parallel rank. Args: `layers`: their numbers in the whole model,
    ascending.
    """
    pairs = "interleaved" if latents.is_interleaved else "halves"
    shape = (len(layers), page_tokens, latents.row_dim)
    return GroupDescriptor(
        id=0,
        kind="latent",
        layers=to_ranges(layers),
        heads=((0, 1),),
        dims=f"layer,slot,latent|key={latents.latent_dim}|{latents.key_dim},pairs={pairs}",
        dtype=dtype,
        page_tokens=page_tokens,
        page_bytes=math.prod(shape) * DTYPE_BYTES[dtype],
        retain="all",
        shape=shape,
    )


def describe_attention(
    layers: Sequence[LayerAttention], dtype: str, page_tokens: int
) -> GroupDescriptor:
    """The group of a decoder whose layers all have the same heads, or the same latents.

    Raises ValueError where they differ: one group has one shape.
    """
    latents = common_latents(layers)
    if latents is not None:
        return describe_latents(range(len(layers)), latents, dtype=dtype, page_tokens=page_tokens)
    heads = common_heads(layers)
    return describe_heads(
        range(len(layers)),
        range(heads.first_kv_head, heads.first_kv_head + heads.num_kv_heads),
        heads.head_dim,
        dtype=dtype,
        page_tokens=page_tokens,
    )


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The page groups of a rank's KV pool."""

    groups: tuple[GroupDescriptor, ...]

    @property
    def sole_group(self) -> GroupDescriptor:
        """The group of the pool. Raises ValueError for several: the pool holds pages of one size."""
        if len(self.groups) != 1:
            ids = [group.id for group in self.groups]
            raise ValueError(f"the KV pool holds the pages of one group, the model has {ids}")
        return self.groups[0]

    @property
    def page_bytes(self) -> int:
        return self.sole_group.page_bytes

    @property
    def token_bytes(self) -> int:
        return self.page_bytes // self.sole_group.page_tokens

    @property
    def groups_hash(self) -> str:
        """Equal on two nodes if and only if all coordinates of their groups are."""
        described = [group.to_wire() for group in self.groups]
        canonical = json.dumps(described, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:HASH_CHARS]

    def layout(self, model_hash: str) -> dict[str, object]:
        """What two nodes compare before pages travel: the `layout` of a TransferNode."""
        group = self.sole_group
        return {
            "groups": [each.to_wire() for each in self.groups],
            "groups_hash": self.groups_hash,
            "dtype": group.dtype,
            "page_size": group.page_tokens,
            "page_bytes": group.page_bytes,
            "model_hash": model_hash,
        }
