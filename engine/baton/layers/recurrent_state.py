"""States of sequences in layers that keep one of the same size however long a sequence is.

    slot  | conv of layer 0 | S of layer 0 | conv of layer 1 | S of layer 1 | ...

A conv is the last inputs of the convolution, [taps - 1, channels] in the compute type, the oldest
first; S is the matrix of each head, float32 [value_heads, key_dim, value_dim].

1. `begin_rows` prepares a step: rows at position 0 find zeros; 2. the layers' kernels read and
write the states of the step's rows in place.

Invariant: a slot's state has seen the tokens of its sequence up to the next row's first position. A
row that begins elsewhere is refused: a state cannot take back a token, and every later token would
be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.layers.spec import DeltaSpec

_ALIGNMENT = 64
"""Bytes that each part begins at a multiple of: a cache line."""


class StateError(Exception):
    """A row does not continue the state of its slot."""


class LayerState(NamedTuple):
    """The states of one layer, by slot."""

    conv: Tensor
    """[slots, taps - 1, channels]"""
    matrix: Tensor
    """float32 [slots, value_heads, key_dim, value_dim]"""


class StateRows(NamedTuple):
    """Rows of a step: tokens [starts[r], ends[r]) of the step continue the state of slots[r]."""

    starts: Tensor
    """int32 [R]"""
    ends: Tensor
    """int32 [R]"""
    slots: Tensor
    """int32 [R], each once"""

    def in_order(self) -> Iterator[tuple[int, int, int]]:
        """Start, end and slot of each row."""
        return zip(self.starts.tolist(), self.ends.tolist(), self.slots.tolist(), strict=True)


@dataclass(frozen=True, slots=True)
class StepStates:
    """What a step's layers read and write."""

    layers: list[LayerState]
    """By number among the layers with a state."""
    rows: StateRows


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class StatePool:
    """States of all slots, in memory that is taken from the system when a slot is first used."""

    def __init__(self, layers: tuple[DeltaSpec, ...], dtype: torch.dtype, slots: int) -> None:
        """Args: `dtype`: the compute type."""
        parts = [
            (kind, shape)
            for layer in layers
            for kind, shape in ((dtype, layer.conv_shape), (torch.float32, layer.matrix_shape))
        ]
        sizes = [math.prod(shape) * kind.itemsize for kind, shape in parts]
        self.slot_bytes = sum(map(_padded, sizes))
        # torch.zeros would write all of it, and most slots are never used at once.
        data = torch.from_numpy(np.zeros((slots, self.slot_bytes), np.uint8))
        views = []
        first = 0
        for (kind, shape), nbytes in zip(parts, sizes, strict=True):
            views.append(data[:, first : first + nbytes].view(kind).unflatten(1, shape))
            first += _padded(nbytes)
        self.layers = list(map(LayerState, views[::2], views[1::2]))
        self._data = data
        self._tokens: NDArray[np.int64] = np.zeros(slots, np.int64)
        """How many tokens each slot's state has seen."""

    def begin_rows(
        self, slots: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> StepStates:
        """Prepare a step whose rows have `lengths` tokens from position `starts` on.

        Raises StateError for a row that does not continue its slot's state.
        """
        fresh = slots[starts == 0]
        self._tokens[fresh] = 0
        apart = np.flatnonzero(self._tokens[slots] != starts)
        if len(apart):
            slot = slots[apart[0]]
            raise StateError(
                f"slot {slot}: its state has seen {self._tokens[slot]} tokens, and the row begins "
                f"at position {starts[apart[0]]}; a sequence restarts at 0"
            )
        for slot in fresh:
            self._data[slot] = 0
        self._tokens[slots] = starts + lengths
        ends = np.cumsum(lengths)
        columns = (ends - lengths, ends, slots)
        rows = StateRows(*(torch.from_numpy(column.astype(np.int32)) for column in columns))
        return StepStates(self.layers, rows)
