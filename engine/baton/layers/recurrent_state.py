"""States of sequences in layers that keep one of the same size however long a sequence is.

    slot  | conv of layer 0 | S of layer 0 | conv of layer 1 | S of layer 1 | ...

A conv is the last inputs of the convolution, [taps - 1, channels] in the compute type, the oldest
first; S is the matrix of each head, float32 [value_heads, key_dim, value_dim].

A step's tokens are computed in levels, one after the other within each layer: a row that takes
copies of its state on the way is in one level up to the first copy, and in the next one behind it;
a row that begins with a copy that the same step takes is in a level behind that one's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.layers.spec import DeltaSpec, align_part


class LayerState(NamedTuple):
    """The states of one layer, by slot."""

    conv: Tensor
    """[slots, taps - 1, channels]"""
    matrix: Tensor
    """float32 [slots, value_heads, key_dim, value_dim]"""


class StateBuffers:
    """States of so many slots, in memory that is taken from the system when it is first used."""

    def __init__(self, layers: tuple[DeltaSpec, ...], dtype: torch.dtype, slots: int) -> None:
        """Args: `dtype`: the compute type."""
        parts = [
            (kind, shape)
            for layer in layers
            for kind, shape in ((dtype, layer.conv_shape), (torch.float32, layer.matrix_shape))
        ]
        sizes = [math.prod(shape) * kind.itemsize for kind, shape in parts]
        self.slot_bytes = sum(map(align_part, sizes))
        # torch.zeros would write all of it, and most slots are never used at once.
        self.data = torch.from_numpy(np.zeros((slots, self.slot_bytes), np.uint8))
        """uint8 [slots, slot_bytes]"""
        views = []
        first = 0
        for (kind, shape), nbytes in zip(parts, sizes, strict=True):
            views.append(self.data[:, first : first + nbytes].view(kind).unflatten(1, shape))
            first += align_part(nbytes)
        self.layers = list(map(LayerState, views[::2], views[1::2]))


class StateRows(NamedTuple):
    """Rows of a step: tokens [starts[r], ends[r]) of the step continue the state of slots[r]."""

    starts: Tensor
    """int32 [R]"""
    ends: Tensor
    """int32 [R]"""
    slots: Tensor
    """int32 [R], each once"""

    @staticmethod
    def make(rows: list[tuple[int, int, int]]) -> StateRows:
        """Args: `rows`: start, end and slot of each, in the order of tokens."""
        columns = np.array(rows, np.int32).reshape(-1, 3).T
        return StateRows(*(torch.from_numpy(column.copy()) for column in columns))

    def in_order(self) -> Iterator[tuple[int, int, int]]:
        """Start, end and slot of each row."""
        return zip(self.starts.tolist(), self.ends.tolist(), self.slots.tolist(), strict=True)


@dataclass(slots=True)
class StateLevel:
    """Rows, or parts of them, that are computed together; copies before and behind them."""

    rows: list[tuple[int, int, int]] = field(default_factory=list)
    """First token, the one behind the last, slot."""
    loads: list[tuple[int, int]] = field(default_factory=list)
    """A copy, and the slot that begins with it."""
    saves: list[tuple[int, int]] = field(default_factory=list)
    """A slot, and the copy that it leaves."""


class StepStates:
    """What a step's layers read and write."""

    def __init__(
        self, states: StateBuffers, levels: list[StateLevel], copies: StateBuffers | None = None
    ) -> None:
        """Args: `copies`: those that levels name."""
        self._states = states
        self._copies = copies
        self._levels = [(level, StateRows.make(sorted(level.rows))) for level in levels]

    def layer(self, number: int) -> LayerState:
        """States of a layer, by its number among those that have some."""
        return self._states.layers[number]

    def advance(self, layer: int, part: int, compute: Callable[[StateRows], None]) -> None:
        """Compute a part of a layer's states, level by level. Args: `part`: place in LayerState."""
        state = self._states.layers[layer][part]
        copies = None if self._copies is None else self._copies.layers[layer][part]
        for level, rows in self._levels:
            for copy, slot in level.loads:
                assert copies is not None, "levels load copies that the step takes"
                state[slot] = copies[copy]
            compute(rows)
            for slot, copy in level.saves:
                assert copies is not None, "levels save to copies that the step has"
                copies[copy] = state[slot]
