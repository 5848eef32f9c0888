"""Admission control of the waiting queue: which requests may wait, for how long, and Retry-After of
the others.

1. A new request passes `make_room`. At the limits (`--max-queued-requests`, `--max-queued-tokens`)
   it is refused, or, with priorities, takes the place of waiting requests of strictly lower
   priority: least important first, newest first among equals (as SGLang 0.5.7 does). Only base
   priorities count: an aged request must not be immune.
2. It is added, and removed when it is admitted or ended; the controller measures how fast the queue
   moves.
3. A request that has waited longer than `--queue-timeout-secs` without having started is `overdue`.

A request that has started (preempted, retracted, suspended) is never turned away and never overdue:
its work is paid. `retry_after` is the time until the queue is expected to have room, from the rate
at which it moves, within bounds.
"""

from __future__ import annotations

import heapq
import math
from typing import Any, TypeVar

from baton.errors import QueueFull
from baton.sched.setup.limits import Limits
from baton.sched.types.request import ValidatedRequest
from baton.sched.types.sequence import Seq

Entry = TypeVar("Entry", bound=tuple[Any, ...])

MIN_RETRY_SECS = 1
MAX_RETRY_SECS = 60
"""Bounds of Retry-After [s]: below, clients would busy-loop; above, most give up."""
HORIZON_SECS = 30.0
"""The rate at which the queue moves is an average over about so long [s]."""


class DrainRate:
    """Requests and prompt tokens that left the queue per second, recent ones counting more (1/e per
    horizon).
    """

    def __init__(self, horizon_secs: float = HORIZON_SECS) -> None:
        self._horizon = horizon_secs
        self._since: float | None = None
        self._at = 0.0
        self._requests = 0.0
        self._tokens = 0.0

    def start_clock(self, now: float, was_empty: bool = False) -> None:
        """The queue has something in it: time counts from now on.

        A queue that was empty for longer than the horizon is measured afresh: its last requests say
        nothing of now.
        """
        is_stale = was_empty and now - self._at > self._horizon
        # A rate that has faded for hours is denormal, and its inverse, Retry-After, infinite.
        if self._since is None or is_stale:
            self._since = self._at = now
            self._requests = self._tokens = 0.0

    def on_left(self, tokens: int, now: float) -> None:
        self.start_clock(now)
        share = self._remaining_share(now)
        self._requests = self._requests * share + 1
        self._tokens = self._tokens * share + tokens
        self._at = max(self._at, now)

    def per_second(self, now: float) -> tuple[float, float]:
        """(requests, tokens); zeros while nothing is known."""
        # No time has passed: a rate would divide by zero.
        if self._since is None or now <= self._since:
            return 0.0, 0.0
        weight = self._horizon * -math.expm1((self._since - max(self._at, now)) / self._horizon)
        share = self._remaining_share(now)
        return self._requests * share / weight, self._tokens * share / weight

    def _remaining_share(self, now: float) -> float:
        """Share of the sums that still counts at `now`."""
        return math.exp(min(self._at - now, 0.0) / self._horizon)


def _pop_handle(heap: list[Entry]) -> int:
    """Remove the first entry with its equals, and return its handle.

    A request has one entry for each time that it was added: it may have run in between.
    """
    entry = heapq.heappop(heap)
    while heap and heap[0] == entry:
        heapq.heappop(heap)
    handle: int = entry[-1]
    return handle


