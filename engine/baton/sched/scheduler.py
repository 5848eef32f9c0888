"""The planner: which tokens the next forward pass computes, and what its result means.

Two pure halves (no clock, no torch, no sockets):

1. `plan()` looks at queues and pages and returns a StepPlan: one token for every decoding sequence first, then prompt
   chunks in policy order within one token budget. It advances `computed`, so that the next plan can be made while the
   step still runs (overlap scheduling).
2. `commit(plan, result)` takes the sampled tokens, finishes sequences, frees pages and returns events for the shell.

Rules that hold after every call:

* free + cached + locked + private pages = capacity (`ledger()`).
* Between two tokens of a running sequence at most one step goes by without it.
* A prompt page joins the radix tree when its computation is *scheduled*: a later row, even one of the same step, may
  use it, because steps run in order and every layer writes its KV before it reads. Pages leave the engine only after
  commit.
* A waiting sequence holds nothing. A retracted one publishes prompt and answer to the tree before it lets go.
* D's granted pages are written by the transfer runtime beside the compute, so they are handed over only when no
  step in flight can still write to them (`GrantPages` waits for the commits of all steps planned before it).

Sources: token budget after vLLM v1, admission estimate after SGLang 0.5.7, both as specified in docs/architecture.md.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.cache.ledger import PageLedger
from baton.cache.pages import PageAllocator
from baton.cache.radix import RadixCache
from baton.errors import DuplicateRoom, EngineError, PromptTooLong, QueueFull, RequestTimeout
from baton.request import FinishReason, Validated
from baton.sched.estimate import NewTokenRatio
from baton.sched.events import AbortTransfer, Emitted, Event, GrantPages, OpenTransfer, PagesFinal, PrefillDone
from baton.sched.plan import UNKNOWN_TOKEN, Admitted, Row, StepPlan, StepResult, Stop, TokenLogprobs
from baton.sched.policy import POLICIES, PolicyParams, PriorityRule, View, ordered
from baton.sched.queue import WaitingQueue
from baton.sched.seq import Seq, SeqState


@dataclass(frozen=True, slots=True)
class Limits:
    """The budgets of one scheduler (names and defaults: baton.config)."""

    num_pages: int
    page_size: int
    max_running_requests: int
    max_queued_requests: int
    step_tokens: int
    """Token budget of one step: min(chunked_prefill_size, max_prefill_tokens)."""
    prefill_max_requests: int | None = None
    reserved_decode_tokens: int = 512
    role: str = "null"
    policy: str = "fcfs"
    conservativeness: float = 1.0
    radix_cache: bool = True
    prefill_first: bool = False
    max_queued_tokens: int | None = None
    """Most prompt tokens waiting in all."""
    policy_params: PolicyParams = field(default_factory=PolicyParams)
    priority: PriorityRule = field(default_factory=PriorityRule)
    max_partial_prefills: int = 4
    """Prompts that may be under way at once when the policy re-decides per chunk: they hold pages while suspended."""
    preemption_publishes: bool = True
    """A preempted request leaves its KV in the cache (mode `cache`) instead of dropping it (mode `recompute`)."""
    max_preemptions_per_request: int = 8
    preemption_min_remaining_tokens: int = 8
    """A request this close to its end is not preempted."""


INITIAL_PREFILL_RATE = 2000.0
"""Assumed until steps have been observed [tokens/s]; only ageing terms depend on it."""
RATE_SMOOTHING = 0.1


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class Scheduler:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.allocator = PageAllocator(limits.num_pages)
        self.cache = RadixCache(limits.page_size, self.allocator, enabled=limits.radix_cache)
        self.ratio = NewTokenRatio(limits.conservativeness)
        self._policy = POLICIES[limits.policy](limits.policy_params)
        self._now = 0.0
        self._prefill_rate = INITIAL_PREFILL_RATE
        self._computed_tokens = 0
        self._queued_tokens = 0
        self._seqs: dict[int, Seq] = {}
        self._rooms: dict[int, Seq] = {}
        self._waiting = WaitingQueue(self._policy, limits.priority, self._view)
        self._opening = WaitingQueue(POLICIES["fcfs"](limits.policy_params), limits.priority, self._view)
        self._transfer: dict[int, Seq] = {}
        self._running: dict[int, Seq] = {}
        self._leased: dict[int, Seq] = {}
        self._closing: dict[int, Seq] = {}
        self._slots = list(range(limits.max_running_requests - 1, -1, -1))
        self._deadlines: list[tuple[float, int]] = []
        self._outbox: list[Event] = []
        self._grants: deque[tuple[int, Seq, GrantPages]] = deque()
        self._planned_step = 0
        self._committed_step = 0
        self._new_pages: array[int] = array("i")
        self.retractions = 0
        self.preemptions = 0
        self.ttft_deadlines_missed = 0
        self.prefill_was_last = False

    # ------------------------------------------------------------------ ingress

    @property
    def capacity_tokens(self) -> int:
        return self.limits.num_pages * self.limits.page_size

    def add(self, req: Validated) -> None:
        """Queue a request.

        Raises:
            PromptTooLong: it could never run here. QueueFull: max_queued_requests are waiting. DuplicateRoom: its
            bootstrap room is in use.
        """
        prompt_len = len(req.prompt)
        if prompt_len + 1 > self.capacity_tokens:
            raise PromptTooLong(
                f"prompt has {prompt_len} tokens, the KV pool of this engine holds {self.capacity_tokens}; shorten it "
                "or start the engine with a larger --max-total-tokens"
            )
        queued = len(self._waiting) + len(self._opening)
        if queued >= self.limits.max_queued_requests:
            raise QueueFull(
                f"{queued} requests are waiting, the limit is {self.limits.max_queued_requests}; retry later or raise "
                "--max-queued-requests",
                retry_after_secs=1,
            )
        limit_tokens = self.limits.max_queued_tokens
        if limit_tokens is not None and self._queued_tokens + prompt_len > limit_tokens:
            raise QueueFull(
                f"{self._queued_tokens} prompt tokens are waiting and this request brings {prompt_len}, the limit is "
                f"{limit_tokens}; retry later or raise --max-queued-tokens",
                retry_after_secs=1,
            )
        meet = req.rendezvous
        if meet is not None and meet.room in self._rooms:
            raise DuplicateRoom(
                f"bootstrap room {meet.room} is in use by another request; draw a new one", param="bootstrap_room"
            )
        limit = 1 if self.is_lease(req) else min(req.params.max_new_tokens, self.capacity_tokens - prompt_len)
        seq = Seq(req, array("i", req.prompt), limit, born_tokens=self._computed_tokens)
        self._seqs[req.handle] = seq
        if meet is not None:
            self._rooms[meet.room] = seq
        if req.deadline is not None:
            heapq.heappush(self._deadlines, (req.deadline, req.handle))
            if len(self._deadlines) > 1024 + 2 * len(self._seqs):
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self._seqs]
                heapq.heapify(self._deadlines)
        if meet is not None and self.limits.role == "decode":
            self._open(seq)
        else:
            self._enqueue(seq)

    def _enqueue(self, seq: Seq) -> None:
        self._waiting.add(seq)
        self._queued_tokens += seq.prompt_len

    def _dequeue(self, seq: Seq) -> None:
        if seq in self._waiting:
            self._waiting.discard(seq)
            self._queued_tokens -= seq.prompt_len

    def is_lease(self, req: Validated) -> bool:
        """Does this request end here with a lease on its pages (a prompt prefilled for a D node)?"""
        return self.limits.role == "prefill" and req.rendezvous is not None

    def abort(self, handle: int, code: str = "CLIENT_GONE") -> None:
        """Stop a request and free what it holds; unknown or finished handles are ignored. No Emitted follows."""
        seq = self._seqs.get(handle)
        if seq is None or seq.state in (SeqState.LEASED, SeqState.ABORTING):
            return
        seq.finish = FinishReason.ABORT
        self._end(seq, code)

    def expire(self, now: float) -> None:
        """End every request whose deadline has passed with a `timeout` error."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, handle = heapq.heappop(self._deadlines)
            seq = self._seqs.get(handle)
            if seq is not None and seq.state not in (SeqState.LEASED, SeqState.ABORTING):
                state = seq.state.value
                self.fail(
                    handle,
                    RequestTimeout(
                        f"request {seq.req.rid} passed its deadline while {state}; "
                        "retry, or raise --request-timeout-secs"
                    ),
                )

    def next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    def fail(self, handle: int, error: EngineError, code: str = "DEADLINE") -> None:
        """End a request with an error; `code` is the reason given to the transfer peer."""
        seq = self._seqs.get(handle)
        if seq is None or seq.state in (SeqState.LEASED, SeqState.ABORTING):
            return
        seq.finish = FinishReason.ERROR
        self._outbox.append(
            Emitted(handle, (), FinishReason.ERROR, max(seq.cached_tokens, 0), error=(error.code, error.message))
        )
        self._end(seq, code)

    # ------------------------------------------------------------------ KV transfer

    def transfer_committed(self, room: int, token: int, cached_tokens: int, logprobs: TokenLogprobs | None) -> None:
        """D: every prompt page has arrived and was verified; `token` is the first one, drawn by P."""
        seq = self._rooms.get(room)
        if seq is None or seq.state is not SeqState.TRANSFER:
            return
        del self._transfer[seq.handle]
        del self._rooms[room]
        seq.to(SeqState.RUNNING)
        self._running[seq.handle] = seq
        seq.cached_tokens = cached_tokens
        seq.computed = seq.committed = seq.prompt_len
        self._publish(seq)
        self._take_token(seq, token, logprobs)

    def transfer_failed(self, room: int, error: EngineError) -> None:
        """D: the room is over and nothing writes to its pages any more."""
        seq = self._rooms.get(room)
        if seq is None:
            return
        if seq.state is SeqState.ABORTING:
            self.transfer_closed(room)
            return
        seq.finish = FinishReason.ERROR
        self._outbox.append(Emitted(seq.handle, (), FinishReason.ERROR, 0, error=(error.code, error.message)))
        self._forget(seq)

    def transfer_closed(self, room: int) -> None:
        """D: the transfer runtime has carried out an AbortTransfer; the pages may be used again."""
        seq = self._rooms.get(room)
        if seq is not None and seq.state is SeqState.ABORTING:
            self._forget(seq)

    def release(self, room: int) -> None:
        """P: the lease on a prompt's pages is over, however it ended."""
        seq = self._rooms.get(room)
        if seq is not None and seq.state is SeqState.LEASED:
            self._forget(seq)

    def _open(self, seq: Seq) -> None:
        """D: shake hands with P at once; pages come later (`_admit_transfers`), so that a full D delays no P."""
        seq.state = SeqState.OPENING
        self._opening.add(seq)
        self._outbox.append(OpenTransfer(seq.req))

    def _admit_transfers(self) -> None:
        """D: reserve pages for prompts on their way, leaving room for running answers."""
        limits = self.limits
        for seq in self._opening.in_order() if self._opening else ():
            if not self._slots:
                return
            match = self.cache.match(seq.tokens.tobytes(), seq.req.namespace, seq.prompt_len)
            self.cache.lock(match.node)
            need = _ceil_div(seq.prompt_len, limits.page_size) - len(match.pages)
            growth = min(limits.reserved_decode_tokens, self.ratio.estimate(seq.max_new_tokens))
            busy = self._running or self._transfer or self._waiting
            margin = _ceil_div(growth, limits.page_size) + self._reserved_growth() if busy else 0
            pages = self._allocate(need) if need + margin <= self._available() else None
            if pages is None:
                self.cache.unlock(match.node)
                return
            self._opening.discard(seq)
            seq.node, seq.published = match.node, len(match.pages)
            seq.pages.extend(match.pages)
            seq.to(SeqState.TRANSFER)
            self._transfer[seq.handle] = seq
            seq.slot = self._slots.pop()
            seq.private.update(pages)
            seq.pages.extend(pages)
            self._grants.append((self._planned_step, seq, GrantPages(seq.req, len(match.pages), pages)))

    # ------------------------------------------------------------------ planning

    def plan(self, now: float = 0.0) -> StepPlan | None:
        """Choose the next forward pass; None when there is nothing to compute. Same state and `now`, same plan.

        Args:
            now: seconds, the clock of Validated.arrival; only policies that weigh waiting time read it.
        """
        self._now = now
        self._admit_transfers()
        self._release_grants()
        self._new_pages = array("i")
        if self.limits.priority.enabled:
            self._preempt_for_priority()
        retractions = self.retractions
        rows: list[Row] = []
        admitted: list[Admitted] = []
        skip_decode = self.limits.prefill_first and not self.prefill_was_last and self._has_prefill()
        if not skip_decode:
            self._plan_decode(rows, admitted)
        num_decode = len(rows)
        stopped_by = Stop.PREEMPTED
        if self.retractions == retractions:
            budget = max(self.limits.step_tokens - num_decode, self.limits.page_size)
            stopped_by = self._plan_prefill(rows, admitted, budget)
        if skip_decode and not rows:
            self._plan_decode(rows, admitted)
            num_decode = len(rows)
        if not rows:
            if self.retractions > retractions:
                return self.plan(now)  # the pages just freed may let another sequence run; each round retracts one
            if not self._running:
                self.ratio.on_idle()
            return None
        self.prefill_was_last = num_decode == 0
        if num_decode:
            self.ratio.on_decode_step()
        self._planned_step += 1
        return StepPlan(
            self._planned_step,
            tuple(rows),
            num_decode,
            tuple(admitted),
            self._new_pages,
            stopped_by,
            self.retractions - retractions,
        )

    def _has_prefill(self) -> bool:
        return bool(self._waiting) or any(not seq.is_decoding for seq in self._running.values())

    def _wants_row(self, seq: Seq) -> bool:
        """Is there anything left to compute? A sequence whose last token is in flight waits for it."""
        return seq.extend_tokens > 0 and seq.generated < seq.max_new_tokens

    def _plan_decode(self, rows: list[Row], admitted: list[Admitted]) -> None:
        """One token for every decoding sequence. Pages first, rows after: one with pages may still fall victim."""
        ready = []
        for seq in [s for s in self._running.values() if s.is_decoding and self._wants_row(s)]:
            if seq.state is SeqState.RUNNING and self._grow(seq, seq.total_len):
                ready.append(seq)
        rows.extend(self._row(seq, 1, admitted) for seq in ready if seq.state is SeqState.RUNNING)

    def _grow(self, seq: Seq, tokens: int) -> bool:
        """Make room for `tokens` tokens of a decoding sequence, retracting others if need be. False: not this step."""
        need = _ceil_div(tokens, self.limits.page_size) - len(seq.pages)
        while need > 0:
            pages = self._allocate(need)
            if pages is not None:
                seq.pages.extend(pages)
                seq.private.update(pages)
                return True
            if not self._retract_one(keep=seq):
                return False
        return True

    def _retract_one(self, keep: Seq) -> bool:
        """Send the running sequence that is cheapest to recompute back to the queue; the oldest one always stays."""
        running = list(self._running.values())
        oldest = min(running, key=lambda s: (s.req.arrival, s.handle))
        victims = [s for s in running if s is not oldest and s is not keep and s.pages]
        if not victims:
            if keep is oldest:
                return False
            victims = [keep]
        victim = min(victims, key=lambda s: (s.computed, -s.req.arrival, -s.handle))
        self._retract(victim)
        return victim is not keep

    def _retract(self, seq: Seq) -> None:
        self.retractions += 1
        seq.retractions += 1
        self._suspend(seq, publish=True)
        self.ratio.on_retraction((s.generated, s.max_new_tokens) for s in self._running.values())

    def _suspend(self, seq: Seq, *, publish: bool) -> None:
        """Send a running sequence back to the queue: it keeps its tokens and its arrival, and holds nothing."""
        if publish:
            self._publish(seq)
        self._let_go(seq)
        del self._running[seq.handle]
        seq.to(SeqState.WAITING)
        seq.computed = seq.committed = seq.sent_pages = 0
        self._enqueue(seq)

    def _preempt_for_priority(self) -> None:
        """Make room for the first waiting request by suspending running ones of clearly lower priority.

        Triggered by slots and by pages; all or nothing; the cheapest to recompute among the least important go first;
        only base priorities count, so that an aged request never evicts and no two can evict each other in turn.
        """
        head = next((s for s in self._waiting.in_order() if not s.inflight_steps), None) if self._waiting else None
        if head is None:
            return
        short = self._pages_for(head) - self._available()
        if self._slots and short <= 0:
            return
        rule = self.limits.priority
        below = rule.base(head) - rule.preemption_threshold
        victims: list[Seq] = []
        for seq in sorted(
            (s for s in self._running.values() if rule.base(s) < below and self._may_preempt(s)),
            key=lambda s: (rule.base(s), s.computed, -s.req.arrival, -s.handle),
        ):
            if victims and short <= 0:
                break
            victims.append(seq)
            short -= len(seq.pages) + self._growth(seq)
        if not victims or short > 0:
            return
        for seq in victims:
            self.preemptions += 1
            seq.preemptions += 1
            self._suspend(seq, publish=self.limits.preemption_publishes)

    def _may_preempt(self, seq: Seq) -> bool:
        limits = self.limits
        left = seq.max_new_tokens - seq.generated
        return (
            seq.preemptions < limits.max_preemptions_per_request
            and (left >= limits.preemption_min_remaining_tokens or not seq.is_decoding)
            and not self.is_lease(seq.req)
        )

    def _plan_prefill(self, rows: list[Row], admitted: list[Admitted], budget: int) -> Stop:
        limit = self.limits.prefill_max_requests
        started = 0
        blocked: Stop | None = None
        for seq in self._prefill_candidates():
            if budget <= 0:
                return Stop.TOKEN_BUDGET
            if limit is not None and started >= limit:
                return Stop.MAX_REQUESTS
            is_new = seq.state is SeqState.WAITING
            if is_new:
                # One that cannot be admitted blocks those behind it; prompts under way go on.
                blocked = blocked or self._admit(seq)
                if blocked is not None:
                    continue
            else:
                self._adopt_prefix(seq)
            n = self._chunk(seq, budget)
            if n == 0:
                return Stop.TOKEN_BUDGET
            if not self._extend(seq, n):
                if is_new:
                    self._unadmit(seq)
                elif not rows and self._planned_step == self._committed_step:
                    # Nothing else runs that could free pages: let the youngest prompt give way.
                    self._retract_one(keep=seq)
                return Stop.NO_PAGES
            rows.append(self._row(seq, n, admitted))
            self._publish_scheduled(seq)
            budget -= n
            started += 1
        return blocked or Stop.QUEUE_EMPTY

    def _prefill_candidates(self) -> Iterator[Seq]:
        """Prompts under way, then the waiting queue in policy order; or both in policy order if it re-decides."""
        unfinished = [s for s in self._running.values() if not s.is_decoding and self._wants_row(s)]
        # A retracted sequence with a row in flight waits for that step's commit.
        if not self._policy.redecides_chunks:
            yield from unfinished
            if self._slots and self._waiting:
                yield from (s for s in self._waiting.in_order() if not s.inflight_steps)
            return
        queue = unfinished + [s for s in self._waiting if not s.inflight_steps]
        under_way = len(unfinished)
        for seq in ordered(queue, self._policy, self.limits.priority, self._view()):
            if seq.state is SeqState.WAITING:
                if under_way >= self.limits.max_partial_prefills or not self._slots:
                    continue
                under_way += 1
            yield seq

    def _chunk(self, seq: Seq, budget: int) -> int:
        """Tokens of this prompt to compute now: all, or whole pages so that chunks end at page boundaries."""
        left = seq.extend_tokens
        if left <= budget:
            return left
        end = seq.computed + budget
        aligned = end - end % self.limits.page_size
        return max(aligned - seq.computed, 0)

    def _admit(self, seq: Seq) -> Stop | None:
        """Give a waiting sequence a slot and its cached prefix, if it is expected to fit."""
        if not self._slots:
            return Stop.NO_SLOT
        match = self.cache.match(seq.tokens.tobytes(), seq.req.namespace, len(seq.tokens) - 1)
        self.cache.lock(match.node)
        need = self._pages_for(seq, len(match.pages))
        if need > self._available():
            self.cache.unlock(match.node)
            return Stop.NO_PAGES
        self._dequeue(seq)
        seq.to(SeqState.RUNNING)
        self._running[seq.handle] = seq
        seq.slot = self._slots.pop()
        seq.node, seq.published = match.node, len(match.pages)
        seq.pages = array("i", match.pages)
        seq.computed = match.num_tokens
        if seq.cached_tokens < 0:
            seq.cached_tokens = match.num_tokens
        return None

    def _unadmit(self, seq: Seq) -> None:
        self._let_go(seq)
        del self._running[seq.handle]
        seq.to(SeqState.WAITING)
        self._enqueue(seq)
        seq.computed = 0

    def _adopt_prefix(self, seq: Seq) -> None:
        """Between two chunks of a prompt: take over pages that another sequence computed meanwhile."""
        if seq.computed % self.limits.page_size or len(seq.pages) * self.limits.page_size != seq.computed:
            return
        match = self.cache.match(seq.tokens.tobytes(), seq.req.namespace, len(seq.tokens) - 1)
        if match.num_tokens <= seq.computed:
            return
        self.cache.lock(match.node)
        if seq.node is not None:
            self.cache.unlock(seq.node)
        seq.node, seq.published = match.node, len(match.pages)
        seq.pages.extend(match.pages[len(seq.pages) :])
        seq.computed = match.num_tokens

    def _extend(self, seq: Seq, n: int) -> bool:
        """Reserve pages for the next n prompt tokens; prompts never retract others."""
        need = _ceil_div(seq.computed + n, self.limits.page_size) - len(seq.pages)
        if need <= 0:
            return True
        pages = self._allocate(need)
        if pages is None:
            return False
        seq.pages.extend(pages)
        seq.private.update(pages)
        return True

    def _row(self, seq: Seq, n: int, admitted: list[Admitted]) -> Row:
        start = seq.computed
        if seq.sent_pages == 0:
            admitted.append(Admitted(seq.handle, seq.slot, seq.req.params, seq.prompt_len, array("i", seq.tokens)))
        tokens = seq.tokens[start : start + n]
        if len(tokens) < n:
            tokens.append(UNKNOWN_TOKEN)
        row = Row(
            seq.handle,
            seq.slot,
            start,
            n,
            start + n == seq.total_len,
            tokens,
            seq.sent_pages,
            seq.pages[seq.sent_pages :],
        )
        seq.sent_pages = len(seq.pages)
        seq.computed = start + n
        seq.inflight_steps += 1
        if row.sample:
            # The token before this one is known or in flight; from now on the newest unknown one is this row's.
            seq.inflight += 1
        return row

    # ------------------------------------------------------------------ results

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """How long a step took on the device: what ageing and deadlines are measured with."""
        tokens = plan.num_tokens - plan.num_decode
        if tokens and seconds > 0 and not plan.num_decode:
            self._prefill_rate += RATE_SMOOTHING * (tokens / seconds - self._prefill_rate)

    def commit(self, plan: StepPlan, result: StepResult, now: float = 0.0) -> None:
        """Apply the outcome of a step, at `now` (as in `plan`). Steps are committed in the order of planning."""
        self._now = max(self._now, now)
        assert plan.step == self._committed_step + 1, "steps are committed in order"
        self._committed_step = plan.step
        self._computed_tokens += plan.num_tokens - plan.num_decode
        sampled = 0
        for row in plan.rows:
            token = None
            logprobs = None
            if row.sample:
                token = result.tokens[sampled]
                logprobs = result.logprobs.get(sampled)
                sampled += 1
            seq = self._seqs.get(row.handle)
            if seq is None:
                continue
            seq.inflight_steps -= 1
            if row.sample:
                seq.inflight -= 1
            if seq.state is SeqState.RUNNING and row.start + row.n > seq.committed:
                seq.committed = row.start + row.n
                self._announce(seq)
            if token is not None and seq.state in (SeqState.RUNNING, SeqState.WAITING):
                self._take_token(seq, token, logprobs)
        self._release_grants()

    def _take_token(self, seq: Seq, token: int, logprobs: TokenLogprobs | None) -> None:
        if len(seq.tokens) == seq.prompt_len and seq.req.ttft_deadline is not None:
            self.ttft_deadlines_missed += self._now > seq.req.ttft_deadline
        seq.tokens.append(token)
        finish = self._finish_reason(seq, token)
        lease = self.is_lease(seq.req) and finish is not None
        self._outbox.append(Emitted(seq.handle, (token,), finish, max(seq.cached_tokens, 0), logprobs))
        if lease:
            self._lease(seq, token, logprobs)
        elif finish is not None:
            seq.finish = finish
            self._end(seq, "")

    def _finish_reason(self, seq: Seq, token: int) -> FinishReason | None:
        params = seq.req.params
        if token in params.stop_token_ids and len(seq.tokens) - seq.prompt_len >= params.min_new_tokens:
            return FinishReason.STOP
        if len(seq.tokens) - seq.prompt_len >= seq.max_new_tokens:
            return FinishReason.LENGTH
        return None

    def _announce(self, seq: Seq) -> None:
        """P: prompt pages that the committed steps made final, the last partial one with the end of the prompt."""
        if not self.is_lease(seq.req):
            return
        done = min(seq.committed, seq.prompt_len)
        whole = _ceil_div(done, self.limits.page_size) if done == seq.prompt_len else done // self.limits.page_size
        if whole > seq.announced_pages:
            first = seq.announced_pages
            seq.announced_pages = whole
            self._outbox.append(PagesFinal(seq.req, first, seq.pages[first:whole]))

    def _lease(self, seq: Seq, token: int, logprobs: TokenLogprobs | None) -> None:
        page = self.limits.page_size
        total = _ceil_div(seq.prompt_len, page)
        del self._running[seq.handle]
        seq.to(SeqState.LEASED)
        self._leased[seq.handle] = seq
        self._slots.append(seq.slot)
        seq.slot = -1
        last = seq.prompt_len - (total - 1) * page
        self._outbox.append(PrefillDone(seq.req, total, last, token, max(seq.cached_tokens, 0), logprobs))

    # ------------------------------------------------------------------ endings

    def _end(self, seq: Seq, code: str) -> None:
        """Take a sequence out of whatever state it is in. `code` != "": tell the transfer peer."""
        has_room = seq.req.rendezvous is not None and seq.req.rendezvous.room in self._rooms
        if has_room and code:
            self._outbox.append(AbortTransfer(seq.req, code))
        if seq.state in (SeqState.OPENING, SeqState.TRANSFER):
            self._opening.discard(seq)
            self._transfer.pop(seq.handle, None)
            if seq.slot >= 0:
                self._slots.append(seq.slot)
                seq.slot = -1
            seq.to(SeqState.ABORTING)
            self._closing[seq.handle] = seq
            return
        self._forget(seq)

    def _forget(self, seq: Seq) -> None:
        """Publish what is worth keeping, free the rest and drop the sequence."""
        if seq.state is SeqState.RUNNING:
            self._publish(seq)
        self._let_go(seq)
        self._dequeue(seq)
        self._opening.discard(seq)
        for table in (self._transfer, self._running, self._leased, self._closing, self._seqs):
            table.pop(seq.handle, None)
        meet = seq.req.rendezvous
        if meet is not None and self._rooms.get(meet.room) is seq:
            del self._rooms[meet.room]
        seq.to(SeqState.FINISHED)

    def _let_go(self, seq: Seq) -> None:
        if seq.private:
            self.allocator.free(array("i", sorted(seq.private)))
            seq.private.clear()
        if seq.node is not None:
            self.cache.unlock(seq.node)
            seq.node = None
            seq.published = 0
        seq.pages = array("i")
        if seq.slot >= 0:
            self._slots.append(seq.slot)
            seq.slot = -1

    # ------------------------------------------------------------------ pages

    def _publish_scheduled(self, seq: Seq) -> None:
        """Offer prompt pages to the tree as soon as their computation is scheduled."""
        self._insert(seq, min(seq.computed, len(seq.tokens)) // self.limits.page_size)

    def _publish(self, seq: Seq) -> None:
        """Offer every whole page of known, computed tokens to the tree (end of a request, retraction, arrival on D)."""
        self._insert(seq, min(seq.computed, len(seq.tokens)) // self.limits.page_size)

    def _insert(self, seq: Seq, pages: int) -> None:
        first = seq.published
        if pages <= first or not self.limits.radix_cache:
            return
        size = pages * self.limits.page_size
        done = self.cache.insert(seq.tokens[:size].tobytes(), seq.pages[first:pages], seq.req.namespace, first)
        self.cache.lock(done.node)
        if seq.node is not None:
            self.cache.unlock(seq.node)
        seq.node = done.node
        seq.published = pages
        # Where the tree had the same tokens already, its pages stay and ours remain private.
        seq.private.difference_update(seq.pages[first + len(done.existing_pages) : pages])

    def _available(self) -> int:
        return self.allocator.free_count + self.cache.evictable_pages

    def _pages_for(self, seq: Seq, cached_pages: int | None = None) -> int:
        """Pages that should be available before a waiting sequence is admitted."""
        page = self.limits.page_size
        if cached_pages is None:
            cached = self.cache.peek(seq.tokens.tobytes(), seq.req.namespace, len(seq.tokens) - 1)
            cached_pages = cached // page
        work = _ceil_div(len(seq.tokens), page) - cached_pages
        if not self._running and not self._transfer and not self._leased:
            return work  # alone: it must run, and it fits (see `add`)
        answer = 0 if self.is_lease(seq.req) else self.ratio.estimate(seq.max_new_tokens - seq.generated)
        return work + _ceil_div(answer, page) + self._reserved_growth()

    def _growth(self, seq: Seq) -> int:
        """Pages that a sequence with pages is expected to still take."""
        answer = 0 if self.is_lease(seq.req) else self.ratio.estimate(seq.max_new_tokens - seq.generated)
        return max(_ceil_div(len(seq.tokens) + answer, self.limits.page_size) - len(seq.pages), 0)

    def _reserved_growth(self) -> int:
        return sum(self._growth(seq) for table in (self._running, self._transfer) for seq in table.values())

    def _allocate(self, n: int) -> array[int] | None:
        short = n - self.allocator.free_count
        if short > 0:
            self.cache.evict(short)
        pages = self.allocator.alloc(n)
        if pages is not None:
            self._new_pages.extend(pages)
        return pages

    def _release_grants(self) -> None:
        while self._grants and self._grants[0][0] <= self._committed_step:
            _, seq, grant = self._grants.popleft()
            if seq.state is SeqState.TRANSFER:
                self._outbox.append(grant)

    # ------------------------------------------------------------------ views

    def _view(self) -> View:
        return View(
            self._now,
            self._planned_step,
            self.cache,
            self._prefill_rate,
            self._computed_tokens,
            self.ratio.estimate,
        )

    def drain_events(self) -> list[Event]:
        """Events since the last call, in order. The shell carries each out before it makes the next plan."""
        events, self._outbox = self._outbox, []
        return events

    def flush_cache(self) -> int:
        """Drop every cached page that nobody uses; returns how many."""
        return self.cache.flush()

    @property
    def is_idle(self) -> bool:
        return not self._seqs

    def counts(self) -> dict[str, int]:
        """Requests by state."""
        return {
            "waiting": len(self._waiting),
            "opening": len(self._opening),
            "transfer": len(self._transfer),
            "running": len(self._running),
            "leased": len(self._leased),
            "aborting": len(self._closing),
        }

    def ledger(self) -> PageLedger:
        """Where every page is. Raises if the books do not balance."""
        moving = 0
        held = self.cache.locked_pages
        for seq in self._seqs.values():
            if seq.state in (SeqState.TRANSFER, SeqState.LEASED, SeqState.ABORTING):
                moving += len(seq.private)
            else:
                held += len(seq.private)
        ledger = PageLedger(
            free=self.allocator.free_count, cached=self.cache.evictable_pages, held=held, in_transfer=moving
        )
        ledger.check(self.limits.num_pages)
        return ledger
