"""Planner of the next forward pass: one token for every decoding sequence, then prompt chunks in policy order.

Works on sched.state.tables.SchedulerState and advances `computed` there, so that the next plan can be made while it
runs (overlap scheduling). Rules:

* Between two tokens of a running sequence at most one step goes by without it.
* A prompt page joins the radix tree when its computation is *scheduled*: a later row, even one of the same step, may
  use it, because steps run in order and every layer writes its KV before it reads. Pages leave the engine only after
  commit.
* Decode rows stand in the order of importance, then age (PriorityRule.sort_key): the first get pages first, and the
  events of a step follow its rows.
* Admission is by estimate, the truth comes at allocation; a request that is alone is always admitted.

Sources: token budget after vLLM v1, admission estimate after SGLang 0.5.7, both as specified in docs/architecture.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.sched.planner.admission import AdmissionEstimate
from baton.sched.planner.decode import plan_decode_rows
from baton.sched.planner.draft import PlanDraft
from baton.sched.planner.preemption import PreemptionPlanner
from baton.sched.planner.prefill import PrefillPlanner
from baton.sched.planner.reservation import ReservationHolder, ReservedGrowth
from baton.sched.planner.transfers import TransferPlanner
from baton.sched.state.tables import SchedulerState
from baton.sched.types.plan import StepPlan, StopReason


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """A plan, or None when there is nothing to compute, and what bounded it."""

    plan: StepPlan | None
    stopped_by: StopReason
    """Why no further prompt tokens were taken."""
    seconds_budget: float | None
    """Time the prompts were allowed to take."""
    pages_reserved: int | None
    """Expected growth of running requests, if the plan had to ask."""


class Planner:
    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._growth = ReservedGrowth(state)
        self.reservation = ReservationHolder(state)
        """For one of the waiting queue."""
        estimate = AdmissionEstimate(state, self._growth)
        self._transfers = TransferPlanner(state, self._growth)
        self._preemption = PreemptionPlanner(state, estimate, self.reservation)
        self.prefill = PrefillPlanner(state, self._growth, estimate, self.reservation)
        self._prefill_run_secs: float | None = None
        """Predicted time of the steps without decode rows since the last step with some; None: that was it."""

    def plan(self, now: float) -> PlanOutcome:
        """Choose the next forward pass."""
        state, limits = self._state, self._state.limits
        state.now = now
        state.stats.on_plan(now)
        for queue in (state.waiting, state.opening):
            if (reviewed := queue.review()) is not None:
                state.outbox.append(reviewed)
        state.settle()
        state.sort_running()
        self._transfers.plan()
        state.release_grants()
        self._growth.reset()
        draft = PlanDraft()
        if limits.priority.enabled:
            can_prefill = (
                not limits.prefill_first or limits.enable_mixed_chunk or self._skips_decode()
            )
            self._preemption.plan(draft, can_prefill=can_prefill)
        retractions = state.retractions
        skip_decode = self._skips_decode()
        others = list(state.running.values()) if skip_decode else plan_decode_rows(state, draft)
        num_decode = len(draft.rows)
        stopped_by = StopReason.PREEMPTED
        if num_decode and limits.prefill_first and not limits.enable_mixed_chunk:
            stopped_by = StopReason.DECODE_ONLY
        elif state.retractions == retractions:
            stopped_by = self.prefill.plan(draft, others)
        if skip_decode and not draft.rows:
            plan_decode_rows(state, draft)
            num_decode = len(draft.rows)
        if not draft.rows and (state.retractions > retractions or self._reclaim(stopped_by)):
            return self.plan(
                now
            )  # the pages just freed may let another sequence run; each round frees one's
        plan = self._finish(draft, num_decode, stopped_by, state.retractions - retractions)
        return PlanOutcome(plan, stopped_by, draft.seconds_budget, self._growth.counted)

    def _finish(
        self, draft: PlanDraft, num_decode: int, stopped_by: StopReason, retracted: int
    ) -> StepPlan | None:
        """Make the plan of a draft; None when it has neither rows nor copies."""
        state, memory, times = self._state, self._state.memory, self._state.times
        if not draft.rows:
            if not state.running:
                memory.ratio.on_idle()
            elif state.planned_step == state.committed_step:
                self._transfers.take_back(1)  # no answer finds a page, and idle transfers hold some
            if not memory.has_copies:
                return None
        if num_decode:
            memory.ratio.on_decode_step()
            self._prefill_run_secs = None
        else:  # a step for copies alone adds nothing
            run = sum(times.chunk_seconds(row.start, row.n) for row in draft.rows)
            self._prefill_run_secs = (self._prefill_run_secs or 0.0) + run
        step, rows, admitted = state.step_planned(), tuple(draft.rows), tuple(draft.admitted)
        new_pages, copies = memory.take_new_pages(), memory.take_copies()
        return StepPlan(step, rows, num_decode, admitted, new_pages, stopped_by, retracted, copies)

    def _reclaim(self, stopped_by: StopReason) -> bool:
        """P: prompts wait for pages and nothing runs: have a retained one release its pages.

        Leases come first: D takes them before anything that is still to be computed here.
        """
        state = self._state
        is_stuck = (
            stopped_by is StopReason.NO_PAGES
            and state.planned_step == state.committed_step
            and not state.leased
        )
        return is_stuck and state.release_retained()

    def _skips_decode(self) -> bool:
        """Under prefill_first: does this step leave decode rows out, because prompts wait and the gap allows it?"""
        state, limits = self._state, self._state.limits
        if not limits.prefill_first or limits.enable_mixed_chunk:
            return False
        if self._prefill_run_secs is not None:
            next_secs = state.times.chunk_seconds(0, limits.step_tokens)
            most = limits.max_decode_gap_secs
            if not most or self._prefill_run_secs + next_secs > most:  # predictions may be 0
                return False
        return bool(state.waiting) or any(not seq.is_decoding for seq in state.running.values())
