"""States of a runner's slots, and the snapshots of them that the plan's page tables name.

1. `park` copies the states of slots that get another owner to pages of their sequences; 2.
`begin_step` brings the states of a step's rows to where they begin: zeros at position 0, a snapshot
in front of a prefix that was found, a state of the sequence's own pages (one that P sent, or that
was parked), or what the last step left; 3. the layers compute (layers.recurrent_state), and leave
copies at the page borders that have pages for a snapshot, and at the end of a prompt for D; 4.
`end_step` writes the copies into these pages.

Invariant: a slot's state has seen the tokens of its sequence up to the next row's first position. A
row that begins elsewhere without a snapshot is refused: a state cannot take back a token, and every
later token would be wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.cache.group_pages import NO_PAGE
from baton.layers.kv_pool import KvTensors
from baton.layers.recurrent_state import StateBuffers, StateLevel, StepStates
from baton.layers.spec import DeltaSpec
from baton.runtime.runner.step_inputs import StepInputs
from baton.sched.types.plan import StateCopy


class StateError(Exception):
    """A row does not continue the state of its slot."""


class _Snapshot(NamedTuple):
    """A copy that the step takes, of a snapshot or of a state that D gets."""

    copy: int
    level: int
    pages: NDArray[np.int32]


class SlotStates:
    def __init__(
        self, layers: tuple[DeltaSpec, ...], kv: KvTensors, slots: int, pages: int
    ) -> None:
        """Args: `pages`: pages of tokens that a page table has room for."""
        self._layers = layers
        self._dtype = kv.compute_dtype
        self._page_size = kv.page_size
        self.buffers = StateBuffers(layers, self._dtype, slots)
        """States by slot."""
        self._tokens: NDArray[np.int64] = np.zeros(slots, np.int64)
        """How many tokens each slot's state has seen."""
        self._group = -1
        """Number of the snapshots among the further page groups; -1: none are taken."""
        width = 1
        if kv.spec.snapshots is not None:
            self._group = len(kv.spec.rules) - 1
            width = kv.spec.snapshots.width
        self._table: NDArray[np.int32] = np.full((slots, pages, width), NO_PAGE, np.int32)
        self._page_bytes = kv.data.flatten(1).view(torch.uint8)
        """[pages of the pool, bytes of a page]"""
        self._copies: StateBuffers | None = None
        self._taken: list[_Snapshot] = []
        """Of the step that is being computed."""

    @property
    def slot_bytes(self) -> int:
        """Size of a sequence's states."""
        return self.buffers.slot_bytes

    def park(self, step: StepInputs) -> None:
        """Copy states out of slots that get another owner, before anything else of a step."""
        for kind, slot, tokens, pages in step.states:
            if kind == "park":
                _check_kept(slot, tokens, int(self._tokens[slot]))
                self._write_pages(self.buffers.data[slot], pages)

    def begin_step(self, step: StepInputs) -> StepStates:
        """Prepare the states of a step's rows. Raises StateError."""
        self._read_tables(step)
        saves: dict[int, StateCopy] = {}
        for each in step.states:
            if each.kind == "load":
                self._read_pages(each.pages, self.buffers.data[each.slot])
                self._tokens[each.slot] = each.tokens
            elif each.kind == "save":
                saves[each.slot] = each
        snapshots: dict[int, _Snapshot] = {}
        levels = [StateLevel()]
        first = 0
        for slot, start, n in zip(
            step.slots.tolist(), step.starts.tolist(), step.lengths.tolist(), strict=True
        ):
            level = 0
            if self._tokens[slot] != start or start == 0:
                source = self._restore(slot, start, snapshots)
                if source is not None:
                    level = source.level + 1
                    _level_at(levels, level).loads.append((source.copy, slot))
            position = start
            end = start + n
            for place in self._snapshot_places(slot, start, end):
                border = (place + 1) * self._page_size
                here = _level_at(levels, level)
                here.rows.append((first + position - start, first + border - start, slot))
                pages = self._table[slot, place].copy()
                taken = _Snapshot(len(snapshots), level, pages)
                here.saves.append((slot, taken.copy))
                snapshots[int(pages[0])] = taken
                level += 1
                position = border
            if position < end:
                rows = _level_at(levels, level).rows
                rows.append((first + position - start, first + n, slot))
            if slot in saves:
                _check_kept(slot, saves[slot].tokens, end)
                pages = np.frombuffer(saves[slot].pages, np.int32)
                taken = _Snapshot(len(snapshots), level, pages)
                _level_at(levels, level).saves.append((slot, taken.copy))
                snapshots[int(pages[0])] = taken
            self._tokens[slot] = end
            first += n
        self._taken = list(snapshots.values())
        self._copies = None
        if snapshots:
            self._copies = StateBuffers(self._layers, self._dtype, len(snapshots))
        return StepStates(self.buffers, levels, self._copies)

    def end_step(self) -> None:
        """Write the step's copies into the pages of their snapshots."""
        if self._copies is None:
            return
        for snapshot in self._taken:
            self._write_pages(self._copies.data[snapshot.copy], snapshot.pages)
        self._copies = None
        self._taken = []

    def _read_tables(self, step: StepInputs) -> None:
        for slot, base, _ in step.growth:
            # A sequence's first row on this slot: nothing of the last owner counts.
            if base == 0:
                self._tokens[slot] = 0
                self._table[slot] = NO_PAGE
        for slot, group, base, pages in step.further:
            if group == self._group:
                self._table[slot].reshape(-1)[base : base + len(pages)] = pages

    def _snapshot_places(self, slot: int, start: int, end: int) -> list[int]:
        """Pages of tokens of a row at whose end there are pages for a snapshot."""
        first = start // self._page_size
        blocks = self._table[slot, first : end // self._page_size, 0].tolist()
        return [first + place for place, page in enumerate(blocks) if page != NO_PAGE]

    def _restore(self, slot: int, start: int, snapshots: dict[int, _Snapshot]) -> _Snapshot | None:
        """Bring a slot's state to position `start`. Returns the copy that it begins with, where the
        same step takes it."""
        if start == 0:
            self.buffers.data[slot] = 0
            return None
        place, behind = divmod(start, self._page_size)
        pages = self._table[slot, place - 1].tolist()
        if behind or pages[0] == NO_PAGE:
            raise StateError(
                f"slot {slot}: its state has seen {self._tokens[slot]} tokens, and the row begins "
                f"at position {start}, where there is no snapshot; a sequence restarts at one, or "
                "at 0"
            )
        if pages[0] in snapshots:
            return snapshots[pages[0]]
        self._read_pages(pages, self.buffers.data[slot])
        return None

    def _read_pages(self, pages: Iterable[int], state: Tensor) -> None:
        for page, part in zip(pages, state.split(self._page_bytes.shape[1]), strict=True):
            part.copy_(self._page_bytes[page, : len(part)])

    def _write_pages(self, state: Tensor, pages: Iterable[int]) -> None:
        for page, part in zip(pages, state.split(self._page_bytes.shape[1]), strict=True):
            self._page_bytes[page, : len(part)] = part


def _check_kept(slot: int, tokens: int, seen: int) -> None:
    """Raise StateError if a state that has `seen` so many tokens is to be kept as one of others."""
    if seen != tokens:
        raise StateError(
            f"slot {slot}: the state of {tokens} tokens is to be kept, and it has seen {seen}"
        )


def _level_at(levels: list[StateLevel], number: int) -> StateLevel:
    while len(levels) <= number:
        levels.append(StateLevel())
    return levels[number]
