"""Planner of the next forward pass: the next token of every decoding sequence, then prompt chunks
in policy order.

Works on sched.state.tables.SchedulerState and advances `computed` there, so that the next plan can
be made while it runs (overlap scheduling). Rules:

* Between two tokens of a running sequence at most one step goes by without it.
* A prompt page joins the radix tree when its computation is *scheduled*: a later row, even one of
  the same step, may use it, because steps run in order and every layer writes its KV before it
  reads. Pages leave the engine only after commit.
* Decode rows stand in the order of importance, then age (PriorityRule.sort_key): the first get
  pages first, and the events of a step follow its rows.
* Rows with drafts stand behind the other decode rows (sched.planner.drafts); a step that may
  compute prompts has none.
* Admission is by estimate, the truth comes at allocation; a request that is alone is always
  admitted.

Sources: token budget after vLLM v1, admission estimate after SGLang 0.5.7, both as specified in
docs/architecture.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.sched.planner.admission import AdmissionEstimate
from baton.sched.planner.decode import plan_decode_rows
from baton.sched.planner.draft import PlanDraft
from baton.sched.planner.drafts import DraftPlanner
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
        """Pages kept for one request of the waiting queue."""
        self.drafts = DraftPlanner(state)
        estimate = AdmissionEstimate(state, self._growth)
        self._transfers = TransferPlanner(state, self._growth)
        self._preemption = PreemptionPlanner(state, estimate, self.reservation)
        self.prefill = PrefillPlanner(state, self._growth, estimate, self.reservation)
        self._prefill_run_secs: float | None = None
        """Predicted time of the steps since the last one with decode rows.

        None: the last step had decode rows.
        """

    def plan(self, now: float) -> PlanOutcome:
        """Choose the next forward pass."""
        state = self._state
        limits = state.limits
        state.now = now
        state.stats.on_plan(now)
        state.settle()
        state.sort_running()
        self._transfers.plan()
        state.release_grants()
        self._growth.reset()
        draft = PlanDraft()
        draft_lengths = self.drafts.choose(list(state.draft_offers.values()), state.draft_wait)
        # Without priorities no request is worth more than another's work, and none is preempted.
        if limits.priority.enabled:
            can_mix = not limits.prefill_first or limits.enable_mixed_chunk
            can_prefill = can_mix or self._skips_decode()
            self._preemption.plan(draft, can_prefill=can_prefill)
        retractions = state.retractions
        skip_decode = self._skips_decode()
        # A step under --prefill-first has prompts alone, so that these get all of its tokens.
        if skip_decode:
            prompts = list(state.running.values())
        else:
            prompts = plan_decode_rows(state, draft, draft_lengths)
        num_answering = len(draft.rows)
        stopped_by = StopReason.PREEMPTED
        # Under --prefill-first a step has either prompts or decode rows, as in SGLang.
        if num_answering and limits.prefill_first and not limits.enable_mixed_chunk:
            stopped_by = StopReason.DECODE_ONLY
        # A prompt would take the pages that a retraction freed, and the next step would retract
        # again; vLLM v1 plans no prompt after a preemption either.
        elif state.retractions == retractions:
            stopped_by = self.prefill.plan(draft, prompts)
        # No prompt got a row: an empty step would delay the running answers for nothing.
        if skip_decode and not draft.rows:
            plan_decode_rows(state, draft, draft_lengths)
            num_answering = len(draft.rows)
        num_retracted = state.retractions - retractions
        if not draft.rows and (num_retracted or self._release_retained(stopped_by)):
            # The pages just freed may let another sequence run; each round frees those of one.
            return self.plan(now)
        plan = self._finish_plan(draft, num_answering, stopped_by, num_retracted)
        state.memory.release_given()
        for seq in draft.pulled:
            state.memory.release_state(seq)
        return PlanOutcome(plan, stopped_by, draft.seconds_budget, self._growth.counted)

    def _finish_plan(
        self, draft: PlanDraft, num_answering: int, stopped_by: StopReason, retracted: int
    ) -> StepPlan | None:
        """Make the plan of a draft; None when it has neither rows nor copies."""
        state = self._state
        memory = state.memory
        if not draft.rows:
            # The pages that the last burst needed say nothing about the next one (SGLang resets,
            # too).
            if not state.running:
                memory.ratio.on_idle()
            elif state.planned_step == state.committed_step:
                # No running answer finds a page and no step in flight will free one, but a grant of
                # which P has announced nothing may hold some.
                self._transfers.revoke_grants(1)
            # Evicted pages are copied to the host by a plan: without one they would be lost.
            if not memory.has_copies:
                return None
        if num_answering:
            memory.ratio.on_decode_step()
            self._prefill_run_secs = None
        else:
            # A step for copies alone adds nothing: it delays no decode row.
            times = state.times
            prefill_secs = sum(times.chunk_seconds(row.start, row.n) for row in draft.rows)
            self._prefill_run_secs = (self._prefill_run_secs or 0.0) + prefill_secs
        return StepPlan(
            step=state.step_planned(),
            rows=tuple(draft.rows),
            num_decode=num_answering - len(draft.drafted),
            admitted=tuple(draft.admitted),
            new_pages=memory.take_new_pages(),
            stopped_by=stopped_by,
            retracted=retracted,
            copies=memory.take_copies(),
            further=tuple(draft.further),
            drafted=tuple(draft.drafted),
            states=(*memory.take_parked_states(), *draft.states),
        )

    def _release_retained(self, stopped_by: StopReason) -> bool:
        """P: release the pages of a retained prompt if prompts wait for pages and nothing runs."""
        state = self._state
        # A lease ends by itself: D reads its pages before it asks for others, and they are free
        # then.
        if stopped_by is not StopReason.NO_PAGES or state.leased:
            return False
        # A step in flight may end a request, and a retained prompt would be computed again in vain.
        is_device_idle = state.planned_step == state.committed_step
        return is_device_idle and state.release_retained()

    def _skips_decode(self) -> bool:
        """True if this step has no decode rows: under --prefill-first, while prompts wait and
        --max-decode-gap-ms allows it.
        """
        state = self._state
        limits = state.limits
        # All other steps carry decode rows beside prompts, so that no running answer waits.
        if not limits.prefill_first or limits.enable_mixed_chunk:
            return False
        if self._prefill_run_secs is not None:
            next_secs = state.times.chunk_seconds(0, limits.step_tokens)
            gap_secs = self._prefill_run_secs + next_secs
            gap_limit = limits.max_decode_gap_secs
            # Without a limit one prefill step in a row is allowed; its predicted time may be 0, and
            # says nothing.
            if not gap_limit or gap_secs > gap_limit:
                return False
        return bool(state.waiting) or any(not seq.is_decoding for seq in state.running.values())
