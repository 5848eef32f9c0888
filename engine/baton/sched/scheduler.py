"""The scheduler of one rank: requests go in, plans come out, results go in, events come out.

Two deterministic halves (no clock, no torch, no sockets):

1. `plan()` looks at queues and pages and returns a StepPlan (sched.planner).
2. `commit(plan, result)` takes the sampled tokens, finishes sequences, frees pages and returns
   events for the engine loop.

The tables are in sched.state.tables, the pages in sched.memory.kv_manager, sched.memory.preemption
chooses the victims. After every call free + cached + locked + private pages = capacity
(`ledger()`).
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Collection, Mapping, Sequence

from baton import errors
from baton.cache.ledger import HostLedger, PageLedger
from baton.sched.metrics.step_log import StepDecision, StepLog
from baton.sched.planner import Planner, PlanOutcome
from baton.sched.planner.draft_lengths import NO_DRAFTING_COSTS, DraftingCosts
from baton.sched.queue.deadlines import DeadlineQueue
from baton.sched.setup.limits import Limits
from baton.sched.state.report import SchedulerReport
from baton.sched.state.tables import SchedulerState
from baton.sched.types.draft_offer import DraftOffer
from baton.sched.types.events import (
    AbortTransfer,
    Event,
    OpenTransfer,
    PagesFinal,
    PrefillDone,
    new_token,
)
from baton.sched.types.plan import ForwardMode, StepPlan, StepResult, TokenLogprobs
from baton.sched.types.request import FinishReason, ValidatedRequest
from baton.sched.types.request_timeline import PulledPages
from baton.sched.types.sequence import TAKES_TOKENS, Seq, SeqState

RUNNING = SeqState.RUNNING
"""For loops over rows: an attribute of an enum takes a call."""
ONE_EACH = itertools.repeat(1)
"""Lengths of runs where no row has drafts."""


class Scheduler:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._state = state = SchedulerState(limits)
        self._planner = Planner(state)
        self._deadlines = DeadlineQueue(with_first_token=limits.aborts_missed_deadlines)
        self.decisions = StepLog()
        """Log of the last plans and their reasons."""
        self.stats = state.stats
        """Statistics for metrics."""
        self.sharing = state.sharing
        """The accounts of classes and tenants."""
        self.hit_tokens = state.memory.hit_tokens
        """Tokens that sequences found in the cache, since the start, by source
        (memory.kv_manager.HIT_SOURCES).
        """
        self.kv_events = state.memory.kv_events
        """Events of the tree; None unless Limits.kv_event_batches."""
        self.report = SchedulerReport(state, self.decisions)
        """Read-only views for metrics, routers and dumps."""

    # ------------------------------------------------------------------ ingress

    def add(self, req: ValidatedRequest) -> None:
        """Queue a request.

        Raises:
            PromptTooLong: it could never run here. DuplicateRoom: its bootstrap room is in use.
            QueueFull: the limits of the queue are reached; with priorities, less important requests
            may end with it instead.
        """
        state = self._state
        limits = self.limits
        prompt_len = len(req.prompt)
        rendezvous = req.rendezvous
        longest = limits.capacity_tokens if rendezvous is None else limits.room_capacity_tokens
        if prompt_len + 1 > longest:
            raise errors.PromptTooLong(
                f"prompt has {prompt_len} tokens, "
                f"the KV pool of this engine holds {longest}; "
                "shorten it or start the engine with a larger --max-total-tokens"
            )
        now = max(state.now, req.arrival)
        retry_secs = state.admission.retry_after(now, state.times.prefill_rate)
        state.sharing.check_request(req, retry_secs)
        if rendezvous is not None and rendezvous.room in state.rooms:
            raise errors.DuplicateRoom(
                f"bootstrap room {rendezvous.room} is in use by another request; draw a new one",
                param="bootstrap_room",
            )
        self._make_room(req)
        is_lease = limits.role == "prefill" and rendezvous is not None
        max_new_tokens = 1
        if not is_lease:
            max_new_tokens = min(req.params.max_new_tokens, limits.capacity_tokens - prompt_len)
        seq = Seq(
            req,
            array("i", req.prompt),
            max_new_tokens,
            is_lease=is_lease,
            tokens_computed_at_arrival=state.computed_tokens,
        )
        seq.start_priority = state.start_priority(req)
        state.seqs[req.handle] = seq
        if rendezvous is not None:
            state.rooms[rendezvous.room] = seq
        self._deadlines.watch_request(req, state.seqs, len(state.seqs))
        if rendezvous is not None and limits.role == "decode":
            # Shake hands with P at once; pages come later, so that a full D delays no P.
            seq.state = SeqState.OPENING
            state.outbox.append(OpenTransfer(req))
        state.enqueue(seq)

    def _make_room(self, req: ValidatedRequest) -> None:
        state = self._state
        now = max(state.now, req.arrival)
        for seq in state.admission.make_room(req, now, state.times.prefill_rate):
            retry = state.admission.retry_after(now, state.times.prefill_rate)
            error = errors.QueueFull(
                f"request {seq.req.rid} left the full queue for one of higher priority; "
                f"retry after {retry} s",
                retry_after_secs=retry,
            )
            state.end_with_error(seq, error, "NO_CAPACITY")

    def abort(self, handle: int, code: str = "CLIENT_GONE") -> None:
        """Stop a request and free its slot and pages; unknown or ended handles are ignored.

        No EmittedTokens follow.

        P: a prompt that is computed and waits for D is released, too, as soon as the transfer
        runtime releases it.
        """
        leased = self._state.leased.get(handle)
        if leased is not None:
            self._state.outbox.append(AbortTransfer(leased.req, code))
        seq = self._live_request(handle)
        if seq is not None:
            seq.finish = FinishReason.ABORT
            self._state.end_request(seq, code)

    # ------------------------------------------------------------------ suspend and resume

    def suspend(self, handles: Sequence[int]) -> int:
        """Keep these requests from running until `resume`, all or none; they keep arrival, tokens
        and deadline.

        Returns:
            How many of them are alive and suspended now, whether by this call or before; unknown
            ones are ignored.
        Raises:
            WrongState: one of them has its KV in transfer.
        A token that is being computed still comes.
        """
        seqs = [seq for handle in handles if (seq := self._state.seqs.get(handle)) is not None]
        for seq in seqs:
            if seq.state not in (SeqState.WAITING, SeqState.RUNNING, SeqState.SUSPENDED):
                raise errors.WrongState(
                    f"request {seq.req.rid} is {seq.state.value}: "
                    "only waiting and running requests can be suspended; "
                    "ask again once it decodes, or ask the other node of the pair"
                )
        for seq in seqs:
            if seq.state is not SeqState.SUSPENDED:
                self._state.suspend(seq)
        return len(seqs)

    def resume(self, handles: Sequence[int]) -> int:
        """Let these requests run again; returns how many are alive.

        One that is not suspended stays as it is.
        """
        seqs = [seq for handle in handles if (seq := self._state.seqs.get(handle)) is not None]
        for seq in seqs:
            if seq.state is SeqState.SUSPENDED:
                self._state.resume(seq)
        return len(seqs)

    # ------------------------------------------------------------------ adjusted priorities

    def adjust_priorities(self, priorities: Mapping[int, float | None]) -> None:
        """Replace the priority of these requests in the queue order (larger is better); None: their
        own again.

        Preemption and queue limits still compare what requests state. Unknown handles are
        ignored.
        """
        for handle, priority in priorities.items():
            seq = self._state.seqs.get(handle)
            if seq is not None and seq.adjusted_priority != priority:
                self._state.reprioritize(seq, priority)

    def in_rooms(self, rooms: Collection[int]) -> list[int]:
        """Handles of the requests with these bootstrap rooms, leased ones included."""
        seq_of_room = self._state.rooms
        return [seq_of_room[room].handle for room in rooms if room in seq_of_room]

    def leased(self, rid: str | None) -> list[int]:
        """P: handles of computed prompts that wait for D, of this rid or (None) all."""
        return [seq.handle for seq in self._state.leased.values() if rid in (None, seq.req.rid)]

    def handles(self) -> list[int]:
        """Requests that hold something, leased ones and those being aborted included."""
        return list(self._state.seqs)

    def is_alive(self, handle: int) -> bool:
        return self._live_request(handle) is not None

    # ------------------------------------------------------------------ deadlines and failures

    def expire(self, now: float) -> None:
        """End every request that has run out of time, or has waited for longer than
        --queue-timeout-secs.
        """
        state = self._state
        for handle, is_whole in self._deadlines.pop_passed(now):
            seq = self._live_request(handle)
            if seq is None:
                continue
            if is_whole:
                error: errors.EngineError = errors.RequestTimeout(
                    f"request {seq.req.rid} passed its deadline in the state {seq.state.value}; "
                    "retry, with a longer deadline_ms if it stated one, "
                    "or raise --request-timeout-secs"
                )
                state.stats.deadlines_missed["total"] += 1
                state.end_with_error(seq, error, "DEADLINE")
            elif len(seq.tokens) == seq.prompt_len:
                state.miss_deadline(seq)
        for seq in state.admission.pop_overdue(now):
            retry = state.admission.retry_after(now, state.times.prefill_rate)
            waited = self.limits.queue_timeout_secs
            error = errors.QueueTimeout(
                f"request {seq.req.rid} waited {waited:g} s and had not started, "
                "the limit of --queue-timeout-secs; "
                f"retry after {retry} s",
                retry_after_secs=retry,
            )
            state.end_with_error(seq, error, "NO_CAPACITY")

    def next_deadline(self) -> float | None:
        deadlines = [
            deadline
            for deadline in (self._deadlines.next_deadline(), self._state.admission.next_due())
            if deadline is not None
        ]
        return min(deadlines, default=None)

    def fail(self, handle: int, error: errors.EngineError, code: str = "DEADLINE") -> None:
        """End a request with an error, or abort one that has been answered; `code`: the transfer
        peer's reason.
        """
        seq = self._live_request(handle)
        if seq is None:
            self.abort(handle, code)
        else:
            self._state.end_with_error(seq, error, code)

    def _live_request(self, handle: int) -> Seq | None:
        """The request, unless it has been answered already."""
        seq = self._state.seqs.get(handle)
        return None if seq is None or seq.state in (SeqState.LEASED, SeqState.ABORTING) else seq

    # ------------------------------------------------------------------ KV transfer

    def transfer_announced(self, room: int) -> None:
        """D: P holds pages for this prompt: they are fetched before pages are set aside for others,
        and not revoked.
        """
        seq = self._state.rooms.get(room)
        if seq is not None and seq.state in (SeqState.OPENING, SeqState.TRANSFER):
            self._state.note_announced(seq)

    def grant_revoked(self, room: int) -> None:
        """D: the transfer runtime has carried out a RevokeGrant; the pages may be used again."""
        seq = self._state.rooms.get(room)
        if seq is not None and seq.state is SeqState.TRANSFER and seq.is_revoking:
            self._state.take_grant_back(seq)

    def transfer_committed(
        self,
        room: int,
        token: int,
        cached_tokens: int,
        logprobs: TokenLogprobs | None,
        pulled: PulledPages | None = None,
        completes_grammar: bool = False,
    ) -> None:
        """D: every prompt page has arrived and was verified; `token` is the first one, drawn by P.

        Args:
            completes_grammar: P's matcher allows no further token; the answer ends here.
        """
        state = self._state
        seq = state.rooms.get(room)
        if seq is None or seq.state is not SeqState.TRANSFER:
            # Aborted after it had ended: no further event of the runtime follows.
            self.transfer_closed(room)
            return
        del state.transfer[seq.handle]
        del state.rooms[room]
        state.start_running(seq)
        seq.has_started = True
        seq.cached_tokens = cached_tokens
        seq.computed = seq.committed = seq.prompt_len
        if seq.state_pages:
            seq.state_tokens = seq.prompt_len
        state.memory.publish(seq)
        state.stats.on_pulled(seq, pulled)
        self._take_token(seq, token, logprobs, completes_grammar)

    def transfer_failed(self, room: int, error: errors.EngineError) -> None:
        """D: the room is over and nothing writes to its pages any more."""
        state = self._state
        seq = state.rooms.get(room)
        if seq is None:
            return
        if seq.state is not SeqState.ABORTING:
            state.report_error(seq, error)
        state.forget_request(seq)

    def transfer_closed(self, room: int) -> None:
        """D: the transfer runtime has carried out an AbortTransfer; the pages may be used again."""
        seq = self._state.rooms.get(room)
        if seq is not None and seq.state is SeqState.ABORTING:
            self._state.forget_request(seq)

    def release(self, room: int, code: str = "DONE") -> None:
        """P: the lease on a prompt's pages is over, however it ended: DONE, or the transfer
        runtime's reason.

        A room that ends before its prompt is computed gets no lease: the pages are free when the
        last step commits. After CHECKSUM the prompt's cached pages serve no other request: a retry
        computes them again.
        """
        seq = self._state.rooms.get(room)
        if seq is None:
            return
        if code == "CHECKSUM":
            self._state.memory.quarantine(seq)
        if seq.state is SeqState.LEASED:
            self.stats.timeline_of(seq).finish = code
            self._state.forget_request(seq)
        else:
            seq.is_released = True

    # ------------------------------------------------------------------ planning

    def offer_drafts(
        self, offers: Sequence[DraftOffer], wait: float = 0.0, made_in: float = 0.0
    ) -> None:
        """Drafted tokens for the next plan, in place of those that were offered before.

        Args:
            wait: seconds in which the device waits for the host where a step has drafts.
            made_in: seconds that the device has spent on making them.
        """
        state = self._state
        # A replayed recording has plain tuples.
        state.draft_offers = {offer[0]: DraftOffer(*offer) for offer in offers}
        state.draft_wait = wait
        state.stats.on_drafts_made(made_in)

    def draft_lengths(
        self,
        offers: Sequence[DraftOffer],
        wait: float,
        drafting: DraftingCosts = NO_DRAFTING_COSTS,
    ) -> dict[int, int]:
        """How many of these drafts a step would be planned with, by handle; the next tokens of the
        sequences need not be known yet.

        Args:
            drafting: time that it takes to make them, which is not spent yet.
        """
        return self._planner.drafts.would_choose(offers, wait, drafting)

    def plan(self, now: float = 0.0) -> StepPlan | None:
        """Choose the next forward pass; None when there is nothing to compute. Same state and
        `now`, same plan.

        Args:
            now: seconds, the clock of ValidatedRequest.arrival; only policies that weigh waiting
                time read it.
        """
        state = self._state
        assert not state.has_drafts_in_flight, (
            "a step with drafts is committed before the next plan"
        )
        outcome = self._planner.plan(now)
        state.draft_offers = {}
        state.has_drafts_in_flight = outcome.plan is not None and bool(outcome.plan.drafted)
        self._record_decision(outcome, now)
        return outcome.plan

    def _record_decision(self, outcome: PlanOutcome, now: float) -> None:
        """Keep a record of what was just decided."""
        state = self._state
        limits = self.limits
        plan = outcome.plan
        requeued = tuple(state.stats.requeued)
        if plan is not None:
            self.decisions.steps[plan.mode, plan.stopped_by] += 1
        elif not requeued:
            has_waiting = state.waiting or state.opening
            is_in_flight = state.planned_step > state.committed_step
            if not has_waiting or is_in_flight:
                return
            if not self.decisions.is_new_reason(outcome.stopped_by):
                return
        state.stats.requeued.clear()
        decode_rows = plan.num_answering if plan else 0
        decision = StepDecision(
            step=state.planned_step,
            now=now,
            mode=(plan.mode if plan else ForwardMode.IDLE).value,
            stopped_by=outcome.stopped_by.value,
            policy=state.arrival_policy.active,
            decode_rows=decode_rows,
            drafted_tokens=sum(plan.drafted) if plan else 0,
            prefill_tokens=plan.num_prompt_tokens if plan else 0,
            prefill_requests=len(plan.rows) - decode_rows if plan else 0,
            token_budget=limits.step_tokens,
            seconds_budget=outcome.seconds_budget,
            request_budget=limits.prefill_max_requests,
            pages_available=state.memory.available,
            pages_reserved=outcome.pages_reserved,
            slots_free=len(state.slots),
            new_token_ratio=state.memory.ratio.value,
            queued=dict(state.stats.queued),
            admitted=tuple(adm.handle for adm in plan.admitted) if plan else (),
            requeued=requeued,
        )
        self.decisions.record(decision)

    # ------------------------------------------------------------------ results

    def observe(self, plan: StepPlan, seconds: float, copy_seconds: float = 0.0) -> None:
        """How long a step took on the device, and how much of it the copies to and from the host.

        Aging, deadlines and the choice between copying and computing a preempted request's KV are
        measured with it.
        """
        seconds -= copy_seconds
        self._state.times.observe(plan, seconds)
        self._state.stats.on_observed(plan, seconds, self._state.times)
        self._state.memory.observe_copies(plan.copies, copy_seconds)

    def commit(self, plan: StepPlan, result: StepResult, now: float = 0.0) -> None:
        """Apply the outcome of a step, at `now` (as in `plan`).

        Steps are committed in the order of planning.
        """
        state = self._state
        state.now = max(state.now, now)
        assert plan.step == state.committed_step + 1, "steps are committed in order"
        # First of all, so that no page computed from a damaged one is announced as cached.
        if plan.copies:
            state.commit_copies(plan, result)
        state.step_committed(plan.step)
        state.has_drafts_in_flight = False
        state.computed_tokens += plan.num_prompt_tokens
        state.stats.on_computed(plan, state.now)
        first = next_first = 0
        runs = iter(result.runs) if result.runs else ONE_EACH
        may_be_void = plan.step <= state.distrusted_step
        seqs = state.seqs
        retained = state.retained
        tokens = result.tokens
        logprobs = result.logprobs
        completed = result.completed
        for handle, _, start, n, sample, _, _, _ in plan.rows:
            if sample:
                first = next_first
                next_first += next(runs)
            seq = seqs.get(handle)
            if seq is None:
                continue
            seq.inflight_steps -= 1
            # The sequence is computed again: this row's token may follow from a damaged page.
            if may_be_void and plan.step <= seq.distrusted_step:
                seq.inflight -= sample
                seq.drafts_in_flight = 0
                state.waiting.on_tokens(seq)
                continue
            end = start + n
            # Behind the tokens that the sequence has drawn the row computed drafts that it has not.
            drafts = seq.drafts_in_flight
            if drafts:
                end = start + next_first - first
                seq.drafts_in_flight = 0
                # Sent back meanwhile, it has nothing computed.
                if seq.state is RUNNING:
                    seq.computed = end
            if seq.logprob_position < seq.prompt_len:
                state.emit_prompt_logprobs(seq, end, result.prompt_logprobs.get(handle))
            if end > seq.committed and (seq.state is RUNNING or handle in retained):
                seq.committed = end
                if seq.is_lease and not seq.is_released:
                    self._announce_pages(seq)
            if sample:
                seq.inflight -= 1
                known = len(seq.tokens)
                if known == seq.prompt_len:
                    computed_tokens = seq.prompt_len - max(seq.cached_tokens, 0)
                    state.times.on_prompt_computed(computed_tokens, state.now)
                if seq.state in TAKES_TOKENS:
                    completes = first in completed
                    self._take_token(seq, tokens[first], logprobs.get(first), completes)
                if drafts:
                    self._take_run(seq, result, range(first + 1, next_first))
                    # The last token of the run is no draft.
                    drawn = min(len(seq.tokens) - known, next_first - first - 1)
                    state.stats.on_drafted(seq, drafts, drawn)
                    state.count_drafts(seq, drawn, drafts - drawn)
        state.stats.on_step(plan, state.now)
        state.release_grants()
        state.settle()

    def _take_token(
        self, seq: Seq, token: int, logprobs: TokenLogprobs | None, completes_grammar: bool
    ) -> None:
        state = self._state
        if token < 0:
            state.fail_without_token(seq, token)
            return
        tokens = seq.tokens
        tokens.append(token)
        generated = len(tokens) - seq.prompt_len
        stages = state.stats.on_first_token(seq, state.now) if generated == 1 else None
        if seq.state is not RUNNING:
            state.waiting.on_tokens(seq)
        state.sharing.charge_generated(seq)
        params = seq.req.params
        finish: FinishReason | None = None
        if completes_grammar or (
            token in params.stop_token_ids and generated >= params.min_new_tokens
        ):
            finish = FinishReason.STOP
        elif generated >= seq.max_new_tokens:
            finish = FinishReason.LENGTH
        cached = seq.cached_tokens
        state.outbox.append(
            new_token(
                (
                    seq.handle,
                    (token,),
                    finish,
                    cached if cached > 0 else 0,
                    logprobs,
                    None,
                    None,
                    stages,
                    None,
                    None,
                )
            )
        )
        if finish is None:
            return
        if seq.is_lease and not seq.is_released:
            self._lease_pages(seq, token, logprobs, completes_grammar)
        else:
            seq.finish = finish
            state.end_request(seq, "")

    def _take_run(self, seq: Seq, result: StepResult, behind: range) -> None:
        """Take the tokens that a row with drafts drew behind its first one."""
        for index in behind:
            # The answer ended inside the run: without drafts nothing would have been drawn behind.
            if seq.state not in TAKES_TOKENS:
                return
            completes = index in result.completed
            self._take_token(seq, result.tokens[index], result.logprobs.get(index), completes)

    def _announce_pages(self, seq: Seq) -> None:
        """P: prompt pages that the committed steps made final, the last partial one with the end of
        the prompt.
        """
        final_tokens = min(seq.committed, seq.prompt_len)
        final_pages = final_tokens // self.limits.page_size
        if final_tokens == seq.prompt_len:
            final_pages = self._state.memory.pages(seq.prompt_len)
        if final_pages > seq.announced_pages:
            first = seq.announced_pages
            seq.announced_pages = final_pages
            outbox = self._state.outbox
            outbox.append(PagesFinal(seq.req, first, seq.pages[first:final_pages]))
            further = self._state.memory.further_pages(seq, first, final_pages)
            for group, (first_page, pages) in enumerate(further, start=1):
                if pages:
                    outbox.append(PagesFinal(seq.req, first_page, pages, group))

    def _lease_pages(
        self, seq: Seq, token: int, logprobs: TokenLogprobs | None, completes_grammar: bool
    ) -> None:
        state = self._state
        num_pages = state.memory.pages(seq.prompt_len)
        state.start_lease(seq)
        state.stats.on_leased(seq, num_pages)
        full_pages_tokens = (num_pages - 1) * self.limits.page_size
        prefill_done = PrefillDone(
            req=seq.req,
            total_pages=num_pages,
            last_page_tokens=seq.prompt_len - full_pages_tokens,
            token=token,
            cached_tokens=max(seq.cached_tokens, 0),
            logprobs=logprobs,
            completes_grammar=completes_grammar,
            further=tuple(
                (first_page, first_page + len(pages))
                for first_page, pages in state.memory.further_pages(seq, 0, num_pages)
            ),
        )
        state.outbox.append(prefill_done)

    # ------------------------------------------------------------------ views

    def drain_events(self) -> list[Event]:
        """Events since the last call, in order.

        The shell carries each out before it makes the next plan.
        """
        events = self._state.outbox
        self._state.outbox = []
        return events

    def flush_cache(self) -> int:
        """Drop every cached page without users, on the host too; returns how many of the device."""
        return self._state.memory.flush()

    @property
    def is_idle(self) -> bool:
        return not self._state.seqs

    def host_ledger(self) -> HostLedger | None:
        """Where every page of the host tier is; None without one.

        Raises if the books do not balance.
        """
        host = self._state.memory.host
        return None if host is None else host.ledger()

    def ledger(self) -> PageLedger:
        """Where every page is. Raises if the books do not balance."""
        state = self._state
        memory = state.memory
        private = in_transfer = 0
        for seq in state.seqs.values():
            num_private = memory.private_pages(seq)
            if seq.state in (SeqState.TRANSFER, SeqState.LEASED, SeqState.ABORTING):
                in_transfer += num_private
            else:
                private += num_private
        ledger = PageLedger.count_pages(memory.allocator, memory.cache, private, in_transfer)
        ledger.check(self.limits.num_pages)
        self.host_ledger()
        return ledger
