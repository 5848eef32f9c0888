"""Order in which candidates of a plan are tried: a strategy that the planner need not know.

`SharingStrategy` is for one class and one tenant: the order is the policy's own, and nothing is
charged. `FairQueue` (fair_queue.py), derived from it, shares between classes and tenants.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from baton.sched.types.candidates import (
    CandidateOutcome,
    CandidatePlanned,
    CandidateRefused,
    Candidates,
    PrefillContext,
    fixed_candidates,
)
from baton.sched.types.request import ValidatedRequest
from baton.sched.types.sequence import Seq, SeqState


class PrefillProgress:
    """Room that is left in a plan, counted from its context and the outcomes so far."""

    def __init__(self, context: PrefillContext) -> None:
        self.admitted: list[Seq] = []
        """Waiting requests that were admitted in this plan."""
        self.may_admit = context.free_slots > 0
        """True while a waiting request may still be admitted in this plan."""
        self.num_refused = 0
        self.num_unfinished = 0
        """Prompts of which a later step has to compute a part."""
        self._context = context
        self._tokens_left = context.token_budget
        self._slots_left = context.free_slots
        self._reserved = context.reserved

    def may_start(self, seq: Seq, unfinished_ahead: int) -> bool:
        """True if a waiting request may start behind so many unfinished prompts."""
        limit = self._context.max_partial_prefills
        # A prompt that this step completes holds no later one back, whatever the limit.
        if limit is None or unfinished_ahead < limit:
            return True
        return self._context.queries.extend_tokens(seq) <= self._tokens_left

    def untried_reservation(self) -> Seq | None:
        """The request that pages are kept for, if it can be tried at the end of the plan."""
        seq = self._reserved
        # Without a slot it would be refused; tried, admitted or ended, it waits no longer.
        if seq is None or not self._slots_left or seq.state is not SeqState.WAITING:
            return None
        return seq

    def record(self, seq: Seq, outcome: CandidateOutcome) -> None:
        """Count the outcome of a candidate."""
        # A request is tried once per plan: a second try would find no more pages.
        if seq is self._reserved:
            self._reserved = None
        if isinstance(outcome, CandidatePlanned):
            self._tokens_left -= outcome.tokens
            self.num_unfinished += outcome.is_unfinished
            if outcome.was_admitted:
                self.admitted.append(seq)
                self._slots_left -= 1
                if not self._slots_left:
                    self.may_admit = False
        elif isinstance(outcome, CandidateRefused):
            self.num_refused += 1
            # This request holds the reservation now, and the one that had it before waits in order.
            if outcome.has_reservation:
                self._reserved = None
            if outcome.fits_no_other:
                self.may_admit = False


class SharingStrategy:
    """Order of candidates, and the accounts behind it.

    By itself for one class and one tenant: there is nothing to share out.
    """

    orders_requests = False
    """True if requests differ in importance by class or tenant."""

    def check_request(self, req: ValidatedRequest, retry_secs: int = 1) -> None:
        """Raise an error for a request that may not join the queue."""

    def on_queued(self, seq: Seq) -> None:
        """A request joins the queue."""

    def on_dequeued(self, seq: Seq) -> None:
        """A request leaves the queue."""

    def order_prefill(self, context: PrefillContext) -> Candidates:
        """Prompts to compute in this step, in the order in which they should be tried.

        Here all prompts in progress, and those of the waiting queue that may start. Where both
        compete, a request starts only if this step completes it, or if fewer than
        `max_partial_prefills` unfinished prompts precede it. Prompts behind it do not count, so
        that the limit never delays a more important request.
        """
        progress = PrefillProgress(context)
        # Under most policies prompts in progress go first, because they hold pages already.
        if not context.reorders_unfinished:
            for seq in context.unfinished:
                outcome = yield seq
                progress.record(seq, outcome)
            # The order of the queue is not read when no request may start: it costs a walk.
            if not progress.may_admit:
                return
        tried: set[int] = set()
        num_passed = 0
        is_limited = context.max_partial_prefills is not None
        preemptor = context.preemptor
        for seq in context.queries.order_candidates(context):
            if seq.state is SeqState.WAITING:
                is_skipping = num_passed + progress.num_refused > context.skip_ahead
                # Past --admission-skip-ahead refusals, or without a slot, no request behind may
                # start.
                if is_skipping or not progress.may_admit:
                    break
                if seq.inflight_steps:
                    # Retracted with a row in flight: the token of that row is not known yet.
                    continue
                if preemptor is not None and seq is not preemptor:
                    # The victims' slot and pages are for the preemptor: another request would
                    # make the preemption pointless.
                    continue
                # A short prompt behind may start: this step completes it.
                if is_limited and not progress.may_start(seq, progress.num_unfinished):
                    num_passed += 1
                    continue
            else:
                tried.add(seq.handle)
            outcome = yield seq
            progress.record(seq, outcome)
            # Requests behind the preemptor compete for what it leaves.
            if seq is preemptor:
                preemptor = None
        for seq in self._untried_candidates(context, progress, tried):
            is_waiting = seq.state is SeqState.WAITING
            # --max-partial-prefills holds for the reserved request as well.
            if is_waiting and not progress.may_start(seq, progress.num_unfinished):
                continue
            outcome = yield seq
            progress.record(seq, outcome)

    def _untried_candidates(
        self, context: PrefillContext, progress: PrefillProgress, tried: set[int]
    ) -> list[Seq]:
        """Prompts in progress that were not tried, then the request that pages are kept for.

        Sorted by importance: the request comes behind prompts in progress that are as important.
        """
        untried: list[Seq] = []
        # The loop over the queue may end before it reaches prompts in progress, which hold pages
        # and must advance.
        if context.reorders_unfinished and len(tried) < len(context.unfinished):
            untried = [
                seq for seq in context.queries.sort_unfinished(context) if seq.handle not in tried
            ]
        reserved = progress.untried_reservation()
        if reserved is not None:
            untried.append(reserved)
        untried.sort(key=context.queries.importance)
        return untried

    def order_transfers(self, waiting: Iterable[Seq], skip_ahead: int) -> Candidates:
        """D: prompts on their way, in the order in which they should get pages."""
        return fixed_candidates(waiting)

    def preview_order(self, waiting: Iterable[Seq], count: int) -> Iterator[Seq]:
        """The waiting sequences that should be tried first.

        Changes nothing, once it is exhausted or closed.
        """
        return itertools.islice(waiting, count)

    def filter_startable(self, seqs: Iterable[Seq]) -> Iterable[Seq]:
        """Sequences whose tenants are below their limits."""
        return seqs

    def charge_prompt(self, seq: Seq, computed: int, cached: int) -> None:
        """Charge prompt tokens.

        Args:
            computed: planned in this step (D: will be fetched).
            cached: found in the cache when the request started.
        """

    def charge_generated(self, seq: Seq) -> None:
        """Charge one generated token."""

    def gauges(self) -> dict[str, float]:
        """Gauges by name."""
        return {}

    def counters(self) -> dict[str, float]:
        """Counters by name."""
        return {}
