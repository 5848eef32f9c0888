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
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from baton.cache.group_pages import GroupRule
from baton.layers.spec import (
    DTYPE_BYTES,
    DeltaSpec,
    LatentSpec,
    LayerAttention,
    common_heads,
    common_latents,
)

NumberRange = tuple[int, int]
"""Ascending numbers: the first one, and the one after the last."""
GroupKind = Literal["full", "latent", "window", "chunk", "state"]
"""Every token of a sequence has a place in a page: `full` for its K and V, `latent` for a latent
and a rotated key that all heads share. `window` and `chunk`: tokens that later ones still see.
`state`: what layers keep of a whole sequence, in pages that have no tokens."""
HASH_CHARS = 16
FP8 = "fp8_e4m3"
"""Pages hold codes of a byte: a sign, 4 bits of exponent, 3 of mantissa."""
PAGE_DTYPE_BYTES = {**DTYPE_BYTES, FP8: 1}
UNSCALED = "none"
"""In place of scales, for pages that hold K and V themselves."""


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
class KvScales:
    """What the numbers of a layer's codes are multiplied by: float32, positive and finite."""

    key: float = 1.0
    value: float = 1.0


def _hash_scales(scales: Sequence[KvScales]) -> str:
    numbers = [number for layer in scales for number in (layer.key, layer.value)]
    return hashlib.sha256(struct.pack(f"<{len(numbers)}f", *numbers)).hexdigest()[:HASH_CHARS]


ROLLING_SNAPSHOT_TOKENS = 64
"""Tokens of an answer from one rolling snapshot to the next (cache.group_pages). The copy moves a
state's bytes twice, as a step does: every 64 tokens that is 2 % of what states move."""


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
    retain: str
    """How long a sequence's pages are kept: `all`, as long as the sequence; `last W`, while one of
    the last W tokens is in them; `chunk C`, while the sequence is in the same C tokens; `latest`:
    there is one state at a time."""
    shape: tuple[int, ...]
    """Of a page as a tensor: the sizes of the axes of `dims`; empty: parts of a state have several
    types."""
    scales: tuple[KvScales, ...] = ()
    """Of the codes of each layer of the group; empty where pages hold K and V themselves."""
    tokens_at: str = ""
    """Which tokens of a prompt a state has seen that P sends to D: `N`, all of them, so that D
    computes the first one behind the prompt; empty: the group has no states."""

    @property
    def layer_numbers(self) -> list[int]:
        return [layer for first, end in self.layers for layer in range(first, end)]

    @property
    def width(self) -> int:
        """Pages that one page of tokens takes: each has `shape[0]` of the layers, in their order;
        the last one may have fewer."""
        return -(-len(self.layer_numbers) // self.shape[0])

    @property
    def rule(self) -> GroupRule | None:
        """What a sequence holds of a further group; None: of group 0, which keeps everything."""
        if self.kind not in ("window", "chunk"):
            return None
        return GroupRule(self.kind, int(self.retain.split()[1]), self.width)

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
            "scales": _hash_scales(self.scales) if self.scales else UNSCALED,
            **({"tokens_at": self.tokens_at} if self.tokens_at else {}),
        }


def describe_heads(
    layers: Sequence[int],
    heads: Sequence[int],
    head_dim: int,
    *,
    dtype: str,
    page_tokens: int,
    head_padding: int = 0,
    scales: tuple[KvScales, ...] = (),
) -> GroupDescriptor:
    """The group of K and V of attention heads.

    Args:
        layers, heads: their numbers in the whole model, ascending.
        head_padding: unused elements behind the `head_dim` of each head.
        scales: of the codes of each layer, for a `dtype` of codes.
    """
    if len(scales) != (len(layers) if dtype == FP8 else 0):
        raise ValueError(f"{len(scales)} scales for {len(layers)} layers of {dtype}")
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
        page_bytes=math.prod(shape) * PAGE_DTYPE_BYTES[dtype],
        retain="all",
        shape=shape,
        scales=scales,
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


