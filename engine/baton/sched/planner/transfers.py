"""D: pages for prompts on their way from P."""

from __future__ import annotations

from collections.abc import Sequence

from baton.cache.radix import PrefixMatch
from baton.sched.memory.preemption import priority_victims
from baton.sched.planner.reservation import ReservationHolder, ReservedGrowth
from baton.sched.state.tables import SchedulerState
from baton.sched.types.candidates import (
    REFUSED,
    CandidateOutcome,
    CandidatePlanned,
    CandidateRefused,
    Candidates,
    fixed_candidates,
    next_candidate,
)
from baton.sched.types.plan import StopReason
from baton.sched.types.sequence import Seq, SeqState, SortKey


class TransferPlanner:
    def __init__(self, state: SchedulerState, growth: ReservedGrowth) -> None:
        self._state = state
        self._growth = growth
        self.reservation = ReservationHolder(state)
        """Pages kept for one of the prompts on their way."""

    def plan(self) -> None:
        """Reserve pages for prompts on their way, leaving room for running answers of the same
        importance.

        Pages are set aside before P has computed anything, so that they can be filled without
        asking here again. But P may be full of finished prompts that wait for room here, which the
        room set aside is not: it is taken back then.
        """
        state = self._state
        limits = state.limits
        if not state.opening:
            return
        self._growth.reset()
        num_refused = 0
        announced_only = False
        first_requeued = self._first_requeued()
        candidates = self._order_candidates()
        seq = next(candidates, None)
        while seq is not None:
            if not state.slots and not limits.priority.enabled:
                return
            # A requeued request that ran here comes first, as long as one runs whose end will free
            # pages for it: transfers alone may be waiting for a P that is full of prompts for the
            # very requests held up here.
            if state.running and first_requeued and first_requeued < self._sort_key(seq):
                return
            if announced_only and not seq.is_announced:
                return
            match, short = self._match_prefix(seq)
            lacks_room = short > 0 or not state.slots
            if lacks_room and limits.priority.enabled and not num_refused:
                if self._preempt_for(seq, match, short):
                    first_requeued = self._first_requeued()
                match, short = self._match_prefix(seq)
                lacks_room = short > 0 or not state.slots
            outcome: CandidateOutcome
            if not lacks_room and self._may_overtake(seq):
                outcome = self._admit_candidate(seq, match)
            else:
                state.memory.cache.unlock(match.node)
                if lacks_room and seq.is_announced and not announced_only:
                    # Pages granted to a prompt of which P holds nothing would be taken back in the
                    # next plan.
                    announced_only = self._announced_first()
                    if announced_only:
                        self.revoke_grants(short)
                outcome = self._refuse_candidate(seq, short)
                num_refused += 1
                if outcome.fits_no_other:
                    return
            seq = next_candidate(candidates, outcome)

    def _refuse_candidate(self, seq: Seq, short: int) -> CandidateRefused:
        """Note a prompt that lacks a slot or `short` pages, or would pass one that pages are kept
        for.
        """
        state = self._state
        memory = state.memory
        has_reservation = short > 0 and self.reservation.reserve_pages(seq)
        if not state.slots:
            return CandidateRefused(StopReason.NO_SLOT, has_reservation, fits_no_other=True)
        least_need = memory.watermark + self._growth.pages()
        is_full = memory.available <= least_need
        return CandidateRefused(StopReason.NO_PAGES, has_reservation, fits_no_other=is_full)

    def _admit_candidate(self, seq: Seq, match: PrefixMatch) -> CandidatePlanned:
        state = self._state
        memory = state.memory
        self.reservation.on_admitted(seq)
        seq.admitted_step = state.planned_step
        state.dequeue(seq)
        seq.move_to(SeqState.TRANSFER)
        state.stats.on_admitted(seq, state.now)
        state.transfer[seq.handle] = seq
        seq.slot = state.slots.pop()
        memory.share_prefix(seq, match)
        memory.restore_prefix(seq, seq.prompt_len)
        num_local_pages = len(seq.pages)
        fits = memory.extend(seq, seq.prompt_len)
        assert fits, "so many pages were available"
        self._growth.reset()
        state.grant_pages(seq, num_local_pages, seq.pages[num_local_pages:])
        cached_tokens = num_local_pages * memory.page_size
        fetched_tokens = seq.prompt_len - cached_tokens
        state.sharing.charge_prompt(seq, fetched_tokens, cached_tokens)
        return CandidatePlanned(fetched_tokens, was_admitted=True, is_unfinished=False)

    def _preempt_for(self, seq: Seq, match: PrefixMatch, short: int) -> bool:
        """Suspend less important running requests if that gives it a slot and `short` pages.

        Unlocks `match`.
        """
        state = self._state
        victims = priority_victims(
            seq,
            short,
            state.running.values(),
            state.limits,
            state.memory.freed_by,
            self._sort_key(seq),
        )
        state.memory.cache.unlock(match.node)
        if not self._may_overtake(seq, without=victims):
            return False
        for victim in victims:
            state.preempt(victim, seq)
        if victims:
            self._growth.reset()
        return bool(victims)

    def _order_candidates(self) -> Candidates:
        """Prompts on their way, in order, until too many lacked room; then the one with the
        reservation.
        """
        self.reservation.review(lambda seq: seq.state is SeqState.OPENING, was_tried=False)
        skip_ahead = self._state.limits.admission_skip_ahead
        num_refused = 0
        pending = self._pending_transfers()
        seq = next(pending, None)
        while seq is not None and num_refused <= skip_ahead:
            outcome = yield seq
            num_refused += isinstance(outcome, CandidateRefused)
            seq = next_candidate(pending, outcome)
        reserved = self.reservation.untried_request
        if reserved is not None:
            yield reserved

    def _may_overtake(self, seq: Seq, without: Sequence[Seq] = ()) -> bool:
        """As for waiting requests.

        What P has computed need not wait for what P may have no room to compute.
        """
        reservation = self.reservation.current
        if reservation is None:
            return True
        passes_unannounced = seq.is_announced and not reservation.seq.is_announced
        if passes_unannounced and self._announced_first():
            return True
        return self.reservation.may_pass(seq, without)

    def _match_prefix(self, seq: Seq) -> tuple[PrefixMatch, int]:
        """Return the cached prefix, locked, and how many pages are missing for the rest and for the
        answers.
        """
        state = self._state
        memory = state.memory
        match = memory.match_prefix(seq, seq.prompt_len)
        need = memory.pages(seq.prompt_len) - len(match.pages)
        is_alone = not (state.running or state.transfer or state.waiting)
        if not is_alone:
            answer_tokens = min(state.limits.num_reserved_decode_tokens, memory.answer_tokens(seq))
            need += memory.pages(answer_tokens) + self._growth.pages() + memory.watermark
        return match, need - memory.available

    def _pending_transfers(self) -> Candidates:
        """Prompts on their way, in the order in which they get pages."""
        state = self._state
        candidates = state.sharing.order_transfers(
            state.opening.in_order(), state.limits.admission_skip_ahead
        )
        if not state.announced or not self._announced_first():
            yield from candidates
            return
        yield from fixed_candidates(state.opening.sorted_of(state.announced.values()))
        seq = next(candidates, None)
        while seq is not None:
            outcome: CandidateOutcome = REFUSED
            if not seq.is_announced:
                outcome = yield seq
            seq = next_candidate(candidates, outcome)

    def _announced_first(self) -> bool:
        """True if prompts whose pages P holds go before all others.

        Where requests differ in importance only if nothing else here can end by itself; that they
        go first at least then is what keeps two full nodes from waiting for each other.
        """
        state = self._state
        if not state.sharing.orders_requests and not state.limits.priority.enabled:
            return True
        return not state.running and not any(seq.is_announced for seq in state.transfer.values())

    def revoke_grants(self, short: int) -> None:
        """Revoke grants of which nothing has come, the newest first, for one that needs a slot and
        `short` pages.
        """
        state = self._state
        idle = [seq for seq in state.transfer.values() if not seq.is_announced]
        if any(seq.is_revoking for seq in idle):
            return
        chosen: list[Seq] = []
        for seq in reversed(idle):
            has_slot = bool(chosen or state.slots)
            if short <= 0 and has_slot:
                break
            chosen.append(seq)
            short -= state.memory.freed_by(seq)[0]
        others_end = bool(state.running) or len(idle) < len(state.transfer)
        if short <= 0 or not others_end:
            for seq in chosen:
                state.revoke_grant(seq)

    def _first_requeued(self) -> SortKey | None:
        """Sort key of the first that ran here and waits for room again, within its tenant's limits."""
        state = self._state
        requeued = (seq for seq in state.waiting if seq.generated)
        startable = state.sharing.filter_startable(requeued)
        return min(map(self._sort_key, startable), default=None)

    def _sort_key(self, seq: Seq) -> SortKey:
        return self._state.limits.priority.sort_key(seq, self._state.now)
