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
        """Suspend running requests for the first waiting one that may preempt those behind it.

        Triggered by slots and by pages, and only if the request has tokens to compute in this very
        step, leaves the reservation its pages, and would wait longer than it takes to compute again
        what the suspended ones lose.

        Args:
            can_prefill: this step takes prompts, be there decode rows or not.
        """
        state = self._state
        rule = state.limits.priority
        memory = state.memory
        if not state.waiting or not state.running:
            return
        least_priority = min(map(rule.base, state.running.values()))
        self._reservation.review(self._estimate.can_start, was_tried=False)
        # A row in flight is committed before its request can be admitted again.
        waiting = (seq for seq in state.waiting.in_order() if not seq.inflight_steps)
        preemptors = state.sharing.preview_order(waiting, MAX_PREEMPTORS)
        for slots, seq in enumerate(preemptors, start=1):
            available = memory.available_to(seq)
            cached_pages = memory.cached_pages(seq)
            need = self._estimate.pages_for(seq, cached_pages=cached_pages, available=available)
            short = need - available
            # This request is admitted without a preemption, and those behind it come after it.
            if state.slots and short <= 0:
                return
            # Without tokens in this very step the victims' slots would stay empty until the next
            # one.
            lead = rule.base(seq) - least_priority
            if lead <= rule.preemption_threshold or not self._could_run(seq, can_prefill):
                continue
            if self._estimate.is_too_late(seq):
                continue  # its turn ends it: the victims would lose their work for nothing
            victims = priority_victims(
                seq,
                short,
                state.running.values(),
                state.limits,
                memory.freed_by,
                rule.sort_key(seq, state.now),
            )
            # The reservation would keep the request out after the victims have lost their slots.
            if not self._reservation.may_pass(seq, victims):
                continue
            if not self._saves_time(victims, slots=slots, short=short):
                continue
            for victim in victims:
                state.preempt(victim, seq)
            # One preemptor per plan: no other request may take the slot and pages before it is
            # tried.
            if victims:
                draft.preemptor = seq
                return

    def _saves_time(self, victims: Sequence[Seq], *, slots: int, short: int) -> bool:
        """True if what `victims` lose is computed again sooner than running requests end.

        The comparison is with the end that frees so many `slots` and `short` pages. Without this,
        preemption under overload makes even important requests wait for the work that it repeats:
        their median time to first token is 1.64 s instead of 0.42 s
        (docs/scheduling/preemption.md).
        An unconfirmed estimate holds no preemption back.
        """
        state = self._state
        memory = state.memory
        times = state.times
        limits = state.limits
        mode = limits.preemption_mode if limits.radix_cache else "recompute"
        if mode == "offload" or (mode != "recompute" and short <= 0):
            return True  # their KV stays, on the host or in the tree: nothing is computed again
        lost_tokens = sum(memory.freed_by(victim)[1] for victim in victims)
        step_secs = times.decode_seconds(len(state.running))
        # A rate that no comparable prompt has confirmed may be wrong by any factor.
        if not lost_tokens or step_secs <= 0 or not times.confirms(lost_tokens, state.now):
            return True
        recompute_secs = lost_tokens / times.prefill_rate
        endings = sorted(
            (memory.answer_tokens(seq), seq.handle)
            for seq in state.running.values()
            if not seq.is_lease
        )
        freed_pages = 0
        for num_ended, (steps_left, handle) in enumerate(endings, start=1):
            if steps_left * step_secs >= recompute_secs:
                return True
            freed_pages += memory.freed_by(state.running[handle])[0]
            if num_ended >= slots and freed_pages >= short:
                return False
        return True

    def _could_run(self, seq: Seq, can_prefill: bool) -> bool:
        """True if a waiting sequence would get tokens in this step.

        Decode rows and the prompts that precede it come first.
        """
        state = self._state
        limits = state.limits
        running = state.running.values()
        num_decode = sum(other.is_decoding for other in running)
        # Under --prefill-first this step is for decode rows alone.
        if num_decode and not can_prefill:
            return False
        importance = limits.priority.sort_key(seq, state.now)[0]
        unfinished_go_first = not state.policy.reorders_partial_prefills
        prompts_ahead = [
            prompt
            for prompt in partial_of(running)
            if prompt.sort_key[0] < importance
            or (unfinished_go_first and prompt.sort_key[0] == importance)
        ]
        budget = limits.prompt_tokens(num_decode)
        budget -= sum(prompt.extend_tokens for prompt in prompts_ahead)
        # Prompts ahead take all tokens.
        if budget <= 0:
            return False
        most_prompts = limits.prefill_max_requests
        # --prefill-max-requests ends the plan before its turn.
        if most_prompts is not None and len(prompts_ahead) >= most_prompts:
            return False
        # As `PrefillProgress.may_start`: what this step completes holds no later prompt back.
        if self._estimate.extend_tokens(seq) <= budget:
            return True
        return len(prompts_ahead) < limits.max_partial_prefills and budget >= limits.page_size
