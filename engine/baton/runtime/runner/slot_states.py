"""States of a runner's slots, and the snapshots of them that the plan's page tables name.

1. `park` copies the states of slots that get another owner to pages of their sequences; 2.
`begin_step` brings the states of a step's rows to where they begin: zeros at position 0, a snapshot
in front of a prefix that was found, a state of the sequence's own pages (one that P sent, or that
was parked), or what the last step left; 3. the layers compute (layers.recurrent_state), and leave
copies at the page borders inside a row that have pages for a snapshot; 4. `end_step` copies the
states of rows that end at such a border, and those at the end of a prompt for D.

On a GPU all of it is queued on the stream of the step, in this order.

Invariant: a slot's state has seen the tokens of its sequence up to the next row's first position. A
row that begins elsewhere without a snapshot is refused: no state of that position is left, and
every later token would be wrong. A row with drafts leaves a copy behind each of its tokens but the
last: where the sequence's next row begins, or how many tokens are parked, says which were drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from baton.cache.group_pages import NO_PAGE
from baton.layers import ops
from baton.layers.kv_pool import KvTensors
from baton.layers.recurrent_state import (
    PutOnDevice,
    StateBuffers,
    StateCopies,
    StateLevel,
    StateRows,
    StepStates,
)
from baton.layers.spec import DeltaSpec
from baton.runtime.runner.step_inputs import StepInputs
from baton.sched.types.plan import StateCopy

NO_TRAIL = -1


class StateError(Exception):
    """A row does not continue the state of its slot."""


_Copy: TypeAlias = tuple[int, NDArray[np.int32]]
"""A slot, and the pages of its copy."""


class _Snapshot(NamedTuple):
    """A snapshot that the step takes."""

    level: int
    """The last one that computes what it has seen."""
    copy: _Copy


class _StepLayout:
    """Levels of a step's rows, and the copies before, inside and behind them."""

    def __init__(self) -> None:
        self.loads: list[_Copy] = []
        """Before all levels."""
        self.levels = [StateLevel()]
        self.saves: dict[int, _Copy] = {}
        """Behind all levels, by first page."""
        self._snapshots: dict[int, _Snapshot] = {}
        """By first page."""

    def begin_with(self, slot: int, pages: NDArray[np.int32]) -> int:
        """Let a slot begin with a copy. Returns the level of its row."""
        source = self._snapshots.get(int(pages[0]))
        if source is None:
            self.loads.append((slot, pages))
            return 0
        # The layers of this row need it before the step has ended.
        if self.saves.pop(int(pages[0]), None) is not None:
            self.levels[source.level].saves.append(source.copy)
        level = source.level + 1
        self._level_at(level).loads.append((slot, pages))
        return level

    def add_row(
        self,
        slot: int,
        tokens: range,
        level: int,
        copies: Mapping[int, NDArray[np.int32]],
        *,
        has_drafts: bool,
    ) -> None:
        """Add a row that begins in `level`.

        Args:
            tokens: places of its tokens in the step.
            copies: pages of those that the row leaves, by the place behind the last token that each
                has seen.
            has_drafts: each of its tokens may be the last one that counts.
        """
        position = tokens.start
        cuts = {*copies, *(tokens[1:] if has_drafts else ()), tokens.stop}
        for cut in sorted(cuts):
            here = self._level_at(level)
            here.rows.append((position, cut, slot))
            is_end = cut == tokens.stop
            pages = copies.get(cut)
            if pages is not None:
                self._snapshots[int(pages[0])] = _Snapshot(level, (slot, pages))
                if is_end:
                    self.save_at_end(slot, pages)
                else:
                    here.saves.append((slot, pages))
            if has_drafts and not is_end:
                here.trails.append((slot, cut - tokens.start - 1))
            level += 1
            position = cut

    def save_at_end(self, slot: int, pages: NDArray[np.int32]) -> None:
        self.saves[int(pages[0])] = (slot, pages)

    def _level_at(self, number: int) -> StateLevel:
        while len(self.levels) <= number:
            self.levels.append(StateLevel())
        return self.levels[number]


