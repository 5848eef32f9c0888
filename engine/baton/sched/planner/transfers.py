"""D: pages for prompts on their way from P."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from baton.cache.radix import PrefixMatch
from baton.sched.memory.preemption import priority_victims
from baton.sched.planner.reservation import ReservationHolder, ReservedGrowth
from baton.sched.state.tables import SchedulerState
from baton.sched.types.sequence import Seq, SeqState, SortKey


class TransferPlanner:
    def __init__(self, state: SchedulerState, growth: ReservedGrowth) -> None:
        self._state = state
        self._growth = growth
        self.reservation = ReservationHolder(state)
        """For one of the prompts on their way."""
        self._skipped = 0
        """Prompts on their way that this plan tried and could not admit."""

    def plan(self) -> None:
        """Reserve pages for prompts on their way, leaving room for running answers of the same importance.

        Pages are set aside before P has computed anything, so that they can be filled without asking here again. But P
        may be full of finished prompts that wait for room here, which the room set aside is not: it is taken back then.
        """
        state, memory, limits = self._state, self._state.memory, self._state.limits
        if not state.opening:
            return
        self._growth.reset()
        self._skipped, announced_only = 0, False
        first_requeued = self._first_requeued()
        for seq in self._candidates():
            if not state.slots and not limits.priority.enabled:
                return
            # A requeued request that ran here comes first, as long as one runs whose end will free pages for it:
            # transfers alone may be waiting for a P that is full of prompts for the very requests held up here.
            if state.running and first_requeued and first_requeued < self._sort_key(seq):
                return
            if announced_only and not seq.is_announced:
                return
            match, short = self._needs(seq)
            if (short > 0 or not state.slots) and limits.priority.enabled and not self._skipped:
                if self._preempt_for(seq, match, short):
                    first_requeued = self._first_requeued()
                match, short = self._needs(seq)
            if short > 0 or not state.slots or not self._may_overtake(seq):
                memory.cache.unlock(match.node)
                first_announced = (
                    seq.is_announced and not announced_only and self._announced_first()
                )
                if first_announced and (short > 0 or not state.slots):
                    self.take_back(short)
                    # Pages granted to a prompt of which P holds nothing would be taken back in the next plan.
                    announced_only = True
                if short > 0:
                    self.reservation.reserve(seq)
                self._skipped += 1
                if not state.slots or memory.available <= memory.watermark + self._growth.pages():
                    return
                continue
            self._admit(seq, match)

    def _admit(self, seq: Seq, match: PrefixMatch) -> None:
        state, memory = self._state, self._state.memory
        self.reservation.admitted(seq)
        seq.admitted_step = state.planned_step
        state.dequeue(seq)
        seq.to(SeqState.TRANSFER)
        state.stats.on_admitted(seq, state.now)
        state.transfer[seq.handle] = seq
        seq.slot = state.slots.pop()
        memory.share(seq, match)
        memory.restore(seq, seq.prompt_len)
        start = len(seq.pages)
        fits = memory.extend(seq, seq.prompt_len)
        assert fits, "so many pages were available"
        self._growth.reset()
        state.grant(seq, start, seq.pages[start:])
        cached = start * memory.page_size
        state.sharing.charge_prompt(seq, seq.prompt_len - cached, cached)

    def _preempt_for(self, seq: Seq, match: PrefixMatch, short: int) -> bool:
        """Suspend less important running requests if that gives it a slot and `short` pages. Unlocks `match`."""
        state, limits = self._state, self._state.limits
        victims = priority_victims(
            seq, short, state.running.values(), limits, state.memory.freed_by, self._sort_key(seq)
        )
        state.memory.cache.unlock(match.node)
        if not self._may_overtake(seq, without=victims):
            return False
        for victim in victims:
            state.preempt(victim, seq)
        if victims:
            self._growth.reset()
        return bool(victims)

    def _candidates(self) -> Iterator[Seq]:
        """Prompts on their way, in order, until too many lacked room; then the one with the reservation."""
        self.reservation.review(lambda seq: seq.state is SeqState.OPENING, was_tried=False)
        for seq in self._pending_transfers():
            if self._skipped > self._state.limits.admission_skip_ahead:
                break
            yield seq
        held = self.reservation.held
        if held is not None and not held.was_tried:
            yield held.seq

    def _may_overtake(self, seq: Seq, without: Sequence[Seq] = ()) -> bool:
        """As for waiting requests. What P has computed need not wait for what P may have no room to compute."""
        held = self.reservation.held
        if (
            held is not None
            and seq.is_announced
            and not held.seq.is_announced
            and self._announced_first()
        ):
            return True
        return self.reservation.may_pass(seq, without)

    def _needs(self, seq: Seq) -> tuple[PrefixMatch, int]:
        """Return the cached prefix, locked, and how many pages are missing for the rest and for the answers."""
        state, memory = self._state, self._state.memory
        match = memory.match(seq, seq.prompt_len)
        need = memory.pages(seq.prompt_len) - len(match.pages)
        growth = min(state.limits.num_reserved_decode_tokens, memory.answer_tokens(seq))
        busy = state.running or state.transfer or state.waiting
        margin = memory.pages(growth) + self._growth.pages() + memory.watermark if busy else 0
        return match, need + margin - memory.available

    def _pending_transfers(self) -> Iterable[Seq]:
        """Prompts on their way, in the order in which they get pages."""
        state = self._state
        order = state.sharing.openings(
            state.opening.in_order(), state.holders(), state.limits.admission_skip_ahead
        )
        if not state.announced or not self._announced_first():
            return order
        announced = state.opening.sorted_of(state.announced.values())
        return itertools.chain(announced, (seq for seq in order if not seq.is_announced))

    def _announced_first(self) -> bool:
        """Do prompts whose pages P holds go before all others?

        Where requests differ in importance only if nothing else here can end by itself; that they go first at least
        then is what keeps two full nodes from waiting for each other.
        """
        state = self._state
        if not state.sharing.orders_requests and not state.limits.priority.enabled:
            return True
        return not state.running and not any(seq.is_announced for seq in state.transfer.values())

    def take_back(self, short: int) -> None:
        """Revoke grants of which nothing has come, the newest first, for one that needs a slot and `short` pages."""
        state = self._state
        idle = [seq for seq in state.transfer.values() if not seq.is_announced]
        if any(seq.is_revoking for seq in idle):
            return
        chosen: list[Seq] = []
        for seq in reversed(idle):
            if short <= 0 and (chosen or state.slots):
                break
            chosen.append(seq)
            short -= state.memory.freed_by(seq)[0]
        if short <= 0 or not (state.running or len(idle) < len(state.transfer)):
            for seq in chosen:
                state.revoke(seq)

    def _first_requeued(self) -> SortKey | None:
        """Sort key of the first that ran here and waits for room again, within its tenant's limits."""
        state = self._state
        requeued = (seq for seq in state.waiting if seq.generated)
        return min(
            map(self._sort_key, state.sharing.startable(requeued, state.holders)), default=None
        )

    def _sort_key(self, seq: Seq) -> SortKey:
        return self._state.limits.priority.sort_key(seq, self._state.now)
