"""Pages that a waiting request needs, and whether a step's budget can compute it. Changes nothing."""

from __future__ import annotations

from baton.sched.planner.reservation import ReservedGrowth
from baton.sched.policies.base import cached_tokens
from baton.sched.state.tables import SchedulerState
from baton.sched.types.sequence import Seq, SeqState


class AdmissionEstimate:
    """Estimates for admission; the truth comes at allocation."""

    def __init__(self, state: SchedulerState, growth: ReservedGrowth) -> None:
        self._state = state
        self._growth = growth

    def pages_for(self, seq: Seq, cached_pages: int) -> int:
        """Pages that should be available before a waiting sequence is admitted."""
        state, memory = self._state, self._state.memory
        work = memory.pages(len(seq.tokens)) - cached_pages
        if not state.running and not state.transfer and not state.leased:
            return work  # alone: it must run, and it fits (see Scheduler.add)
        need = work + memory.pages(memory.answer_tokens(seq)) + memory.watermark
        growth = self._growth.pages()
        if need + growth > memory.available >= need and any(
            s.has_fixed_length for s in state.running.values()
        ):
            growth = min(growth, memory.peak_growth(list(self._growth.growing())))
        if seq.handle in state.retained:
            growth -= memory.growth(seq)
        return need + growth

    def completes(self, seq: Seq, budget: int) -> bool:
        """Would `budget` tokens compute all of this waiting request?"""
        return seq.total_len - cached_tokens(seq, self._state.memory.cache) <= budget

    def is_too_late(self, seq: Seq) -> bool:
        """Under --deadline-miss-action abort: no first token can come in time any more, so nothing is begun.

        An estimate that no comparable prompt has confirmed refuses nothing.
        """
        state, deadline = self._state, seq.req.ttft_deadline
        if deadline is None or seq.has_started or not state.limits.aborts_missed_deadlines:
            return False
        times, now, cached = state.times, state.now, cached_tokens(seq, state.memory.cache)
        tokens = seq.total_len - cached
        return times.confirms(tokens, now) and now + times.chunk_seconds(cached, tokens) > deadline

    def can_start(self, seq: Seq) -> bool:
        """True if it waits, and its tenant is below its limits."""
        return seq.state is SeqState.WAITING and any(
            self._state.sharing.startable([seq], self._state.holders)
        )
