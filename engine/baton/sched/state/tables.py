"""Every request of one rank: which table it is in, and the moves between tables.

Scheduler (requests, results) and planner share this state; each move leaves slots, pages and tables
consistent.

* A waiting sequence holds nothing. A retracted one publishes prompt and answer to the tree before
  its pages are released.
* A suspended one holds nothing either and is not planned until it is resumed. Exception, on P: a
  prompt with pages announced to D keeps them through a suspension (`retained`), because D may be
  reading them.
* D takes pages back only from rooms of which P has announced nothing; the others P finishes by
  itself.
* D's granted pages are written by the transfer runtime beside the compute, so they are handed over
  only when no step in flight can still write to them (`grant_pages` waits for the commits of all
  steps planned before it).
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterator

from baton.errors import (
    DeadlineMissed,
    EngineError,
    GrammarFailed,
    NonfiniteLogits,
    counted,
)
from baton.sched.fairness.fair_queue import FairQueue
from baton.sched.fairness.sharing import SharingStrategy
from baton.sched.memory.kv_manager import KvManager
from baton.sched.metrics.collector import SchedStats
from baton.sched.metrics.step_time import StepTime
from baton.sched.policies import POLICIES, Policy, PolicyContext
from baton.sched.queue.admission import AdmissionController
from baton.sched.queue.priority_buckets import class_of
from baton.sched.queue.waiting_queue import WaitingQueue
from baton.sched.setup.limits import Limits
from baton.sched.types.draft_offer import DraftOffer
from baton.sched.types.events import (
    AbortTransfer,
    EmittedTokens,
    Event,
    GrantPages,
    RevokeGrant,
    RowError,
)
from baton.sched.types.plan import (
    GRAMMAR_FAILED_TOKEN,
    INVALID_TOKEN,
    PromptLogprobs,
    StepPlan,
    StepResult,
)
from baton.sched.types.request import FinishReason, ValidatedRequest
from baton.sched.types.sequence import TAKES_TOKENS, Seq, SeqState


class SchedulerState:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.memory = KvManager(limits)
        self.policy = POLICIES[limits.policy](limits.policy_params)
        self.now = 0.0
        self.times = StepTime(limits.step_tokens)
        self.computed_tokens = 0
        """Prompt tokens computed since the start."""
        self.admission = AdmissionController(limits)
        self.planned_step = 0
        self.committed_step = 0
        self.distrusted_step = 0
        """The latest of any sequence (Seq.distrusted_step)."""
        self.seqs: dict[int, Seq] = {}
        """Every live request by handle; each is in exactly one of the tables below."""
        self.rooms: dict[int, Seq] = {}
        self.sharing = SharingStrategy()
        label: Callable[[Seq], str] = functools.partial(class_of, rule=limits.priority)
        if limits.fairness.enabled:
            self.sharing = fair = FairQueue(
                limits.fairness, limits.step_tokens, self.memory.answer_tokens, self.holders
            )
            label = fair.label_of if limits.fairness.classes.classes else label
        self.waiting = WaitingQueue(self.policy, limits.priority, self.policy_context, self.sharing)
        self.opening = WaitingQueue(
            POLICIES[limits.policy](limits.policy_params),
            limits.priority,
            self.policy_context,
            self.sharing,
        )
        self.announced: dict[int, Seq] = {}
        """D: those of `opening` whose pages P holds. A view, not a table."""
        self._least_priority = 0
        """The least important priority that a request has stated."""
        self.transfer: dict[int, Seq] = {}
        self.running: dict[int, Seq] = {}
        """Running sequences, in order of place from `sort_running` on, until one joins."""
        self._is_unsorted = False
        self.suspended: dict[int, Seq] = {}
        self.leased: dict[int, Seq] = {}
        self.closing: dict[int, Seq] = {}
        self.retained: dict[int, Seq] = {}
        """P: sequences, suspended or waiting again, that hold pages for D. A view, not a table."""
        self.slots = list(range(limits.max_running_requests - 1, -1, -1))
        self.draft_offers: dict[int, DraftOffer] = {}
        """Drafted tokens for the next plan, by handle."""
        self.draft_wait = 0.0
        """Time in which the device waits for the host where a step has drafts [s]."""
        self.has_drafts_in_flight = False
        self.outbox: list[Event] = []
        self._grants: deque[tuple[int, Seq, GrantPages]] = deque()
        self.stats = SchedStats(limits.starvation_secs, label)
        self._clocks: deque[int] = deque()
        """The tree's clock at the end of each plan in flight."""
        self.retractions = 0
        self.preemptions = 0
        self.suspensions = 0

    def policy_context(self) -> PolicyContext:
        return PolicyContext(
            now=self.now,
            step=self.planned_step,
            index=self.memory.cache,
            prefill_rate=self.times.prefill_rate,
            computed_tokens=self.computed_tokens,
            answer_share=self.memory.ratio.value,
            clip_max_new_tokens=self.limits.clip_max_new_tokens,
            queued_tokens=self.admission.queued_tokens,
        )

    @property
    def arrival_policy(self) -> Policy:
        """The order of the queue that new requests join; a decode node's other queue holds those
        sent back.
        """
        return self.opening.policy if self.limits.role == "decode" else self.policy

    # ------------------------------------------------------------------ steps

    def step_planned(self) -> int:
        """Number the step that was planned just now."""
        self.planned_step += 1
        self._clocks.append(self.memory.cache.clock)
        return self.planned_step

    def step_committed(self, step: int) -> None:
        """Mark what had been published when this step was planned as computed."""
        self.committed_step = step
        self.memory.cache.settle(self._clocks.popleft())

    def settle(self) -> None:
        """Mark everything published as computed, or arrived, while no step is in flight."""
        if self.planned_step == self.committed_step:
            self.memory.cache.settle(self.memory.cache.clock)

    # ------------------------------------------------------------------ waiting

    def start_priority(self, req: ValidatedRequest) -> float | None:
        """Start of the order where the request states no priority and requests age; None: its base.

        Below all priorities stated so far, but within reach: aging has to bring it past them in
        bounded time.
        """
        rule = self.limits.priority
        if req.priority is not None or rule.default is not None:
            self._least_priority = min(self._least_priority, rule.base_of(req))
        elif rule.enabled and rule.aging_rate:
            return self._least_priority - 1
        return None

    def enqueue(self, seq: Seq) -> None:
        """Queue a sequence by its state.

        One whose prompt P computes adds no tokens to those that wait here.
        """
        if seq.state is SeqState.OPENING:
            self.opening.add(seq)
            self.admission.add(seq, 0, self.now)
        else:
            self.waiting.add(seq)
            self.admission.add(seq, seq.prompt_len, self.now)
        self.stats.on_queued(seq, self.now)

    def dequeue(self, seq: Seq) -> None:
        """Out of the waiting or the opening queue; one that is in neither is ignored."""
        self.waiting.discard(seq)
        self.opening.discard(seq)
        self.announced.pop(seq.handle, None)
        self.admission.remove(seq, self.now)

    # ------------------------------------------------------------------ running

    def start_running(self, seq: Seq) -> None:
        """WAITING or TRANSFER → RUNNING."""
        seq.move_to(SeqState.RUNNING)
        self.retained.pop(seq.handle, None)
        seq.sort_key = self.limits.priority.sort_key(seq, self.now)
        last_seq = next(reversed(self.running.values()), None)
        if last_seq is not None and seq.sort_key < last_seq.sort_key:
            self._is_unsorted = True
        self.running[seq.handle] = seq

    def sort_running(self) -> None:
        """Order the running by place: who gets pages first, and whose row comes first."""
        rule = self.limits.priority
        if rule.is_capped:
            for seq in self.running.values():
                seq.sort_key = rule.sort_key(seq, self.now)
        if self._is_unsorted or rule.is_capped:
            in_order = sorted(self.running.values(), key=operator.attrgetter("sort_key"))
            self.running = {seq.handle: seq for seq in in_order}
            self._is_unsorted = False

    def reprioritize(self, seq: Seq, priority: float | None) -> None:
        """Replace its priority in every order by this one; None: its own again."""
        seq.adjusted_priority = priority
        self.waiting.reprioritize(seq)
        self.opening.reprioritize(seq)
        seq.sort_key = self.limits.priority.sort_key(seq, self.now)
        self._is_unsorted = True

    def requeue(self, seq: Seq, mode: str) -> None:
        """Send a running sequence back to the queue: it keeps its tokens and its arrival, and holds
        nothing.
        """
        self._leave_device(seq, mode)
        seq.move_to(SeqState.WAITING)
        self.enqueue(seq)

    def _leave_device(self, seq: Seq, mode: str) -> None:
        """Take a sequence off the device: its slot and its pages are free for others.

        `mode`: see KvManager.
        """
        self.memory.release_device_memory(seq, mode, self.times.prefill_rate)
        self._free_slot(seq)
        self.running.pop(seq.handle, None)
        seq.computed = seq.committed = seq.pages_sent_to_runner = 0

    def _retain_pages(self, seq: Seq) -> None:
        """P: give up the slot and keep the pages: some were announced to D, or soon will be."""
        self.memory.park_state(seq)
        del self.running[seq.handle]
        self._free_slot(seq)
        seq.pages_sent_to_runner = 0
        self.retained[seq.handle] = seq

    def cancel_admission(self, seq: Seq) -> None:
        """Undo an admission that no row came of."""
        if seq.announced_pages:
            self._retain_pages(seq)
            seq.move_to(SeqState.WAITING)
            self.enqueue(seq)
        else:
            self.requeue(seq, "recompute")

    def release_retained(self) -> bool:
        """P: release one retained sequence's pages, the newest's, suspended ones first. False:
        nothing is retained.

        D has read most of them long ago; should it come for one that has been reused meanwhile, its
        transfer fails and no wrong token comes of it.
        """
        if not self.retained:
            return False
        seq = max(
            self.retained.values(),
            key=lambda seq: (seq.state is SeqState.SUSPENDED, seq.req.arrival, seq.handle),
        )
        del self.retained[seq.handle]
        self._leave_device(seq, "cache")
        return True

    def retract(self, seq: Seq, by: Seq) -> None:
        """Send a sequence back because `by` (perhaps itself) wants memory, and learn from it."""
        self.stats.on_suspended(seq, "memory", by)
        self.retractions += 1
        seq.retractions += 1
        mode = self.limits.preemption_mode
        self.requeue(seq, "cache" if mode == "recompute" else mode)
        self.memory.ratio.on_retraction(
            (survivor.generated, survivor.max_new_tokens) for survivor in self.running.values()
        )

    def preempt(self, seq: Seq, by: Seq | None = None) -> None:
        """Send a sequence back, for `by` if it is one of higher priority that lacks a slot or
        pages.
        """
        self.stats.on_suspended(seq, "priority" if self.slots else "slots", by)
        self.preemptions += 1
        seq.preemptions += 1
        self.requeue(seq, self.limits.preemption_mode)

    # ------------------------------------------------------------------ damaged on the host

    def commit_copies(self, plan: StepPlan, result: StepResult) -> None:
        """The plan's copies are done: what reads a page that came back damaged is computed again,
        and the cache forgets what was computed from it.
        """
        for damaged in self.memory.restores.commit(plan.copies, result.damaged_pages):
            for seq in list(self.seqs.values()):
                if damaged.is_read_by(seq):
                    self._compute_again(seq)
            self.memory.quarantine_prefix(damaged.tokens, damaged.namespace)

    def _compute_again(self, seq: Seq) -> None:
        """Void the rows in flight of a sequence that reads a damaged page, and release its pages.

        Leases and transfers under way read no such page: a lease begins, and a grant leaves, after
        the step that vouches for all its pages.
        """
        seq.distrusted_step = self.distrusted_step = self.planned_step
        if seq.state is SeqState.RUNNING:
            self.stats.on_suspended(seq, "checksum")
            self.requeue(seq, "recompute")
        elif self.retained.pop(seq.handle, None) is not None:
            self._leave_device(seq, "recompute")
        elif any(entry[1] is seq for entry in self._grants):
            self.revoke_grant(seq)

    # ------------------------------------------------------------------ suspended by an operator

    def suspend(self, seq: Seq) -> None:
        """WAITING or RUNNING → SUSPENDED: out of the queue and off the device until `resume`."""
        self.suspensions += 1
        self.stats.on_suspended(seq, "admin")
        seq.has_started = True
        if seq.state is SeqState.WAITING:
            self.dequeue(seq)
        elif seq.is_lease and seq.pages:
            self._retain_pages(seq)
        else:
            self._leave_device(seq, self.limits.preemption_mode)
        seq.move_to(SeqState.SUSPENDED)
        self.suspended[seq.handle] = seq

    def resume(self, seq: Seq) -> None:
        """SUSPENDED → WAITING, at the place of its arrival, whatever the queue's limits."""
        del self.suspended[seq.handle]
        seq.move_to(SeqState.WAITING)
        self.enqueue(seq)

    # ------------------------------------------------------------------ leased

    def start_lease(self, seq: Seq) -> None:
        """P: the prompt is computed; its pages stay for D, its slot does not.

        Suspended or waiting again: its last step was in flight when it was suspended.
        """
        # While it ran, pages behind some that the tree has without a snapshot were not published.
        self.memory.publish(seq, leaves=True)
        self.dequeue(seq)
        self.stats.on_withdrawn(seq)
        for table in (self.running, self.suspended, self.retained):
            table.pop(seq.handle, None)
        seq.move_to(SeqState.LEASED)
        self.leased[seq.handle] = seq
        self._free_slot(seq)

    # ------------------------------------------------------------------ transfer

    def grant_pages(self, seq: Seq, start_page: int) -> None:
        """D: hand a sequence's pages from `start_page` on to the transfer runtime once the steps
        planned so far have committed.

        If pages are waiting to be copied, these may be among them: then the next step, too, has to
        commit.
        """
        after_step = self.planned_step + self.memory.has_copies
        further = self.memory.further_pages(seq, start_page)
        grant = GrantPages(seq.req, start_page, seq.pages[start_page:], further)
        self._grants.append((after_step, seq, grant))

    def note_announced(self, seq: Seq) -> None:
        """D: P holds pages for a prompt on its way."""
        seq.is_announced = True
        seq.is_revoking = False
        self.stats.timeline_of(seq).announced_at = self.stats.now
        if seq.state is SeqState.OPENING:
            self.announced[seq.handle] = seq

    def revoke_grant(self, seq: Seq) -> None:
        """D: ask for the pages of a transfer of which nothing has come; at once if its grant has
        not left yet.
        """
        num_pending = len(self._grants)
        self._grants = deque(entry for entry in self._grants if entry[1] is not seq)
        if len(self._grants) < num_pending:
            self.take_grant_back(seq)
        else:
            seq.is_revoking = True
            self.outbox.append(RevokeGrant(seq.req))

    def take_grant_back(self, seq: Seq) -> None:
        """D: TRANSFER → OPENING: no peer writes to its pages any more."""
        seq.is_revoking = False
        del self.transfer[seq.handle]
        self._release_memory(seq)
        seq.move_to(SeqState.OPENING)
        self.enqueue(seq)
        # Its grant had not left when a page of its prefix turned out to be damaged.
        if seq.is_announced:
            self.announced[seq.handle] = seq

    def release_grants(self) -> None:
        while self._grants:
            after_step, seq, grant = self._grants[0]
            if after_step > self.committed_step:
                return
            self._grants.popleft()
            if seq.state is SeqState.TRANSFER:
                self.outbox.append(grant)

    # ------------------------------------------------------------------ endings

    def end_request(self, seq: Seq, code: str) -> None:
        """Take a sequence out of whatever state it is in.

        `code` != "": the transfer peer gets it.
        """
        rendezvous = seq.req.rendezvous
        has_room = rendezvous is not None and rendezvous.room in self.rooms
        if has_room and code:
            self.outbox.append(AbortTransfer(seq.req, code))
        if seq.state in (SeqState.OPENING, SeqState.TRANSFER):
            self.dequeue(seq)
            self.transfer.pop(seq.handle, None)
            self._free_slot(seq)
            self._emit_timeline(seq)
            seq.move_to(SeqState.ABORTING)
            self.closing[seq.handle] = seq
            return
        self.forget_request(seq)

    def end_with_error(self, seq: Seq, error: EngineError, code: str) -> None:
        """End a request with an error that the client gets."""
        self.report_error(seq, error)
        self.end_request(seq, code)

    def report_error(self, seq: Seq, error: EngineError) -> None:
        """Emit the error that a request is about to end with."""
        seq.finish = FinishReason.ERROR
        self.stats.timeline_of(seq).error = error.code
        emitted = EmittedTokens(
            handle=seq.handle,
            tokens=(),
            finish=seq.finish,
            cached_tokens=max(seq.cached_tokens, 0),
            error=RowError.of(error),
            retry_after_secs=error.retry_after_secs,
        )
        self.outbox.append(emitted)

    def emit_prompt_logprobs(self, seq: Seq, end: int, found: PromptLogprobs | None) -> None:
        """Emit the logprobs that a row gave which ends in front of position `end`.

        A row that was computed again after a preemption has some that are out already. What is
        missing does not depend on `found`, which recordings leave out.
        """
        if seq.state not in TAKES_TOKENS:
            return
        fresh = None if found is None else found.from_position(seq.logprob_position)
        seq.logprob_position = max(seq.logprob_position, min(end + 1, seq.prompt_len))
        if fresh is None:
            return
        emitted = EmittedTokens(
            handle=seq.handle,
            tokens=(),
            finish=None,
            cached_tokens=max(seq.cached_tokens, 0),
            prompt_logprobs=fresh,
        )
        self.outbox.append(emitted)

    def count_drafts(self, seq: Seq, accepted: int, rejected: int) -> None:
        """Add a step's drafts to those of the request, whose last output states them all."""
        accepted_before, rejected_before = seq.draft_counts
        seq.draft_counts = (accepted_before + accepted, rejected_before + rejected)
        outbox = self.outbox
        for place in reversed(range(len(outbox))):
            event = outbox[place]
            if isinstance(event, EmittedTokens) and event.handle == seq.handle:
                outbox[place] = event._replace(drafts=seq.draft_counts)
                return

    def fail_without_token(self, seq: Seq, token: int) -> None:
        """End a request for which a step chose no token; `token` stands for the reason."""
        if token == GRAMMAR_FAILED_TOKEN:
            answered = len(seq.tokens) - seq.prompt_len
            failed = GrammarFailed(
                f"after {counted(answered, 'token')} the answer's grammar, allowed_token_ids, "
                "bad_words and min_tokens together allow no token of this model, or the grammar's "
                "matcher has reached a limit; simplify the schema or grammar, or send the request "
                "without one of them"
            )
            self.end_with_error(seq, failed, "CLIENT_GONE")
            return
        assert token == INVALID_TOKEN, f"no step chooses {token}"
        error = NonfiniteLogits(
            f"the model computed NaN or infinity after {len(seq.tokens)} tokens; "
            "send the request again, and check the checkpoint and --dtype when it happens to all"
        )
        self.memory.publish(
            seq, leaves=True
        )  # what the same step computed leaves the tree with the rest
        self.memory.quarantine(seq)
        self.end_with_error(seq, error, "CLIENT_GONE")

    def miss_deadline(self, seq: Seq) -> None:
        """End a request whose first token did not come, or cannot come, in the time that its client
        gave.
        """
        self.admission.turned_away["deadline"] += 1
        error = DeadlineMissed(
            f"request {seq.req.rid} was {seq.state.value} "
            "and its first token cannot come within its ttft_deadline_ms any more; "
            "retry with a longer one, or start the engine with --deadline-miss-action demote"
        )
        self.end_with_error(seq, error, "DEADLINE")

    def forget_request(self, seq: Seq) -> None:
        """Publish what is worth keeping, free the rest and drop the sequence."""
        is_computed_here = seq.state is SeqState.RUNNING or seq.handle in self.retained
        if is_computed_here:
            self.memory.publish(seq, leaves=True)
        self._release_memory(seq)
        self.dequeue(seq)
        tables = (
            self.transfer,
            self.running,
            self.suspended,
            self.retained,
            self.leased,
            self.closing,
            self.seqs,
        )
        for table in tables:
            table.pop(seq.handle, None)
        rendezvous = seq.req.rendezvous
        if rendezvous is not None and self.rooms.get(rendezvous.room) is seq:
            del self.rooms[rendezvous.room]
        self._emit_timeline(seq)
        seq.move_to(SeqState.FINISHED)

    def _emit_timeline(self, seq: Seq) -> None:
        timeline = self.stats.on_ended(seq)
        if timeline is not None:
            self.outbox.append(timeline)

    def _release_memory(self, seq: Seq) -> None:
        self.memory.release_pages(seq)
        self._free_slot(seq)

    def _free_slot(self, seq: Seq) -> None:
        if seq.slot >= 0:
            self.slots.append(seq.slot)
            seq.slot = -1

    # ------------------------------------------------------------------ reports

    def holders(self) -> Iterator[Seq]:
        """Every sequence that holds pages and has not ended."""
        return itertools.chain(self.running.values(), self.transfer.values(), self.leased.values())
