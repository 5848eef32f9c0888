"""Drafts by a head that reads hidden states of the model (runtime.runner.head_runner).

The head's entries are stored as the model computes: there is nothing to catch up with. `on_planned`
writes down which slots will have one, page by page and generation by generation as for a draft
model (draft_pages), before the step is executed. Of a prompt that another node computed, or of
pages that came back from the host, there are none here, and drafts follow from the tokens behind
them.

Invariant: an entry that a page is said to have was stored for the tokens that all users of the page
have there. Those of rejected drafts stand behind the end of their sequence, and are overwritten by
its next rows.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.runtime.speculation.draft_pages import DraftPages
from baton.runtime.speculation.drafter import cut_failed
from baton.sched.metrics.step_time import StepTimeFit
from baton.sched.planner.draft_lengths import DraftingCosts
from baton.sched.types.plan import StepPlan
from baton.sched.types.sequence import Seq

WARM_UPS = 3
"""The first one touches weights and tables for the first time, and is not measured."""


class DraftRow(NamedTuple):
    slot: int
    token: int
    """The last one of the sequence."""
    position: int
    """Of that token."""
    drafts: int
    entries: NDArray[np.int32]
    """Slots of the head's pool with the entries in front of it, in their order."""


class DraftStep(NamedTuple):
    """One draft for each row that gets so many."""

    slots: list[int]
    tokens: list[int]
    seconds: float


RunDrafts: TypeAlias = Callable[[Sequence[DraftRow]], list[DraftStep]]
NO_ENTRIES: NDArray[np.int32] = np.empty(0, np.int32)


class HeadDrafter:
    is_catching_up = False

    def __init__(
        self, run_drafts: RunDrafts, pages: DraftPages, page_size: int, max_context: int
    ) -> None:
        self._run_drafts = run_drafts
        self._pages = pages
        self._page_size = page_size
        self._max_context = max_context
        self._tables: dict[int, array[int]] = {}
        """Pages of the sequence in each slot of the runner."""
        self._ends: dict[int, int] = {}
        """Where the last row in each slot ended, with its drafts."""
        self._seqs: dict[int, Seq] = {}
        self._step_times = StepTimeFit()
        """Of a drafting step, by rows."""
        self.seconds = 0.0
        """Time that the last call took on the device."""

    @property
    def costs(self) -> DraftingCosts:
        return DraftingCosts(self._step_times.a, self._step_times.b)

    def start(self, seq: Seq) -> None:
        self._seqs[seq.handle] = seq

    def append(self, handle: int, tokens: array[int]) -> None:
        """The sequence itself has its tokens."""

    def finish(self, handle: int) -> None:
        del self._seqs[handle]

    def count_behind(self, seq: Seq) -> int:
        """Entries are stored as tokens are computed."""
        return 0

    def has_room(self, seq: Seq, drafts: int) -> bool:
        # Before the first row here, the slot's state is that of its last owner.
        return seq.pages_sent_to_runner > 0 and len(seq.tokens) + drafts <= self._max_context

    def on_planned(self, plan: StepPlan) -> None:
        for row in plan.rows:
            is_first_row = row.page_base == 0
            if is_first_row:
                self._tables[row.slot] = array("i")
            table = self._tables[row.slot]
            table.extend(row.pages)
            self._pages.fill(table, row.start, row.start + row.n)
            # The state in front of it was computed elsewhere, or there is none; or another sequence
            # has computed tokens of the prompt since its last part.
            if is_first_row or row.start > self._ends[row.slot]:
                self._pages.forget_to(table, row.start)
            self._ends[row.slot] = row.start + row.n

    def warm_up(self) -> None:
        """Draft a few times behind nothing, so that costs are known."""
        for number in range(WARM_UPS):
            (step,) = self._run_drafts([DraftRow(0, 0, 1, 1, NO_ENTRIES)])
            if number > 0:
                self._step_times.observe(1.0, 1.0, step.seconds)

    def propose(self, handles: Sequence[int], most: Sequence[int]) -> list[array[int]]:
        seqs = [self._seqs[handle] for handle in handles]
        rows = [self._make_row(seq, drafts) for seq, drafts in zip(seqs, most, strict=True)]
        self.seconds = 0.0
        if not rows:
            return []
        of_slot: dict[int, array[int]] = defaultdict(lambda: array("i"))
        for step in self._run_drafts(rows):
            self.seconds += step.seconds
            self._step_times.observe(1.0, len(step.slots), step.seconds)
            for slot, token in zip(step.slots, step.tokens, strict=True):
                of_slot[slot].append(token)
        return [cut_failed(of_slot[seq.slot]) for seq in seqs]

    def _make_row(self, seq: Seq, drafts: int) -> DraftRow:
        last = len(seq.tokens) - 1
        filled = self._pages.find_filled(seq.pages)
        positions = filled[filled < last]
        pages = np.frombuffer(seq.pages, np.int32)[positions // self._page_size]
        entries = pages * self._page_size + positions % self._page_size
        return DraftRow(seq.slot, seq.tokens[last], last, drafts, entries.astype(np.int32))