class SlotStates:
    def __init__(
        self,
        layers: tuple[DeltaSpec, ...],
        kv: KvTensors,
        slots: int,
        put: PutOnDevice = torch.from_numpy,
    ) -> None:
        """Args: `put`: makes a copy of an array on the pool's device."""
        self._put = put
        self._page_size = kv.page_size
        self._dtype = kv.compute_dtype
        self.buffers = StateBuffers(layers, kv.compute_dtype, slots, kv.data.device)
        """States by slot."""
        self._tokens: NDArray[np.int64] = np.zeros(slots, np.int64)
        """How many tokens each slot's state has seen."""
        self._snapshots = kv.spec.snapshots
        self._group = len(kv.spec.rules) - 1
        """Number of the snapshots, where some are taken, among the further page groups."""
        self._tables: list[dict[int, NDArray[np.int32]]] = [{} for _ in range(slots)]
        """Pages of snapshots by slot, and by the page of tokens at whose end one stands."""
        self._page_bytes = kv.data.flatten(1).view(torch.uint8)
        """[pages of the pool, bytes of a page]"""
        self._layers = layers
        self._trails: list[StateBuffers] = []
        """Copies of slots whose last row had drafts: number i has seen the row's first
        i + 1 tokens.
        """
        self._trail_starts: NDArray[np.int64] = np.full(slots, NO_TRAIL, np.int64)
        """How many tokens copy 0 of a slot has seen; NO_TRAIL: its last row had no drafts."""
        self._at_end: list[_Copy] = []
        """Copies that slots leave at the end of the step that is being computed."""

    @property
    def slot_bytes(self) -> int:
        """Size of a sequence's states."""
        return self.buffers.slot_bytes

    def park(self, step: StepInputs) -> None:
        """Copy states out of slots that get another owner, before anything else of a step."""
        copies: list[_Copy] = []
        for kind, slot, tokens, pages in step.states:
            if kind == "park":
                self._take_back_drafts(slot, tokens)
                _check_kept(slot, tokens, int(self._tokens[slot]))
                copies.append((slot, np.frombuffer(pages, np.int32)))
        self._copy_whole(copies, to_pages=True)

    def begin_step(self, step: StepInputs) -> StepStates:
        """Prepare the states of a step's rows. Raises StateError."""
        self._read_tables(step)
        layout = _StepLayout()
        saves: dict[int, StateCopy] = {}
        for each in step.states:
            if each.kind == "load":
                layout.begin_with(each.slot, np.frombuffer(each.pages, np.int32))
                self._tokens[each.slot] = each.tokens
            elif each.kind == "save":
                saves[each.slot] = each
        first = 0
        drafted = range(step.num_decode, step.num_decode + step.num_drafted_rows)
        for row, (slot, start, n) in enumerate(
            zip(step.slots.tolist(), step.starts.tolist(), step.lengths.tolist(), strict=True)
        ):
            level = 0
            self._take_back_drafts(slot, start)
            if start == 0:
                self.buffers.data[slot] = 0
            elif self._tokens[slot] != start:
                level = layout.begin_with(slot, self._find_snapshot(slot, start))
            end = start + n
            copies = {
                first + border - start: pages
                for border, pages in self._snapshots_within(slot, start, end)
            }
            has_drafts = row in drafted
            layout.add_row(slot, range(first, first + n), level, copies, has_drafts=has_drafts)
            if has_drafts:
                self.reserve_drafts(n - 1)
                self._trail_starts[slot] = start + 1
            if slot in saves:
                _check_kept(slot, saves[slot].tokens, end)
                layout.save_at_end(slot, np.frombuffer(saves[slot].pages, np.int32))
            self._tokens[slot] = end
            first += n
        self._copy_whole(layout.loads, to_pages=False)
        self._at_end = list(layout.saves.values())
        return StepStates(
            self.buffers,
            self._page_bytes,
            ops.copy_states,
            layout.levels,
            self._put,
            self._trails,
        )

    def step_of(self, rows: StateRows) -> StepStates:
        """States of a recorded step: those of `rows` have been prepared by `begin_step`."""
        return StepStates.of_rows(self.buffers, self._page_bytes, ops.copy_states, rows)

    def end_step(self) -> None:
        """Copy states that rows leave where they end."""
        self._copy_whole(self._at_end, to_pages=True)
        self._at_end = []

    def _copy_whole(self, copies: list[_Copy], *, to_pages: bool) -> None:
        # A launch or an upload of nothing would be an error on a GPU.
        if not copies:
            return
        placed = StateCopies.make(copies, self._put)
        whole = range(self.slot_bytes)
        ops.copy_states(self.buffers.data, self._page_bytes, placed, whole, to_pages=to_pages)

    def _read_tables(self, step: StepInputs) -> None:
        for slot, base, _ in step.growth:
            # A sequence's first row on this slot: nothing of the last owner counts.
            if base == 0:
                self._tokens[slot] = 0
                self._trail_starts[slot] = NO_TRAIL
                self._tables[slot] = {}
        if self._snapshots is None:
            return
        width = self._snapshots.width
        for slot, group, base, pages in step.further:
            # Those of other groups are pages of attention.
            if group != self._group:
                continue
            blocks = np.array(pages, np.int32).reshape(-1, width)
            for place, block in enumerate(blocks, base // width):
                if block[0] != NO_PAGE:
                    self._tables[slot][place] = block
                else:
                    self._tables[slot].pop(place, None)

    def _snapshots_within(
        self, slot: int, start: int, end: int
    ) -> Iterator[tuple[int, NDArray[np.int32]]]:
        """Positions of a row, ascending, in front of which there are pages for a snapshot."""
        inside = range(start // self._page_size, end // self._page_size)
        table = self._tables[slot]
        for place in sorted(place for place in table if place in inside):
            yield (place + 1) * self._page_size, table[place]

    def reserve_drafts(self, count: int) -> None:
        """Have copies for so many drafted tokens of each slot."""
        slots = len(self._trail_starts)
        while len(self._trails) < count:
            device = self.buffers.data.device
            self._trails.append(StateBuffers(self._layers, self._dtype, slots, device))

    def _take_back_drafts(self, slot: int, tokens: int) -> None:
        """Let a slot whose last row had drafts have seen so many tokens, if it has a copy that
        has."""
        start = int(self._trail_starts[slot])
        self._trail_starts[slot] = NO_TRAIL
        if start != NO_TRAIL and start <= tokens < self._tokens[slot]:
            self.buffers.data[slot] = self._trails[tokens - start].data[slot]
            self._tokens[slot] = tokens

    def _find_snapshot(self, slot: int, start: int) -> NDArray[np.int32]:
        """Pages of the snapshot at position `start`. Raises StateError."""
        place, behind = divmod(start, self._page_size)
        pages = self._tables[slot].get(place - 1)
        if behind or pages is None:
            raise StateError(
                f"slot {slot}: its state has seen {self._tokens[slot]} tokens, and the row begins "
                f"at position {start}, where there is no snapshot; a sequence restarts at one, or "
                "at 0"
            )
        return pages


def _check_kept(slot: int, tokens: int, seen: int) -> None:
    """Raise StateError if a state that has `seen` so many tokens is to be kept as one of others."""
    if seen != tokens:
        raise StateError(
            f"slot {slot}: the state of {tokens} tokens is to be kept, and it has seen {seen}"
        )
