"""Pages kept for a request that did not fit, so that those that pass it cannot keep it out for ever."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from baton.sched.state.tables import SchedulerState
from baton.sched.types.sequence import Seq


@dataclass(slots=True)
class PageReservation:
    """Pages kept for a waiting request that did not fit."""

    seq: Seq
    since: int
    """Step from which on admitted requests have passed it."""
    passed_pages: int = 0
    """Pages given to requests that passed it, expected growth included."""
    was_tried: bool = True
    """Set when the request did not fit in this plan either."""


class ReservationHolder:
    """The one reservation of a queue."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.held: PageReservation | None = None

    def reserve(self, seq: Seq) -> None:
        """There were no pages for this request: others that pass it leave it room from now on."""
        held = self.held
        if held is not None and held.seq is seq:
            held.was_tried = True
        elif held is None or self._is_more_important(seq, held.seq):
            self.held = PageReservation(seq, since=self._state.planned_step)

    def review(self, can_start: Callable[[Seq], bool], *, was_tried: bool) -> None:
        """Drop the reservation of a request that cannot start any more; mark another one for this plan."""
        if self.held is not None and not can_start(self.held.seq):
            self.held = None
        if self.held is not None:
            self.held.was_tried = was_tried

    def may_pass(self, seq: Seq, without: Sequence[Seq] = ()) -> bool:
        """May a request be admitted, once those of `without` are preempted, although another one waits for pages?

        Each page given to one that passes is set aside for the one that waits, until all of its pages are. So those
        that pass hold at most the rest of the pool, and it starts as soon as what ran before it has ended.
        """
        state, memory, held = self._state, self._state.memory, self.held
        if held is None or held.seq is seq or self._is_more_important(seq, held.seq):
            return True
        holders = [
            s
            for s in itertools.chain(state.running.values(), state.transfer.values())
            if s not in without
        ]
        if not holders and not state.leased:
            return True
        passed = sum(
            len(s.pages) + memory.growth(s) for s in holders if s.admitted_step >= held.since
        )
        set_aside = min(held.passed_pages, memory.pages_at_end(held.seq)) + memory.watermark
        return passed + memory.pages_at_end(seq) <= state.limits.num_pages - set_aside

    def admitted(self, seq: Seq) -> None:
        """A request got its pages: the one with the reservation, or one that passed it."""
        held = self.held
        if held is not None and held.seq is seq:
            self.held = None
        elif held is not None:
            held.passed_pages += self._state.memory.pages_at_end(seq)

    def _is_more_important(self, seq: Seq, other: Seq) -> bool:
        rule, now = self._state.limits.priority, self._state.now
        return rule.key(seq, now) < rule.key(other, now)


class ReservedGrowth:
    """Pages that running requests are expected to still take; counted when first asked for in a plan."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.counted: int | None = None
        """None: not counted in this plan yet."""

    def reset(self) -> None:
        """Count again when next asked: running requests have changed."""
        self.counted = None

    def pages(self) -> int:
        if self.counted is None:
            self.counted = self._state.memory.total_growth(self.growing())
        return self.counted

    def add(self, pages: int) -> None:
        """Follow a change of one sequence's growth."""
        if self.counted is not None:
            self.counted += pages

    def growing(self) -> Iterator[Seq]:
        """Sequences for whose growth room is kept: a retained one could not be finished later without."""
        state = self._state
        return itertools.chain(
            state.running.values(), state.transfer.values(), state.retained.values()
        )
