"""Running requests suspended for a more important one that waits."""

from __future__ import annotations

from collections.abc import Sequence

from baton.sched.memory.preemption import priority_victims
from baton.sched.planner.admission import AdmissionEstimate
from baton.sched.planner.draft import PlanDraft
from baton.sched.planner.reservation import ReservationHolder
from baton.sched.state.tables import SchedulerState
from baton.sched.types.sequence import Seq, partial_of

MAX_PREEMPTORS = 16
"""Waiting requests that a plan asks whether they may preempt."""


class PreemptionPlanner:
    def __init__(
        self, state: SchedulerState, estimate: AdmissionEstimate, reservation: ReservationHolder
    ) -> None:
        self._state = state
        self._estimate = estimate
        self._reservation = reservation

    def plan(self, draft: PlanDraft, *, can_prefill: bool) -> None:
        """Make room for the first waiting request that may preempt, by suspending running ones behind it in the order.

        Triggered by slots and by pages, and only if the request has tokens to compute in this very step, leaves the
        reservation its pages, and would wait longer than it takes to compute again what the suspended ones lose.

        Args:
            can_prefill: this step takes prompts, be there decode rows or not.
        """
        state, rule = self._state, self._state.limits.priority
        if not state.waiting or not state.running:
            return
        least = min(map(rule.base, state.running.values()))
        self._reservation.review(self._estimate.can_start, was_tried=False)
        waiting = (seq for seq in state.waiting.in_order() if not seq.inflight_steps)
        for slots, seq in enumerate(
            state.sharing.heads(waiting, state.holders(), MAX_PREEMPTORS), start=1
        ):
            short = (
                self._estimate.pages_for(seq, state.memory.cached_pages(seq))
                - state.memory.available
            )
            if state.slots and short <= 0:
                return
            if rule.base(seq) - least <= rule.preemption_threshold or not self._could_run(
                seq, can_prefill
            ):
                continue
            if self._estimate.is_too_late(seq):
                continue  # it ends as soon as its turn comes
            victims = priority_victims(
                seq,
                short,
                state.running.values(),
                state.limits,
                state.memory.freed_by,
                rule.sort_key(seq, state.now),
            )
            if not (
                self._reservation.may_pass(seq, victims)
                and self._saves_time(victims, slots=slots, short=short)
            ):
                continue
            for victim in victims:
                state.preempt(victim, seq)
            if victims:
                draft.preemptor = seq
                return

    def _saves_time(self, victims: Sequence[Seq], *, slots: int, short: int) -> bool:
        """True if what `victims` lose is computed again sooner than running requests end on their own.

        Compared is with the end that frees so many `slots` and `short` pages. Without this, preemption under overload
        makes even the important wait for the work that it repeats. An unconfirmed estimate holds no preemption back.
        """
        state, memory, times, limits = (
            self._state,
            self._state.memory,
            self._state.times,
            self._state.limits,
        )
        mode = limits.preemption_mode if limits.radix_cache else "recompute"
        if mode == "offload" or (mode != "recompute" and short <= 0):
            return True  # their KV stays
        lost = sum(memory.freed_by(victim)[1] for victim in victims)
        step_secs = times.decode_seconds(len(state.running))
        if not lost or step_secs <= 0 or not times.confirms(lost, state.now):
            return True
        steps = sorted(
            (memory.answer_tokens(s), s.handle) for s in state.running.values() if not s.is_lease
        )
        pages, limit = 0, lost / times.prefill_rate
        for ended, (left, handle) in enumerate(steps, start=1):
            if left * step_secs >= limit:
                return True
            pages += memory.freed_by(state.running[handle])[0]
            if ended >= slots and pages >= short:
                return False
        return True

    def _could_run(self, seq: Seq, can_prefill: bool) -> bool:
        """Would a waiting sequence get tokens in this step, after decode rows and the prompts that precede it?"""
        state, limits, running = self._state, self._state.limits, self._state.running.values()
        decoding = sum(s.is_decoding for s in running)
        if decoding and not can_prefill:
            return False
        key, is_first = (
            limits.priority.sort_key(seq, state.now)[0],
            not state.policy.reorders_partial_prefills,
        )
        ahead = [
            s
            for s in partial_of(running)
            if s.sort_key[0] < key or (is_first and s.sort_key[0] == key)
        ]
        budget = max(limits.step_tokens - decoding, limits.page_size) - sum(
            s.extend_tokens for s in ahead
        )
        if budget <= 0 or (
            limits.prefill_max_requests is not None and len(ahead) >= limits.prefill_max_requests
        ):
            return False
        if self._estimate.completes(seq, budget):
            return True
        return len(ahead) < limits.max_partial_prefills and budget >= limits.page_size
