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

    def pages_for(self, seq: Seq, *, cached_pages: int, available: int) -> int:
        """Pages that should be available before a waiting sequence is admitted.

        Args:
            available: free or evictable pages beside its cached prefix.
        """
        state = self._state
        memory = state.memory
        work = memory.pages(len(seq.tokens)) - cached_pages
        if not state.running and not state.transfer and not state.leased:
            return work  # alone: it must run, and it fits (see Scheduler.add)
        answer_pages = memory.pages(memory.answer_tokens(seq))
        need = work + answer_pages + memory.watermark
        growth = self._growth.pages()
        is_decided_by_growth = need + growth > available >= need
        if is_decided_by_growth and any(s.has_fixed_length for s in state.running.values()):
            peak = memory.peak_growth(list(self._growth.growing()))
            growth = min(growth, peak)
        if seq.handle in state.retained:
            growth -= memory.growth(seq)
        return need + growth

    def extend_tokens(self, seq: Seq) -> int:
        """Tokens of a waiting request that are not cached."""
        return seq.total_len - cached_tokens(seq, self._state.memory.cache)

    def is_too_late(self, seq: Seq) -> bool:
        """Under --deadline-miss-action abort: no first token can come in time any more, so nothing
        is begun.

        An estimate that no comparable prompt has confirmed refuses nothing.
        """
        state = self._state
        deadline = seq.req.ttft_deadline
        if deadline is None or seq.has_started or not state.limits.aborts_missed_deadlines:
            return False
        cached = cached_tokens(seq, state.memory.cache)
        tokens = seq.total_len - cached
        if not state.times.confirms(tokens, state.now):
            return False
        return state.now + state.times.chunk_seconds(cached, tokens) > deadline

    def can_start(self, seq: Seq) -> bool:
        """True if it waits, and its tenant is below its limits."""
        if seq.state is not SeqState.WAITING:
            return False
        return any(self._state.sharing.filter_startable([seq]))
