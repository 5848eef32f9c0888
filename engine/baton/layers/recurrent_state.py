"""States of sequences in layers that keep one of the same size however long a sequence is.

    slot  | conv of layer 0 | S of layer 0 | conv of layer 1 | S of layer 1 | ...

A conv is the last inputs of the convolution, [taps - 1, channels] in the compute type, the oldest
first; S is the matrix of each head, float32 [value_heads, key_dim, value_dim].

A copy of a state fills pages of the KV pool, one after the other, with the bytes of its slot.

A step's tokens are computed in levels, one after the other within each layer: a row that leaves
copies of its state on the way is in one level up to the first copy, and in the next one behind it;
a row that begins with a copy that the same step takes is in a level behind that one's.

On a GPU everything here is queued on the current stream, and the host waits for nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.layers.spec import DeltaSpec, align_part

PutOnDevice: TypeAlias = Callable[[NDArray[np.int32]], Tensor]
"""Makes a copy of an array where the states are."""


class LayerState(NamedTuple):
    """The states of one layer, by slot."""

    conv: Tensor
    """[slots, taps - 1, channels]"""
    matrix: Tensor
    """float32 [slots, value_heads, key_dim, value_dim]"""


class StateBuffers:
    """States of so many slots."""

    def __init__(
        self,
        layers: tuple[DeltaSpec, ...],
        dtype: torch.dtype,
        slots: int,
        device: torch.device | None = None,
    ) -> None:
        """Args: `dtype`: the compute type. `device`: None is the host, which has memory for a slot
        from its first use on."""
        parts = [
            (kind, shape)
            for layer in layers
            for kind, shape in ((dtype, layer.conv_shape), (torch.float32, layer.matrix_shape))
        ]
        sizes = [math.prod(shape) * kind.itemsize for kind, shape in parts]
        self.slot_bytes = sum(map(align_part, sizes))
        if device is None or device.type == "cpu":
            # torch.zeros would write all of it, and most slots are never used at once.
            self.data = torch.from_numpy(np.zeros((slots, self.slot_bytes), np.uint8))
        else:
            self.data = torch.zeros((slots, self.slot_bytes), dtype=torch.uint8, device=device)
        """uint8 [slots, slot_bytes]"""
        self.ranges: list[range] = []
        """Bytes of each part of a slot: conv of layer 0, S of layer 0, conv of layer 1, ..."""
        views = []
        first = 0
        for (kind, shape), nbytes in zip(parts, sizes, strict=True):
            views.append(self.data[:, first : first + nbytes].view(kind).unflatten(1, shape))
            self.ranges.append(range(first, first + align_part(nbytes)))
            first += align_part(nbytes)
        self.layers = list(map(LayerState, views[::2], views[1::2]))


class StateRows(NamedTuple):
    """Rows of a step: tokens [starts[r], ends[r]) of the step continue the state of slots[r]."""

    starts: Tensor
    """int32 [R]"""
    ends: Tensor
    """int32 [R]. A row of a recorded step that only fills it up ends where it starts: its slot is
    none, and nothing is read or written."""
    slots: Tensor
    """int32 [R], each once"""
    longest: int
    """Most tokens of a row."""

    @staticmethod
    def make(rows: list[tuple[int, int, int]], put: PutOnDevice = torch.from_numpy) -> StateRows:
        """Args: `rows`: start, end and slot of each, in the order of tokens."""
        columns = np.array(rows, np.int32).reshape(-1, 3).T
        starts, ends, slots = put(np.ascontiguousarray(columns)).unbind()
        return StateRows(starts, ends, slots, int((columns[1] - columns[0]).max(initial=0)))

    def in_order(self) -> Iterator[tuple[int, int, int]]:
        """Start, end and slot of each row that has tokens."""
        columns = (self.starts.tolist(), self.ends.tolist(), self.slots.tolist())
        return (row for row in zip(*columns, strict=True) if row[0] < row[1])


class StateCopies(NamedTuple):
    """Slots, and the pages of each one's copy."""

    slots: Tensor
    """int32 [n], each once where copies are loaded."""
    pages: Tensor
    """int32 [n, width]"""

    @staticmethod
    def make(copies: list[tuple[int, NDArray[np.int32]]], put: PutOnDevice) -> StateCopies:
        table = put(np.stack([np.array([slot, *pages], np.int32) for slot, pages in copies]))
        return StateCopies(table[:, 0].contiguous(), table[:, 1:].contiguous())


