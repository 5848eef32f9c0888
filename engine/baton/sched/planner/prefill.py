"""Prompt chunks after the decode rows, and admission from the waiting queue.

1. `PrefillContext` states the facts of the plan; the sharing strategy chooses candidates by it.
2. Each candidate is tried (`_try_candidate`): its chunk is planned, or it is refused, or it ends.
3. The outcome goes back to the strategy, which then yields the next candidate.
4. The plan stops when a budget is used up, or pages for a chunk are missing (`PrefillStopped`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from baton.sched.planner.admission import AdmissionEstimate
from baton.sched.planner.decode import retract_for
from baton.sched.planner.draft import PlanDraft
from baton.sched.planner.prompt_budget import PromptBudget
from baton.sched.planner.reservation import ReservationHolder, ReservedGrowth
from baton.sched.state.tables import SchedulerState
from baton.sched.types.candidates import (
    REFUSED,
    CandidateEnded,
    CandidateOutcome,
    CandidatePlanned,
    CandidateQueries,
    CandidateRefused,
    PrefillContext,
    next_candidate,
)
from baton.sched.types.plan import StopReason
from baton.sched.types.sequence import Seq, SeqState, is_partial, partial_of

NO_SLOT_LEFT = CandidateRefused(StopReason.NO_SLOT, has_reservation=False, fits_no_other=False)


class PrefillStopped(NamedTuple):
    """No further candidate can be tried in this plan."""

    reason: StopReason


class PrefillPlanner:
    def __init__(
        self,
        state: SchedulerState,
        growth: ReservedGrowth,
        estimate: AdmissionEstimate,
        reservation: ReservationHolder,
    ) -> None:
        self._state = state
        self._growth = growth
        self._estimate = estimate
        self._reservation = reservation
        self._queries = CandidateQueries(
            order_candidates=self._order,
            sort_unfinished=self._sort_unfinished,
            extend_tokens=estimate.extend_tokens,
            importance=self._importance,
        )

    def plan(self, draft: PlanDraft, prompts: list[Seq]) -> StopReason:
        """Add prompt chunks to the draft.

        Args:
            prompts: running sequences without a row yet, in the order of running.
        """
        state = self._state
        self._growth.reset()  # decode rows have changed it
        budget = PromptBudget(state.limits, state.times, draft)
        draft.seconds_budget = budget.seconds
        context = self._make_context(draft, prompts, budget)
        candidates = state.sharing.order_prefill(context)
        first_refusal: StopReason | None = None
        seq = next(candidates, None)
        while seq is not None:
            # Admitted now, a request would hold a slot and pages without a token to compute.
            if budget.exhausted_by is not None:
                return budget.exhausted_by
            outcome = self._try_candidate(seq, draft, budget)
            if not isinstance(outcome, CandidatePlanned):
                if isinstance(outcome, PrefillStopped):
                    return outcome.reason
                # A refusal ends no plan: prompts in progress hold their pages already, and a
                # smaller request may fit.
                if first_refusal is None and isinstance(outcome, CandidateRefused):
                    first_refusal = outcome.reason
            seq = next_candidate(candidates, outcome)
        if first_refusal is not None:
            return first_refusal
        # Without a free slot the strategy offers no waiting request, so that none was refused.
        if state.waiting and not state.slots:
            return StopReason.NO_SLOT
        return StopReason.QUEUE_EMPTY

    def _make_context(
        self, draft: PlanDraft, prompts: list[Seq], budget: PromptBudget
    ) -> PrefillContext:
        state = self._state
        limits = state.limits
        reservation = self._reservation
        # A plan that preempts does not try the reserved request, because the preemptor may be the
        # less important of the two, and its row would come first.
        reservation.review(self._estimate.can_start, was_tried=draft.preemptor is not None)
        unfinished = partial_of(prompts)
        reorders = state.policy.reorders_partial_prefills or limits.priority.enabled
        return PrefillContext(
            unfinished=unfinished,
            reorders_unfinished=reorders,
            preemptor=draft.preemptor,
            reserved=reservation.untried_request,
            max_partial_prefills=limits.max_partial_prefills if reorders else None,
            skip_ahead=limits.admission_skip_ahead,
            free_slots=len(state.slots),
            token_budget=budget.tokens,
            queries=self._queries,
        )

    def _order(self, context: PrefillContext) -> Iterator[Seq]:
        waiting = self._state.waiting
        if context.reorders_unfinished:
            yield from waiting.in_order(context.unfinished)
        # An empty queue is not brought up to date, which would cost every step of decoding alone.
        elif waiting:
            yield from waiting.in_order()

    def _sort_unfinished(self, context: PrefillContext) -> list[Seq]:
        return self._state.waiting.sorted_alone(context.unfinished)

    def _importance(self, seq: Seq) -> float:
        state = self._state
        return state.limits.priority.sort_key(seq, state.now)[0]

    def _try_candidate(
        self, seq: Seq, draft: PlanDraft, budget: PromptBudget
    ) -> CandidateOutcome | PrefillStopped:
        """Plan the next chunk of a prompt; a waiting request is admitted first."""
        state = self._state
        memory = state.memory
        is_waiting = seq.state is SeqState.WAITING
        # Computing a prompt that misses its deadline anyway delays those that can still meet
        # theirs.
        if is_waiting and self._estimate.is_too_late(seq):
            state.miss_deadline(seq)
            return CandidateEnded()
        # A retracted request finds its own pages again: its tenant has paid for them.
        is_first_chunk = is_waiting and (seq.cached_tokens < 0 or not seq.has_started)
        # The growth of running and retained requests is in the sum; a new one adds all of its own.
        is_counted = not is_waiting or seq.handle in state.retained
        growth_before = memory.growth(seq) if is_counted else 0
        if is_waiting:
            # Asked before the admission, which takes a slot and pages.
            if not self._has_budget_for(seq, budget):
                return PrefillStopped(StopReason.TOKEN_BUDGET)
            refusal = self._admit_candidate(seq)
            if refusal is not None:
                return refusal
        else:
            # Another request may have computed the next pages since the last chunk.
            memory.adopt_prefix(seq)
        start = seq.computed
        remaining = seq.extend_tokens
        num_tokens = budget.chunk_tokens(start, remaining)
        if num_tokens == 0 or not self._find_pages(seq, start + num_tokens, draft):
            return self._stop_at(seq, draft, num_tokens=num_tokens, was_admitted=is_waiting)
        # Counted only now, because `_stop_at` takes an admission without a row back.
        if is_waiting:
            state.stats.on_admitted(seq, state.now)
        budget.spend(start, num_tokens)
        state.sharing.charge_prompt(seq, num_tokens, start if is_first_chunk else 0)
        draft.add_row(seq, num_tokens)
        self._growth.add_pages(memory.growth(seq) - growth_before)
        memory.publish(seq)
        is_unfinished = num_tokens < remaining and is_partial(seq)
        return CandidatePlanned(num_tokens, is_waiting, is_unfinished)

    def _find_pages(self, seq: Seq, tokens: int, draft: PlanDraft) -> bool:
        """Make room for a prompt's first `tokens` tokens. Returns whether there is room."""
        state = self._state
        memory = state.memory
        if memory.extend(seq, tokens):
            return True
        # Others' rows may free pages, and those of this plan write snapshots. With neither, prompts
        # would wait for pages that the snapshots of each other take.
        is_device_idle = not draft.rows and state.planned_step == state.committed_step
        if not is_device_idle or not memory.leave_snapshots(state.running.values()):
            return False
        return memory.extend(seq, tokens)

    def _stop_at(
        self, seq: Seq, draft: PlanDraft, *, num_tokens: int, was_admitted: bool
    ) -> PrefillStopped:
        """End the plan at a candidate whose chunk of `num_tokens` lacks pages or budget."""
        state = self._state
        is_device_idle = not draft.rows and state.planned_step == state.committed_step
        if was_admitted:
            # The host tier restored more of the prompt than `_has_budget_for` found in the tree,
            # and the chunk behind that has no page or no budget. The request waits again: without a
            # row it would hold its slot and pages until a later step has room.
            state.cancel_admission(seq)
        elif num_tokens and is_device_idle:
            # No row and no step in flight will free pages. One request gives way, because prompts
            # that hold a part of the pool each would wait for each other for ever.
            retract_for(state, seq)
        return PrefillStopped(StopReason.NO_PAGES if num_tokens else StopReason.TOKEN_BUDGET)

    def _has_budget_for(self, seq: Seq, budget: PromptBudget) -> bool:
        """True if this step could compute some of a waiting request."""
        limits = self._state.limits
        is_sized_by_tokens = budget.seconds is None and limits.is_chunked
        # A page of tokens is left, and a chunk may be a page: the tree need not be asked.
        if is_sized_by_tokens and budget.tokens >= limits.page_size:
            return True
        cached = self._state.memory.cached_tokens(seq)
        return budget.chunk_tokens(cached, seq.total_len - cached) > 0

    def _admit_candidate(self, seq: Seq) -> CandidateRefused | None:
        """Give a waiting sequence a slot and its cached prefix, if it is expected to fit."""
        state = self._state
        memory = state.memory
        if not state.slots:
            return NO_SLOT_LEFT
        match = memory.match_prefix(seq, seq.reusable_tokens)
        num_cached = max(len(match.pages), len(seq.pages))
        available = memory.available  # without the prefix, which is locked
        need = self._estimate.pages_for(seq, cached_pages=num_cached, available=available)
        if need > available and memory.holds_snapshot(match):
            # The prompt may fit a pool that has no room for its pages beside the snapshot.
            memory.drop_match(match)
            match = memory.match_prefix(seq, 0)
            available = memory.available
            need = self._estimate.pages_for(seq, cached_pages=0, available=available)
        lacks_pages = need > available
        # A request that passes the reserved one for ever would keep it out for ever.
        if lacks_pages or not self._reservation.may_pass(seq):
            # The lock of a request that is not admitted would keep the prefix from being evicted.
            memory.drop_match(match)
            # A request that only the reservation keeps out needs no pages kept for itself.
            return self._refuse_candidate(seq) if lacks_pages else REFUSED
        self._reservation.on_admitted(seq)
        state.dequeue(seq)
        state.start_running(seq)
        seq.slot = state.slots.pop()
        seq.admitted_step = state.planned_step
        if seq.pages:
            # A retained request resumes where it was: D may be reading the pages it holds.
            memory.drop_match(match)
            return None
        memory.share_prefix(seq, match)
        memory.restore_prefix(seq, seq.reusable_tokens)
        seq.computed = seq.published * memory.page_size
        return None

    def _refuse_candidate(self, seq: Seq) -> CandidateRefused:
        """Refuse a request that lacks pages, and keep pages for it from now on."""
        memory = self._state.memory
        has_reservation = self._reservation.reserve_pages(seq)
        least_need = memory.watermark + self._growth.pages()
        is_full = memory.available <= least_need
        return CandidateRefused(StopReason.NO_PAGES, has_reservation, fits_no_other=is_full)
