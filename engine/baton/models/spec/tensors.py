"""Places of a checkpoint's tensors in the model. No torch here.

Projections that read the same input are stacked into one matrix along dimension 0. A
tensor-parallel rank takes its share (`layers.shard`) of each checkpoint tensor before it is
stacked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from baton.layers.shard import slice_length


class TensorAxis(NamedTuple):
    """Dimension of a checkpoint tensor."""

    size: int
    share: slice | int
    """Taken by this rank; an index takes one entry, and the dimension goes. A slice may have a
    step."""


class Part(NamedTuple):
    """Share of one checkpoint tensor, which fills some rows of ours."""

    source: str
    whole: tuple[int, ...]
    """Shape in the checkpoint."""
    share: tuple[slice | int, ...]
    """Slice or index taken of it, per dimension."""
    is_transposed: bool = False
    """The tensor has [inputs, outputs] where ours has [outputs, inputs]."""

    @property
    def cuts(self) -> tuple[slice, ...]:
        """Slices taken of the tensor, in the order of our dimensions."""
        cuts = tuple(cut for cut in self.share if isinstance(cut, slice))
        return cuts[::-1] if self.is_transposed else cuts

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(slice_length(cut) for cut in self.cuts)

    def cuts_within(self, other: Part) -> tuple[slice, ...]:
        """What this part takes of the tensor that `other` takes, which has all of it."""
        cuts = []
        for own, outer in zip(self.cuts, other.cuts, strict=True):
            first = (own.start - outer.start) // (outer.step or 1)
            cuts.append(slice(first, first + slice_length(own)))
        return tuple(cuts)


class Param(NamedTuple):
    """Tensor of a layer, or of the model outside its layers."""

    name: str
    parts: tuple[Part, ...]
    """Stacked along dimension 0."""
    is_float32: bool = False
    """Kept in float32 whatever the model computes in."""

    @property
    def part_rows(self) -> list[int]:
        """Rows that each part fills."""
        return [part.shape[0] for part in self.parts]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(self.part_rows), *self.parts[0].shape[1:])

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def is_norm(self) -> bool:
        return self.name.endswith("norm")


def whole_axis(n: int) -> TensorAxis:
    return TensorAxis(n, slice(0, n))


def scale_slice(cut: slice, n: int) -> slice:
    """The slice of elements that belongs to a slice of groups of `n`."""
    return slice(cut.start * n, cut.stop * n)


def fused_rows(source: str, axes: Sequence[TensorAxis]) -> list[tuple[str, TensorAxis]]:
    """Axes of one checkpoint tensor that holds several stacked along dimension 0, in their order."""
    whole = sum(axis.size for axis in axes)
    rows = []
    first = 0
    for axis in axes:
        assert isinstance(axis.share, slice), "an index takes one entry of a whole tensor"
        share = slice(axis.share.start + first, axis.share.stop + first)
        rows.append((source, TensorAxis(whole, share)))
        first += axis.size
    return rows


def rows_by_kind(
    source: str, sizes: tuple[int, ...], *, groups: int, own: slice
) -> list[tuple[str, TensorAxis]]:
    """Rows of a tensor that has `groups` groups of rows of several kinds, reordered: those of the
    first kind in all of a rank's groups, then those of the second.

    Args: `sizes`: rows of each kind in a group.
    """
    group_size = sum(sizes)
    rows = []
    first = 0
    for size in sizes:
        for group in range(own.start, own.stop):
            start = group * group_size + first
            rows.append((source, TensorAxis(groups * group_size, slice(start, start + size))))
        first += size
    return rows


def make_param(
    name: str,
    rows_of: Mapping[str, TensorAxis] | Sequence[tuple[str, TensorAxis]],
    *columns: TensorAxis,
    is_float32: bool = False,
) -> Param:
    """Args: `rows_of`: the rows of each checkpoint tensor, in stacking order. `columns` are the
    same for all."""
    parts = []
    pairs = rows_of.items() if isinstance(rows_of, Mapping) else rows_of
    for source, rows in pairs:
        axes = (rows, *columns)
        whole = tuple(axis.size for axis in axes)
        parts.append(Part(source, whole, tuple(axis.share for axis in axes)))
    return Param(name, tuple(parts), is_float32)