def describe_states(
    states: Mapping[int, DeltaSpec], *, id: int, dtype: str, page_bytes: int
) -> GroupDescriptor:
    """The group of states, which lie in the pages of another group's size: those of all layers one
    after the other, divided among pages wherever one is full.

    Args:
        states: by the numbers of their layers in the whole model.
        dtype: of compute.

    Raises ValueError where layers differ: one group has one shape.
    """
    delta, *others = dict.fromkeys(states.values())
    if others:
        raise ValueError(f"layers have states of different sizes: {delta} and {others[0]}")
    sizes = f"{delta.key_size}|{delta.key_size}|{delta.value_size}"
    heads = range(delta.first_value_head, delta.first_value_head + delta.value_heads)
    return GroupDescriptor(
        id=id,
        kind="state",
        layers=to_ranges(states),
        heads=to_ranges(heads),
        dims=f"layer,conv|matrix=tap*channel|head*key*value,tap={delta.conv_shape[0]},"
        f"channel=q|k|v:{sizes},key={delta.key_dim},value={delta.value_dim},matrix_dtype=float32",
        dtype=dtype,
        page_tokens=0,
        page_bytes=page_bytes,
        retain="latest",
        shape=(),
        tokens_at="N",
    )


def describe_attention(
    layers: Sequence[LayerAttention],
    dtype: str,
    page_tokens: int,
    scales: tuple[KvScales, ...] = (),
    numbers: Sequence[int] | None = None,
) -> GroupDescriptor:
    """The group of a decoder whose layers all have the same heads, or the same latents.

    Args:
        scales: of the codes of each layer's heads.
        numbers: of the layers in the whole model; None: there are no others.

    Raises ValueError where they differ: one group has one shape.
    """
    if numbers is None:
        numbers = range(len(layers))
    latents = common_latents(layers)
    if latents is not None:
        return describe_latents(numbers, latents, dtype=dtype, page_tokens=page_tokens)
    heads = common_heads(layers)
    return describe_heads(
        numbers,
        range(heads.first_kv_head, heads.first_kv_head + heads.num_kv_heads),
        heads.head_dim,
        dtype=dtype,
        page_tokens=page_tokens,
        scales=scales,
    )


