"""--schedule-policy adaptive: which of five orders would serve the queue best? Replay it through each, and see.

1. Every `--adaptive-window-secs` the queue is written down as a `QueueSnapshot`: plain numbers, fit for a log line.
2. `forecast_in_parts` serves it on paper, one request after the other, in each order: with the measured prefill rate,
   and with a prefix cache of the pool's size, so that orders that keep equal prefixes together get credit for it.
3. `decide` compares mean TTFT + `--adaptive-tail-weight` * p99. An order that is more than 10 % better twice in a row
   takes over; so there is at most one switch in two windows, and none for noise.

A forecast and `decide` are pure functions: `replay_line` repeats a decision from its line in the log. Not modeled:
arrivals to come, decode steps between the prompts, prompts under way. Only the ratio of forecasts is used.

Cost: MAX_REQUESTS and MAX_BLOCKS bound a review to some 25 ms, once per window. It is done in parts (`*_in_parts` yield
the units of work done, some 0.4 us each), WORK_PER_PLAN or 1 % of the time at a plan: a long queue's review takes up to
180 plans where steps are short.
"""

from __future__ import annotations

import functools
import heapq
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from baton.sched.policies.base import Policy, PolicyContext, PolicyParams, cached_tokens
from baton.sched.policies.fcfs import FcfsPolicy
from baton.sched.policies.hrrn import HrrnPolicy
from baton.sched.policies.lpm import LpmPolicy
from baton.sched.policies.short_first import ShortFirst
from baton.sched.policies.srpt_aging import SrptAging
from baton.sched.types.events import OrderReviewed
from baton.sched.types.sequence import Seq, SeqState

T = TypeVar("T")
Parts = Generator[int, None, T]
"""A computation in parts: yields units of work, returns its result."""

MARGIN = 0.9
"""A rival's forecast must be below this share of the active order's."""
MAX_REQUESTS = 128
"""The oldest so many are replayed."""
MAX_BLOCKS = 4096
"""Prefixes are compared in blocks so long that all prompts together have about so many."""
MIN_BLOCK_TOKENS = 16
WORK_PER_PLAN = 512
"""Units of work of a review at one plan, at least: some 0.2 ms."""
WORK_PER_SEC = 25_000
"""Units per second since the last plan: 1 % of the time of long steps."""
SCANNED_PER_PART = 512
WORK_PER_REQUEST = 8
"""Units for one request of a snapshot, besides one for each of its blocks."""


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """Request of a snapshot; times in seconds, lengths in tokens."""

    wait: float
    tokens: int
    answer: float
    """Tokens short-first adds for the answer."""
    waited_tokens: int
    """Tokens the engine has computed for others since this one arrived."""
    blocks: tuple[int, ...]
    """Numbers of its blocks: equal numbers stand for equal prefixes up to and with that block."""
    cached: int
    """How many of them the cache holds."""


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    rate: float
    """Prompt tokens per second."""
    block_tokens: int
    cache_blocks: int
    lpm_aging: float
    short_first_aging: float
    requests: tuple[WaitingRequest, ...]
    """In order of arrival."""
    srpt_aging: float = 0.0
    """Tokens per second."""


@dataclass(frozen=True, slots=True)
class OrderForecast:
    """Time to first token [s]."""

    mean: float
    p99: float


@dataclass(frozen=True, slots=True)
class OrderChoice:
    active: str
    rival: str | None = None
    """Was better by the margin the last time."""


