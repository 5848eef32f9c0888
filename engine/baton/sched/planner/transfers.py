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
        """Grant pages to prompts on their way, leaving room for running answers of the same
        importance.

        Pages are granted before P has computed anything, so that D pulls them as P publishes. But P
        may be full of finished prompts that lack room here: then grants of which P has announced
        nothing are revoked.
        """
        state = self._state
        limits = state.limits
        # The usual case, and the only one on nodes that do not decode: it costs a plan nothing.
        if not state.opening:
            return
        self._growth.reset()
        num_refused = 0
        announced_only = False
        first_requeued = self._first_requeued()
        candidates = self._order_candidates()
        seq = next(candidates, None)
        while seq is not None:
            # Without priorities no running request gives up its slot for a candidate.
            if not state.slots and not limits.priority.enabled:
                return
            # A retracted request gets the next pages before the candidates behind it, or transfers
            # would keep it out for ever. Only a running request is sure to free pages: transfers
            # may wait for a P that is full, with prompts for the very requests that are held up
            # here.
            if state.running and first_requeued and first_requeued < self._sort_key(seq):
                return
            # The next plan would revoke a grant to a prompt that P has not begun.
            if announced_only and not seq.is_announced:
                return
            match, short = self._match_prefix(seq)
            lacks_room = short > 0 or not state.slots
            # Only the first candidate preempts: a later one would run on its victims' pages before
            # the refused one ahead of it.
            if lacks_room and limits.priority.enabled and not num_refused:
                # The victims wait again, and may precede the candidates that follow.
                if self._preempt_for(seq, match, short):
                    first_requeued = self._first_requeued()
                match, short = self._match_prefix(seq)
                lacks_room = short > 0 or not state.slots
            outcome: CandidateOutcome
            if not lacks_room and self._may_overtake(seq):
                outcome = self._admit_candidate(seq, match)
            else:
                state.memory.drop_match(match)
                if lacks_room and seq.is_announced and not announced_only:
                    # P holds the pages of this prompt until D has read them, and may be too full to
                    # compute the prompts that hold grants here: neither node would ever go on.
                    announced_only = self._announced_first()
                    if announced_only:
                        self.revoke_grants(short)
                outcome = self._refuse_candidate(seq, short)
                num_refused += 1
                # Each further candidate would cost a look-up in the tree in order to be refused.
                if outcome.fits_no_other:
                    return
            seq = next_candidate(candidates, outcome)

    def _refuse_candidate(self, seq: Seq, short: int) -> CandidateRefused:
        """Refuse a prompt that lacks a slot or `short` pages, or would pass the reserved one.

        Keeps pages for it if it lacks pages.
        """
        state = self._state
        memory = state.memory
        # Pages kept for a prompt that lacks only a slot, or is held back, would stay unused.
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
        fits = memory.extend(seq, seq.prompt_len, position=seq.prompt_len)
        assert fits, "so many pages were available"
        self._growth.reset()
        state.grant_pages(seq, num_local_pages)
        cached_tokens = num_local_pages * memory.page_size
        fetched_tokens = seq.prompt_len - cached_tokens
        state.sharing.charge_prompt(seq, fetched_tokens, cached_tokens)
        return CandidatePlanned(fetched_tokens, was_admitted=True, is_unfinished=False)

    def _preempt_for(self, seq: Seq, match: PrefixMatch, short: int) -> bool:
        """Suspend less important running requests if that gives `seq` a slot and `short` pages.

        Unlocks `match`. Returns whether any request was suspended.
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
        state.memory.drop_match(match)
        # The reservation would keep it out after the victims have lost their slots.
        if not self._may_overtake(seq, without=victims):
            return False
        for victim in victims:
            state.preempt(victim, seq)
        if victims:
            self._growth.reset()
        return bool(victims)

    def _order_candidates(self) -> Candidates:
        """Prompts on their way, in order, until too many lacked room; then the reserved one."""
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
        # Behind more than `skip_ahead` refused prompts it would never use the pages kept for it.
        if reserved is not None:
            yield reserved

    def _may_overtake(self, seq: Seq, without: Sequence[Seq] = ()) -> bool:
        """True if no reservation keeps a prompt out, once those of `without` are preempted."""
        reservation = self.reservation.current
        if reservation is None:
            return True
        # P may lack room for the reserved prompt until D has read what P holds of this one.
        passes_unannounced = seq.is_announced and not reservation.seq.is_announced
        if passes_unannounced and self._announced_first():
            return True
        return self.reservation.may_pass(seq, without)

    def _match_prefix(self, seq: Seq) -> tuple[PrefixMatch, int]:
        """Return the cached prefix, locked, and how many pages the prompt and the answers lack."""
        state = self._state
        memory = state.memory
        # The state at the prompt's end comes from P, whatever snapshots the tree has.
        match = memory.match_prefix(seq, seq.prompt_len, restores_state=False)
        need = memory.pages_to_pull(seq, len(match.pages))
        # Alone it must be admitted: nothing that ends would ever free a page for it.
        is_alone = not (state.running or state.transfer or state.waiting)
        if not is_alone:
            # SGLang's bound: D rather retracts than keeps room for whole answers.
            answer_tokens = min(state.limits.num_reserved_decode_tokens, memory.answer_tokens(seq))
            need += memory.answer_pages(answer_tokens) + self._growth.pages() + memory.watermark
        return match, need - memory.available

    def _pending_transfers(self) -> Candidates:
        """Prompts on their way, in the order in which they get pages."""
        state = self._state
        candidates = state.sharing.order_transfers(
            state.opening.in_order(), state.limits.admission_skip_ahead
        )
        # The order of the queue holds, without the sort below.
        if not state.announced or not self._announced_first():
            yield from candidates
            return
        yield from fixed_candidates(state.opening.sorted_of(state.announced.values()))
        seq = next(candidates, None)
        while seq is not None:
            outcome: CandidateOutcome = REFUSED
            # Announced prompts were yielded above.
            if not seq.is_announced:
                outcome = yield seq
            seq = next_candidate(candidates, outcome)

    def _announced_first(self) -> bool:
        """True if prompts whose pages P holds go before all others."""
        state = self._state
        if not state.sharing.orders_requests and not state.limits.priority.enabled:
            return True
        # Importance decides as long as something here ends by itself. When nothing does, P waits
        # for D to read the announced pages, and D for P to compute: two full nodes would never go
        # on.
        return not state.running and not any(seq.is_announced for seq in state.transfer.values())

    def revoke_grants(self, short: int) -> None:
        """Revoke grants of which P has announced nothing, the newest first.

        For a prompt that needs a slot and `short` pages.
        """
        state = self._state
        idle = [seq for seq in state.transfer.values() if not seq.is_announced]
        # The pages of the last revocation come back when the peer has answered: they may be enough.
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
        # Too few pages help the prompt only if nothing else will end and free the others.
        if short <= 0 or not others_end:
            for seq in chosen:
                state.revoke_grant(seq)

    def _first_requeued(self) -> SortKey | None:
        """Sort key of the first retracted or preempted request that its tenant's limits let run."""
        state = self._state
        requeued = (seq for seq in state.waiting if seq.generated)
        startable = state.sharing.filter_startable(requeued)
        return min(map(self._sort_key, startable), default=None)

    def _sort_key(self, seq: Seq) -> SortKey:
        return self._state.limits.priority.sort_key(seq, self._state.now)