class CopyStates(Protocol):
    """`layers.ops.copy_states`, which is above this module."""

    def __call__(
        self, states: Tensor, pages: Tensor, copies: StateCopies, part: range, *, to_pages: bool
    ) -> None: ...


@dataclass(slots=True)
class StateLevel:
    """Rows, or parts of them, that are computed together; copies before and behind them."""

    rows: list[tuple[int, int, int]] = field(default_factory=list)
    """First token, the one behind the last, slot."""
    loads: list[tuple[int, NDArray[np.int32]]] = field(default_factory=list)
    """A slot that begins with a copy, and the pages of that."""
    saves: list[tuple[int, NDArray[np.int32]]] = field(default_factory=list)
    """A slot that leaves a copy, and the pages of that."""
    trails: list[tuple[int, int]] = field(default_factory=list)
    """A slot that leaves a copy beside the pool, and the number of that."""


class _PlacedLevel(NamedTuple):
    """A level where the states are."""

    rows: StateRows
    loads: StateCopies | None = None
    saves: StateCopies | None = None
    trails: Sequence[tuple[int, int]] = ()


class StepStates:
    """What a step's layers read and write."""

    def __init__(
        self,
        states: StateBuffers,
        pages: Tensor,
        copy_states: CopyStates,
        levels: Sequence[StateLevel] = (),
        put: PutOnDevice = torch.from_numpy,
        trails: Sequence[StateBuffers] = (),
    ) -> None:
        """Args: `pages`: as `copy_states` has them. `trails`: copies of the same slots, by
        number."""
        self._states = states
        self._pages = pages
        self._copy_states = copy_states
        self._levels = levels
        self._put = put
        self._trails = trails

    @functools.cached_property
    def _placed_levels(self) -> list[_PlacedLevel]:
        """Made when a layer asks: a replayed step has rows of its own."""
        put = self._put
        return [
            _PlacedLevel(
                StateRows.make(sorted(level.rows), put),
                StateCopies.make(level.loads, put) if level.loads else None,
                StateCopies.make(level.saves, put) if level.saves else None,
                level.trails,
            )
            for level in self._levels
        ]

    @staticmethod
    def of_rows(
        states: StateBuffers, pages: Tensor, copy_states: CopyStates, rows: StateRows
    ) -> StepStates:
        """States of rows that neither begin with copies nor leave some on the way."""
        made = StepStates(states, pages, copy_states)
        made._placed_levels = [_PlacedLevel(rows)]
        return made

    @property
    def copies_within(self) -> bool:
        """Whether layers copy states, which a recorded step does not."""
        return any(level.loads or level.saves or level.trails for level in self._levels)

    def layer(self, number: int) -> LayerState:
        """States of a layer, by its number among those that have some."""
        return self._states.layers[number]

    def advance(self, layer: int, part: int, compute: Callable[[StateRows], None]) -> None:
        """Compute a part of a layer's states, level by level. Args: `part`: place in LayerState."""
        data = self._states.data
        span = self._states.ranges[layer * len(LayerState._fields) + part]
        for level in self._placed_levels:
            if level.loads is not None:
                self._copy_states(data, self._pages, level.loads, span, to_pages=False)
            compute(level.rows)
            if level.saves is not None:
                self._copy_states(data, self._pages, level.saves, span, to_pages=True)
            for slot, number in level.trails:
                self._trails[number].data[slot, span.start : span.stop] = data[
                    slot, span.start : span.stop
                ]