class AdmissionController:
    """Counts include requests that started and came back: they use the room, but cannot be turned
    away.
    """

    def __init__(self, limits: Limits) -> None:
        self.queued_tokens = 0
        """Prompt tokens of the requests that wait to be computed here (not of those that wait for
        another's KV).
        """
        self.turned_away = dict.fromkeys(("refused", "evicted", "timeout", "deadline"), 0)
        """Waiting requests that ended without having started, by reason."""
        self._limits = limits
        self._queued: dict[int, tuple[Seq, int]] = {}
        """Handle → the request, and the tokens it adds to `queued_tokens`."""
        self._rate = DrainRate()
        self._eviction_heap: list[tuple[int, float, int, int]] = []
        """(base priority, -arrival, -handle, handle): the first is the first to be turned away."""
        self._due: list[tuple[float, int]] = []

    def add(self, seq: Seq, tokens: int, now: float) -> None:
        """Add a request whose `tokens` count towards --max-queued-tokens."""
        self._rate.start_clock(now, was_empty=not self._queued)
        self._queued[seq.handle] = seq, tokens
        self.queued_tokens += tokens
        # Its work is paid: it is not turned away, and cannot be overdue.
        if seq.has_started:
            return
        # Without priorities no waiting request gives its place to a new one.
        if self._limits.priority.enabled:
            self._drop_dead_entries(self._eviction_heap)
            self._push_candidate(seq)
        if self._limits.queue_timeout_secs:
            self._drop_dead_entries(self._due)
            heapq.heappush(
                self._due, (seq.req.arrival + self._limits.queue_timeout_secs, seq.handle)
            )

    def remove(self, seq: Seq, now: float) -> None:
        """Remove a request; one that is not inside is ignored."""
        # Each end of a request calls this, and some end before they wait.
        _, tokens = self._queued.pop(seq.handle, (None, -1))
        if tokens >= 0:
            self.queued_tokens -= tokens
            self._rate.on_left(tokens, now)

    def make_room(self, req: ValidatedRequest, now: float, prefill_rate: float) -> list[Seq]:
        """Requests of lower priority that have to leave so that `req` may enter.

        Raises:
            QueueFull: the limits are reached by requests that are as important; nothing has
            changed.
        """
        limits = self._limits
        prompt = len(req.prompt)
        most_tokens = math.inf if limits.max_queued_tokens is None else limits.max_queued_tokens
        requests = len(self._queued) + 1 - limits.max_queued_requests
        waiting = self.queued_tokens
        victims: list[Seq] = []
        # A prompt longer than the token limit may wait alone, or it would be refused for ever.
        while requests > len(victims) or (waiting and waiting + prompt > most_tokens):
            victim = self._pop_least(limits.priority.base_of(req))
            # Too few victims: none of them leaves, because the new request is refused anyway.
            if victim is None:
                for seq in victims:
                    self._push_candidate(seq)
                self.turned_away["refused"] += 1
                raise self._queue_full_error(requests, prompt, now, prefill_rate)
            victims.append(victim)
            waiting -= self._queued[victim.handle][1]
        self.turned_away["evicted"] += len(victims)
        return victims

    def pop_overdue(self, now: float) -> list[Seq]:
        """Requests that have waited too long without having started, each once."""
        overdue: dict[int, Seq] = {}
        while self._due and self._due[0][0] <= now:
            # The entry of a request that left, or has run meanwhile, says nothing.
            seq, _ = self._queued.get(_pop_handle(self._due), (None, 0))
            if seq is not None and not seq.has_started:
                overdue[seq.handle] = seq
        self.turned_away["timeout"] += len(overdue)
        return list(overdue.values())

    def next_due(self) -> float | None:
        return self._due[0][0] if self._due else None

    def retry_after(
        self, now: float, prefill_rate: float, requests: int = 1, tokens: int = 0
    ) -> int:
        """Seconds until so many requests and prompt tokens are expected to have left the queue.

        Before the queue has moved, tokens at `prefill_rate` stand for the rate.
        """
        request_rate, token_rate = self._rate.per_second(now)
        mean = self.queued_tokens / len(self._queued) if self._queued else 0.0
        wait = requests / request_rate if request_rate else requests * mean / prefill_rate
        # Room for the request alone does not help a long prompt: its tokens must have left, too.
        if tokens > 0:
            wait = max(wait, tokens / (token_rate or prefill_rate))
        return math.ceil(min(max(wait, MIN_RETRY_SECS), MAX_RETRY_SECS))

    def _pop_least(self, above: int) -> Seq | None:
        """The first to be turned away, if it is less important than `above`."""
        while self._eviction_heap and self._eviction_heap[0][0] < above:
            # A request that ran since it was pushed is not turned away: its work is paid.
            seq, _ = self._queued.get(_pop_handle(self._eviction_heap), (None, 0))
            if seq is not None and not seq.has_started:
                return seq
        return None

    def _queue_full_error(
        self, requests: int, prompt: int, now: float, prefill_rate: float
    ) -> QueueFull:
        limits = self._limits
        queued_tokens = self.queued_tokens
        if requests > 0:
            retry = self.retry_after(now, prefill_rate, requests)
            cause = f"{len(self._queued)} requests are waiting"
            cause += f", the limit is {limits.max_queued_requests}"
            flag = "--max-queued-requests"
        else:
            assert limits.max_queued_tokens is not None
            retry = self.retry_after(
                now,
                prefill_rate,
                1,
                min(queued_tokens, queued_tokens + prompt - limits.max_queued_tokens),
            )
            cause = f"{queued_tokens} prompt tokens are waiting and this request brings {prompt}"
            cause += f", the limit is {limits.max_queued_tokens}"
            flag = "--max-queued-tokens"
        return QueueFull(f"{cause}; retry after {retry} s or raise {flag}", retry_after_secs=retry)

    def _push_candidate(self, seq: Seq) -> None:
        entry = (self._limits.priority.base(seq), -seq.req.arrival, -seq.handle, seq.handle)
        heapq.heappush(self._eviction_heap, entry)

    def _drop_dead_entries(self, heap: list[Entry]) -> None:
        """Drop entries of requests that have left.

        A sweep waits until they are the larger part, because it then costs O(1) per entry.
        """
        if len(heap) > 1024 + 2 * len(self._queued):
            heap[:] = [entry for entry in heap if entry[-1] in self._queued]
            heapq.heapify(heap)
