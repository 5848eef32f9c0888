"""Pages and tokens that a waiting request needs, and whether it can be in time. Changes nothing."""

from __future__ import annotations

from baton.sched.planner.reservation import ReservedGrowth
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
        work = memory.prompt_pages(seq, cached_pages)
        if not state.running and not state.transfer and not state.leased:
            # Alone it must run, or nothing would ever run: no end would free a page for it.
            # Scheduler.add has refused what exceeds the pool.
            return work
        answer_pages = memory.answer_pages(memory.answer_tokens(seq))
        need = work + answer_pages + memory.watermark
        growth = self._growth.pages()
        # The peak costs a walk through all endings: it is computed only where it changes the
        # answer.
        is_decided_by_growth = need + growth > available >= need
        if is_decided_by_growth and any(s.has_fixed_length for s in state.running.values()):
            peak = memory.peak_growth(list(self._growth.growing()))
            growth = min(growth, peak)
        # The sum of all growth includes that of retained requests.
        if seq.handle in state.retained:
            growth -= memory.growth(seq)
        return need + growth

    def extend_tokens(self, seq: Seq) -> int:
        """Tokens of a waiting request that are not cached."""
        return seq.total_len - self._state.memory.cached_tokens(seq)

    def is_too_late(self, seq: Seq) -> bool:
        """True if a first token in time is impossible, under --deadline-miss-action abort."""
        state = self._state
        deadline = seq.req.ttft_deadline
        # A request that has started goes on: its work is paid.
        if deadline is None or seq.has_started or not state.limits.aborts_missed_deadlines:
            return False
        cached = state.memory.cached_tokens(seq)
        tokens = seq.total_len - cached
        # An estimate that no comparable recent prompt has confirmed refuses nothing: after one slow
        # step it could refuse every request, and would never be measured again.
        if not state.times.confirms(tokens, state.now):
            return False
        return state.now + state.times.chunk_seconds(cached, tokens) > deadline

    def can_start(self, seq: Seq) -> bool:
        """True if a request waits, and its tenant is below its limits."""
        # Pages kept for one that ended, or was admitted by another way, would be of use to no one.
        if seq.state is not SeqState.WAITING:
            return False
        return any(self._state.sharing.filter_startable([seq]))