def finish(parts: Parts[T]) -> T:
    """The result, all parts at once."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: T = end.value
            return result


def snapshot_in_parts(
    queue: Collection[Seq],
    view: PolicyContext,
    params: PolicyParams,
    cached_tokens: Callable[[Seq], int],
) -> Parts[QueueSnapshot]:
    """The queue as it is now, less the requests that cease to wait before their part comes."""
    waiting = list(queue)
    oldest: list[Seq] = []
    for first in range(0, len(waiting), SCANNED_PER_PART):
        some = oldest + waiting[first : first + SCANNED_PER_PART]
        oldest = heapq.nsmallest(MAX_REQUESTS, some, key=lambda seq: (seq.req.arrival, seq.handle))
        yield len(some)
    total = sum(len(seq.tokens) for seq in oldest)
    block = MIN_BLOCK_TOKENS
    while block * MAX_BLOCKS < total:
        block *= 2
    weight = (
        view.answer_share
        if params.short_first_output_weight is None
        else params.short_first_output_weight
    )
    numbers: dict[tuple[int, bytes], int] = {}
    requests = []
    for seq in oldest:
        if seq.state not in (SeqState.WAITING, SeqState.OPENING):
            continue
        width = block * seq.tokens.itemsize
        parent = numbers.setdefault((-1, seq.req.namespace), len(numbers))
        blocks = []
        for at in range(0, (len(seq.tokens) - 1) // block * width, width):
            parent = numbers.setdefault((parent, seq.key[at : at + width]), len(numbers))
            blocks.append(parent)
        requests.append(
            WaitingRequest(
                wait=round(view.now - seq.req.arrival, 6),
                tokens=seq.total_len,
                answer=round(
                    weight * min(seq.max_new_tokens - seq.generated, view.clip_max_new_tokens), 3
                ),
                waited_tokens=view.computed_tokens - seq.tokens_computed_at_arrival,
                blocks=tuple(blocks),
                cached=min(cached_tokens(seq) // block, len(blocks)),
            )
        )
        yield WORK_PER_REQUEST + len(blocks)
    backlog_secs, most = view.queued_tokens / view.prefill_rate, params.srpt_aging_backlog_secs
    share = most / backlog_secs if 0 < most < backlog_secs else 1.0
    return QueueSnapshot(
        rate=round(view.prefill_rate, 3),
        block_tokens=block,
        cache_blocks=max(view.pool_tokens // block, 1),
        lpm_aging=params.lpm_aging_tokens_per_s,
        short_first_aging=params.short_first_aging_tokens_per_s,
        srpt_aging=round(params.srpt_aging * view.prefill_rate * share, 3),
        requests=tuple(requests),
    )


class _Replay:
    """A queue being served on paper: who still waits, how much of each is cached."""

    def __init__(self, snapshot: QueueSnapshot) -> None:
        self.snapshot = snapshot
        self.requests = snapshot.requests
        self.computed = 0
        self.matched = [0] * len(snapshot.requests)
        """Leading blocks in the cache, per request."""
        self.left = list(range(len(snapshot.requests)))
        self._cache: OrderedDict[int, None] = OrderedDict()
        for request in snapshot.requests:
            self._use(request.blocks[: request.cached])
        self._rematch(self.left)

    def work(self, i: int) -> int:
        """Tokens to compute for request i."""
        return max(self.requests[i].tokens - self.matched[i] * self.snapshot.block_tokens, 1)

    def serve(self, i: int) -> float:
        """Compute request i; returns how long it takes [s]."""
        tokens = self.work(i)
        self.computed += tokens
        self.left.remove(i)
        if self._use(self.requests[i].blocks):
            self._rematch(self.left)
        return tokens / self.snapshot.rate

    def _use(self, blocks: Sequence[int]) -> bool:
        """Blocks are in the cache from now on, the last one the first to go again. Has the cache changed?"""
        cache = self._cache
        changed = False
        for block in reversed(blocks):
            changed = changed or block not in cache
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > self.snapshot.cache_blocks:
            cache.popitem(last=False)
        return changed

    def _rematch(self, requests: Sequence[int]) -> None:
        cache = self._cache
        for i in requests:
            blocks, n = self.requests[i].blocks, self.matched[i]
            while n and blocks[n - 1] not in cache:
                n -= 1
            while n < len(blocks) and blocks[n] in cache:
                n += 1
            self.matched[i] = n


Key = Callable[[_Replay, int], float]


CANDIDATES: dict[str, Key] = {
    "fcfs": lambda _, i: i,
    "lpm": lambda at, i: (
        -(at.matched[i] * at.snapshot.block_tokens + at.snapshot.lpm_aging * at.requests[i].wait)
    ),
    "short-first": lambda at, i: (
        at.work(i) + at.requests[i].answer - at.snapshot.short_first_aging * at.requests[i].wait
    ),
    "hrrn": lambda at, i: -(at.requests[i].waited_tokens + at.computed) / at.work(i),
    "srpt-aging": lambda at, i: at.work(i) - at.snapshot.srpt_aging * at.requests[i].wait,
}
"""The orders as they look on paper, smallest first. Of equal forecasts the first wins."""


def forecast_in_parts(snapshot: QueueSnapshot, order: str) -> Parts[OrderForecast]:
    """Mean and p99 of the time to first token, counted from arrival, if the queue is served in this order."""
    key, at = CANDIDATES[order], _Replay(snapshot)
    now = 0.0
    ttfts = []
    while at.left:
        chosen = min(at.left, key=lambda i: (key(at, i), i))
        now += at.serve(chosen)
        ttfts.append(snapshot.requests[chosen].wait + now)
        yield 2 * len(at.left)  # compared, and matched with the cache
    ttfts.sort()
    return OrderForecast(
        sum(ttfts) / len(ttfts), ttfts[min(math.ceil(0.99 * len(ttfts)), len(ttfts)) - 1]
    )


def forecasts_in_parts(snapshot: QueueSnapshot) -> Parts[dict[str, OrderForecast]]:
    found = {}
    for order in CANDIDATES:
        found[order] = yield from forecast_in_parts(snapshot, order)
    return found


def decide(
    choice: OrderChoice, expected: dict[str, OrderForecast], tail_weight: float
) -> OrderChoice:
    cost = {order: f.mean + tail_weight * f.p99 for order, f in expected.items()}
    best = min(cost, key=lambda order: cost[order])  # the first of equals
    if cost[best] >= MARGIN * cost[choice.active]:
        return OrderChoice(choice.active)
    return OrderChoice(best) if choice.rival == best else OrderChoice(choice.active, rival=best)


def as_line(
    before: OrderChoice, tail_weight: float, snapshot: QueueSnapshot, after: OrderChoice
) -> str:
    """Everything that a decision depended on, and its outcome: JSON on one line."""
    values = {
        "before": asdict(before),
        "tail_weight": tail_weight,
        "after": asdict(after),
        "queue": asdict(snapshot),
    }
    return json.dumps(values, separators=(",", ":"))


def replay_line(line: str) -> tuple[OrderChoice, OrderChoice, dict[str, OrderForecast]]:
    """The decision of a line, what the code decides today, and why."""
    values = json.loads(line)
    queue = values["queue"]
    requests = tuple(
        WaitingRequest(**(r | {"blocks": tuple(r["blocks"])})) for r in queue["requests"]
    )
    snapshot = QueueSnapshot(**(queue | {"requests": requests}))
    expected = finish(forecasts_in_parts(snapshot))
    today = decide(OrderChoice(**values["before"]), expected, values["tail_weight"])
    return OrderChoice(**values["after"]), today, expected


class AdaptivePolicy(Policy):
    """Uses fcfs, lpm, short-first, hrrn or srpt-aging: the one that a replay of the queue favors."""

    name = "adaptive"
    wants_queue_review = True

    def __init__(self, params: PolicyParams) -> None:
        super().__init__(params)
        self.choice = OrderChoice(FcfsPolicy.name)
        candidates: tuple[type[Policy], ...] = (
            FcfsPolicy,
            LpmPolicy,
            ShortFirst,
            HrrnPolicy,
            SrptAging,
        )
        self._orders = {policy.name: policy(params) for policy in candidates}
        self._next_review: float | None = None
        self._review: Parts[OrderReviewed | None] | None = None
        """The one under way."""
        self._last_plan = 0.0

    @property
    def order(self) -> Policy:
        return self._orders[self.choice.active]

    @property
    def active(self) -> str:
        return self.order.active

    @property
    def degraded_total(self) -> int:
        return self._orders[LpmPolicy.name].degraded_total

    @property
    def reorders_partial_prefills(self) -> bool:
        return self.order.reorders_partial_prefills

    @property
    def chosen(self) -> dict[str, bool]:
        return {name: name == self.choice.active for name in self._orders}

    def cache_key(self, count: int, view: PolicyContext) -> Hashable:
        return self.choice.active, self.order.cache_key(count, view)

    def sort_keys(
        self, queue: Sequence[Seq], view: PolicyContext, cache_key: Any
    ) -> Sequence[float]:
        name, of_order = cache_key
        return self._orders[name].sort_keys(queue, view, of_order)

    def review(self, queue: Collection[Seq], view: PolicyContext) -> OrderReviewed | None:
        """Review the orders once per window, over as many plans as the work takes."""
        most = max(WORK_PER_PLAN, WORK_PER_SEC * (view.now - self._last_plan))
        self._last_plan = view.now
        if self._next_review is None:
            self._next_review = view.now + self.params.adaptive_window_secs
        if self._review is None:
            if view.now < self._next_review:
                return None
            self._next_review = view.now + self.params.adaptive_window_secs
            self._review = self._review_in_parts(queue, view)
        done = 0
        try:
            while done < most:
                done += next(self._review)
        except StopIteration as end:
            self._review = None
            reviewed: OrderReviewed | None = end.value
            return reviewed
        return None

    def _review_in_parts(
        self, queue: Collection[Seq], view: PolicyContext
    ) -> Parts[OrderReviewed | None]:
        snapshot = yield from snapshot_in_parts(
            queue, view, self.params, lambda seq: cached_tokens(seq, view.index)
        )
        if len(snapshot.requests) < 2:
            self.choice = OrderChoice(
                self.choice.active
            )  # nothing to compare: not a second time in a row
            return None
        expected = yield from forecasts_in_parts(snapshot)
        before, tail = self.choice, self.params.adaptive_tail_weight
        self.choice = decide(before, expected, tail)
        line = functools.partial(as_line, before, tail, snapshot, self.choice)
        return OrderReviewed(before.active, self.choice.active, line)