class LayerPlace(NamedTuple):
    """Where the pages of a layer are."""

    table: int
    """Page table. A step's rows have one for group 0, and `width` for each further group."""
    row: int
    """Place of the layer in a page."""


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The page groups of a rank's KV pool. Their pages have one size and come from one pool."""

    groups: tuple[GroupDescriptor, ...]
    """The first one holds every token of a sequence."""
    computed_in: str | None = None
    """Type of the K and V that a step writes; None: that of the pages, which hold no codes."""
    states: GroupDescriptor | None = None
    """Of the states that P sends to D, in pages of the same pool."""
    snapshots: GroupRule | None = None
    """What sequences hold of snapshots of states, in pages like those."""

    @property
    def page_dtype(self) -> str:
        """Type of the pages."""
        return self.full_group.dtype

    @property
    def compute_dtype(self) -> str:
        """Type in which the model computes, and attention with it."""
        return self.computed_in or self.page_dtype

    @property
    def full_group(self) -> GroupDescriptor:
        return self.groups[0]

    @property
    def rules(self) -> tuple[GroupRule, ...]:
        """What sequences hold of the further groups, snapshots last."""
        rules = tuple(group.rule for group in self.groups if group.rule is not None)
        return rules if self.snapshots is None else (*rules, self.snapshots)

    @property
    def described(self) -> tuple[GroupDescriptor, ...]:
        """All groups whose pages travel, in the order of the layout."""
        return self.groups if self.states is None else (*self.groups, self.states)

    def with_states(self, states: Mapping[int, DeltaSpec], interval: int) -> KVSpec:
        """The same pool with states, and snapshots of them every `interval` tokens.

        Args: `states`: by the numbers of their layers in the whole model.
        """
        dtype = self.compute_dtype
        group = describe_states(
            states, id=len(self.groups), dtype=dtype, page_bytes=self.page_bytes
        )
        state_bytes = sum(state.state_bytes(dtype) for state in states.values())
        width = -(-state_bytes // self.page_bytes)
        return replace(
            self,
            states=group,
            snapshots=GroupRule("state", interval, width, ROLLING_SNAPSHOT_TOKENS),
        )

    @property
    def num_tables(self) -> int:
        """Page tables of tokens that a sequence has: one for each page of a block."""
        return sum(group.width for group in self.groups)

    @property
    def layer_places(self) -> list[LayerPlace]:
        """By layer."""
        places: dict[int, LayerPlace] = {}
        table = 0
        for group in self.groups:
            in_page = group.shape[0]
            for place, layer in enumerate(group.layer_numbers):
                places[layer] = LayerPlace(table + place // in_page, place % in_page)
            table += group.width
        return [places[layer] for layer in sorted(places)]

    @property
    def layer_scales(self) -> tuple[KvScales, ...]:
        """By layer, where the pages hold codes; else empty."""
        scales: dict[int, KvScales] = {}
        for group in self.groups:
            scales.update(zip(group.layer_numbers, group.scales, strict=False))
        return tuple(scales[layer] for layer in sorted(scales))

    @property
    def page_bytes(self) -> int:
        return self.full_group.page_bytes

    @property
    def summary(self) -> list[dict[str, object]]:
        """The groups for people: `page_groups` of GET /get_server_info. `block_bytes`: what a page
        of tokens takes in the group, or a snapshot."""
        groups: list[dict[str, object]] = [
            {
                "kind": group.kind,
                "retain": group.retain,
                "layers": len(group.layer_numbers),
                "block_bytes": group.width * self.page_bytes,
            }
            for group in self.groups
        ]
        if self.snapshots is not None:
            retain = f"every {self.snapshots.size} tokens"
            block_bytes = self.snapshots.width * self.page_bytes
            groups.append({"kind": "state", "retain": retain, "block_bytes": block_bytes})
        return groups

    @property
    def token_bytes(self) -> int:
        """Bytes that each token of a sequence takes as long as the sequence lives."""
        return self.page_bytes // self.full_group.page_tokens

    def divide(self, layers: Sequence[LayerAttention]) -> KVSpec:
        """The same pool with a further group for each window or chunk that some layers see.

        All pages are as large as those of the layers that see everything: a page of tokens takes
        several of them where more layers see a part. Without layers that see everything there is
        nothing that prompts could be found by, and all pages are kept.
        """
        (group,) = self.groups
        by_sight = _layers_by_sight(group, layers)
        seeing_all = by_sight.pop(None, [])
        parts = [(sight, numbers) for sight, numbers in by_sight.items() if sight is not None]
        if not seeing_all or not parts:
            return self
        full = _part_of(group, seeing_all, len(seeing_all))
        further = [
            replace(
                _part_of(group, numbers, len(seeing_all)),
                id=number,
                kind=kind,
                retain=f"{'last' if kind == 'window' else 'chunk'} {size}",
            )
            for number, ((kind, size), numbers) in enumerate(sorted(parts), start=1)
        ]
        return replace(self, groups=(full, *further))

    @property
    def groups_hash(self) -> str:
        """Equal on two nodes if and only if all coordinates of their groups are."""
        described = [group.to_wire() for group in self.described]
        canonical = json.dumps(described, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:HASH_CHARS]

    def layout(self, model_hash: str) -> dict[str, object]:
        """What two nodes compare before pages travel: the `layout` of a TransferNode."""
        group = self.full_group
        return {
            "groups": [each.to_wire() for each in self.described],
            "groups_hash": self.groups_hash,
            "dtype": self.compute_dtype,
            "page_size": group.page_tokens,
            "page_bytes": group.page_bytes,
            "model_hash": model_hash,
        }


_Sight = tuple[Literal["window", "chunk"], int]


def _layers_by_sight(
    group: GroupDescriptor, layers: Sequence[LayerAttention]
) -> dict[_Sight | None, list[int]]:
    """Numbers of layers by the part of a sequence that they see; None: all of it."""
    parts: dict[_Sight | None, list[int]] = {}
    for number, layer in zip(group.layer_numbers, layers, strict=True):
        sight: _Sight | None = None
        if not isinstance(layer, LatentSpec) and (layer.window or layer.chunk):
            sight = ("window", layer.window) if layer.window else ("chunk", layer.chunk)
        parts.setdefault(sight, []).append(number)
    return parts


def _part_of(group: GroupDescriptor, numbers: list[int], in_page: int) -> GroupDescriptor:
    """The group of some of its layers, `in_page` of them in a page."""
    shape = (in_page, *group.shape[1:])
    scales = dict(zip(group.layer_numbers, group.scales, strict=False))
    axes = group.dims.removeprefix("layer,")
    return replace(
        group,
        layers=to_ranges(numbers),
        dims=f"layer={in_page},{axes}",
        page_bytes=group.page_bytes // group.shape[0] * in_page,
        shape=shape,
        scales=tuple(scales[number] for number in numbers if number in scales),
    )
