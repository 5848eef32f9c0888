"""Pages kept for a request that did not fit, so that requests that pass it cannot starve it."""

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
        self.current: PageReservation | None = None

    @property
    def untried_request(self) -> Seq | None:
        """The request that pages are kept for, unless it was tried in this plan."""
        reservation = self.current
        return None if reservation is None or reservation.was_tried else reservation.seq

    def reserve_pages(self, seq: Seq) -> bool:
        """Keep pages for a request that did not fit, unless a more important one has the
        reservation.

        Others that pass it leave it room from now on. Returns whether the reservation is its own.
        """
        reservation = self.current
        if reservation is not None and reservation.seq is seq:
            reservation.was_tried = True
            return True
        # One reservation at a time: pages kept for two requests could be the whole pool.
        if reservation is None or self._is_more_important(seq, reservation.seq):
            self.current = PageReservation(seq, since=self._state.planned_step)
            return True
        return False

    def review(self, can_start: Callable[[Seq], bool], *, was_tried: bool) -> None:
        """Drop the reservation of a request that cannot start any more.

        Args:
            was_tried: keeps this plan from trying the request once more.
        """
        reservation = self.current
        if reservation is None:
            return
        # Pages kept for a request that ended, or whose tenant is at its limit, would stay unused.
        if can_start(reservation.seq):
            reservation.was_tried = was_tried
        else:
            self.current = None

    def may_pass(self, seq: Seq, without: Sequence[Seq] = ()) -> bool:
        """True if a request may be admitted, once those of `without` are preempted, although pages
        are kept for another one.

        Each page given to one that passes is set aside for the one that waits, until all of its
        pages are. So those that pass hold at most the rest of the pool, and it starts as soon as
        what ran before it has ended.
        """
        state = self._state
        memory = state.memory
        reservation = self.current
        if reservation is None or reservation.seq is seq:
            return True
        # A less important request would hold up a more important one that fits.
        if self._is_more_important(seq, reservation.seq):
            return True
        active = itertools.chain(state.running.values(), state.transfer.values())
        holders = [holder for holder in active if holder not in without]
        # Nothing holds pages, so that nothing will end and free them: kept, they idle for ever.
        if not holders and not state.leased:
            return True
        pages_passed = sum(
            memory.held_pages(holder) + memory.growth(holder)
            for holder in holders
            if holder.admitted_step >= reservation.since
        )
        pages_kept = min(reservation.passed_pages, memory.pages_at_end(reservation.seq))
        limit = state.limits.num_pages - (pages_kept + memory.watermark)
        return pages_passed + memory.pages_at_end(seq) <= limit

    def on_admitted(self, seq: Seq) -> None:
        """Note that a request got pages: the one with the reservation, or one that passed it."""
        reservation = self.current
        if reservation is None:
            return
        if reservation.seq is seq:
            self.current = None
        else:
            reservation.passed_pages += self._state.memory.pages_at_end(seq)

    def _is_more_important(self, seq: Seq, other: Seq) -> bool:
        rule = self._state.limits.priority
        now = self._state.now
        return rule.key(seq, now) < rule.key(other, now)


class ReservedGrowth:
    """Pages that running requests are expected to still take.

    Counted when a plan first asks: most plans admit nothing, and the sum visits every request.
    """

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

    def add_pages(self, pages: int) -> None:
        """Follow a change of one sequence's growth."""
        if self.counted is not None:
            self.counted += pages

    def growing(self) -> Iterator[Seq]:
        """Sequences that room is kept for to grow.

        A retained one is among them, because it could not be finished later without that room.
        """
        state = self._state
        return itertools.chain(
            state.running.values(), state.transfer.values(), state.retained.values()
        )
