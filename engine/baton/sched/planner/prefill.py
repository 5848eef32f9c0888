"""Prompt chunks after the decode rows, and admission from the waiting queue."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

from baton.sched.fairness.sharing import PrefillView
from baton.sched.planner.admission import AdmissionEstimate
from baton.sched.planner.decode import retract_for
from baton.sched.planner.draft import PlanDraft
from baton.sched.planner.reservation import ReservationHolder, ReservedGrowth
from baton.sched.policies.base import cached_tokens
from baton.sched.state.tables import SchedulerState
from baton.sched.types.plan import StopReason
from baton.sched.types.sequence import Seq, SeqState, SortKey, partial_of


class PrefillPlanner(PrefillView):
    """Plans prompt chunks; the view of the sharing strategy while candidates are handed out."""

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
        self._budget = 0
        """Prompt tokens that this plan may still take."""
        self.skip_ahead = state.limits.admission_skip_ahead

    def plan(self, draft: PlanDraft, others: list[Seq]) -> StopReason:
        """Add prompt chunks to the draft.

        Args:
            others: running sequences without a row yet, in the order of running.
        """
        state, limits, memory = self._state, self._state.limits, self._state.memory
        self._growth.reset()  # decode rows have changed it
        num_decode = len(draft.rows)
        self._budget = max(limits.step_tokens - num_decode, limits.page_size)
        draft.seconds_budget = seconds = self._prompt_seconds(num_decode)
        started = 0
        blocked: StopReason | None = None
        for seq in self._candidates(draft, others):
            if self._budget <= 0:
                return StopReason.TOKEN_BUDGET
            if limits.prefill_max_requests is not None and started >= limits.prefill_max_requests:
                return StopReason.MAX_REQUESTS
            is_new = seq.state is SeqState.WAITING
            if is_new and self._estimate.is_too_late(seq):
                state.miss_deadline(seq)
                continue
            is_first = is_new and (seq.cached_tokens < 0 or not seq.has_started)
            before = memory.growth(seq) if not is_new or seq.handle in state.retained else 0
            if is_new:
                if not self._has_budget_for(seq, seconds, is_first=not started):
                    return StopReason.TOKEN_BUDGET
                # Prompts under way go on beside one that cannot be admitted; so may others (`may_pass`).
                if (stop := self._admit(seq)) is not None:
                    blocked = blocked or stop
                    continue
            else:
                memory.adopt_prefix(seq)
            n = self._chunk(seq.computed, seq.extend_tokens, seconds, is_first=not started)
            if n == 0 or not memory.extend(seq, seq.computed + n):
                if is_new:  # without a token to compute: the host tier had more of it than the tree
                    state.cancel_admission(seq)
                elif n and not draft.rows and state.planned_step == state.committed_step:
                    # Nothing else runs that could free pages: let the youngest prompt give way.
                    retract_for(state, seq)
                return StopReason.NO_PAGES if n else StopReason.TOKEN_BUDGET
            if is_new:
                state.stats.on_admitted(seq, state.now)
            if seconds is not None:
                seconds -= state.times.chunk_seconds(seq.computed, n)
            state.sharing.charge_prompt(seq, n, seq.computed if is_first else 0)
            draft.add(seq, n)
            self._growth.add(memory.growth(seq) - before)
            memory.publish(seq)
            self._budget -= n
            started += 1
        if blocked is None and state.waiting and not state.slots:
            return StopReason.NO_SLOT
        return blocked or StopReason.QUEUE_EMPTY

    def _candidates(self, draft: PlanDraft, others: list[Seq]) -> Iterator[Seq]:
        """Prompts under way, which are among `others`, then the waiting queue in policy order; or both in policy order
        if it re-decides.

        More important requests come first in any case. The one with the reservation is tried at the latest when all
        others have been, except in a plan that preempted for another one.
        """
        state = self._state
        self.skipped = 0
        self.preemptor = draft.preemptor
        # One that was preempted for others might come behind a less important one.
        self._reservation.review(self._estimate.can_start, was_tried=self.preemptor is not None)
        self.unfinished = partial_of(others)
        self.together = state.policy.reorders_partial_prefills or state.limits.priority.enabled
        self.max_partial = state.limits.max_partial_prefills if self.together else sys.maxsize
        return state.sharing.candidates(self)

    def order(self) -> Iterator[Seq]:
        if self.together or self._state.waiting:
            yield from self._state.waiting.in_order(self.unfinished if self.together else ())

    def sorted_unfinished(self) -> list[Seq]:
        return self._state.waiting.sorted_alone(self.unfinished)

    def partial(self) -> Sequence[Seq]:
        return partial_of(self._state.running.values())

    def holders(self) -> Iterable[Seq]:
        return self._state.holders()

    def has_slot(self) -> bool:
        return bool(self._state.slots) and self.skipped < sys.maxsize

    def completes(self, seq: Seq) -> bool:
        return self._estimate.completes(seq, self._budget)

    def untried(self) -> list[Seq]:
        held = self._reservation.held
        if (
            held is None
            or held.was_tried
            or not self._state.slots
            or not self._estimate.can_start(held.seq)
        ):
            return []
        return [held.seq]

    def sort_key(self, seq: Seq) -> SortKey:
        return self._state.limits.priority.sort_key(seq, self._state.now)

    def _prompt_seconds(self, num_decode: int) -> float | None:
        """Time that prompt chunks may add to this step; None: they are sized by tokens alone."""
        limits, times = self._state.limits, self._state.times
        if limits.step_target_secs:
            return max(limits.step_target_secs - times.decode_seconds(num_decode), 0.0)
        return (
            times.chunk_seconds(0, limits.step_tokens) if limits.enable_dynamic_chunking else None
        )

    def _has_budget_for(self, seq: Seq, seconds: float | None, *, is_first: bool) -> bool:
        """Is there anything of a waiting request that this step could compute?"""
        limits = self._state.limits
        if seconds is None and self._budget >= limits.page_size and limits.is_chunked:
            return True
        cached = cached_tokens(seq, self._state.memory.cache)
        return self._chunk(cached, seq.total_len - cached, seconds, is_first=is_first) > 0

    def _chunk(self, start: int, left: int, seconds: float | None, *, is_first: bool) -> int:
        """How many of a prompt's `left` tokens to compute now: all, or whole pages so that chunks end at page ends.

        By time alone it may be nothing, but the first prompt of a step gets a page: every prompt moves on. Without
        chunking it is all or nothing, and the first prompt of a step gets all.
        """
        limits, most = self._state.limits, self._budget
        if not limits.is_chunked:
            return left if left <= most or is_first else 0
        if limits.long_prefill_token_threshold:
            most = min(most, limits.long_prefill_token_threshold)
        if seconds is not None:
            timed = self._state.times.chunk_tokens(start, seconds)
            most = min(most, max(timed, limits.page_size) if is_first else timed)
        if left <= most:
            return left
        end = start + most
        return max(end - end % limits.page_size - start, 0)

    def _admit(self, seq: Seq) -> StopReason | None:
        """Give a waiting sequence a slot and its cached prefix, if it is expected to fit."""
        state, memory = self._state, self._state.memory
        if not state.slots:
            return StopReason.NO_SLOT
        match = memory.match(seq, len(seq.tokens) - 1)
        need = self._estimate.pages_for(seq, max(len(match.pages), len(seq.pages)))
        if need > memory.available or not self._reservation.may_pass(seq):
            memory.cache.unlock(match.node)
            self.skipped += 1
            if need > memory.available:
                self._reservation.reserve(seq)
                if memory.available <= memory.watermark + self._growth.pages():
                    self.skipped = sys.maxsize  # no request would fit
            return StopReason.NO_PAGES
        self._reservation.admitted(seq)
        state.dequeue(seq)
        state.run(seq)
        seq.slot = state.slots.pop()
        seq.admitted_step = state.planned_step
        if seq.pages:  # retained: it resumes where it was
            memory.cache.unlock(match.node)
            return None
        memory.share(seq, match)
        memory.restore(seq, len(seq.tokens) - 1)
        seq.computed = seq.published * memory.page_size
        return None
