"""--schedule-policy adaptive: which of five orders would serve the queue best? Replay it through
each, and see.

1. Every `--adaptive-window-secs` the queue is written down as a `QueueSnapshot`: plain numbers, fit
   for a log line.
2. `forecast_in_parts` serves it on paper, one request after the other, in each order: with the
   measured prefill rate, and with a prefix cache of the pool's size, so that orders that keep equal
   prefixes together get credit for it.
3. `decide` compares mean TTFT + `--adaptive-tail-weight` * p99. An order that is more than 10 %
   better twice in a row takes over; so there is at most one switch in two windows, and none for
   noise.

Forecasts and `decide` change nothing: `replay_line` repeats a decision from its line in the
log. Not modeled: arrivals to come, decode steps between the prompts, prompts in progress. Only the
ratio of forecasts is used.

Cost: MAX_REQUESTS and MAX_BLOCKS bound a review to some 25 ms, once per window. It is done in parts
(`*_in_parts` yield the units of work done, some 0.4 us each), WORK_PER_PLAN or 1 % of the time at a
plan: a long queue's review takes up to 180 plans where steps are short.
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
from baton.sched.policies.srpt_aging import SrptAging, overload_share
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


def run_all(parts: Parts[T]) -> T:
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
        scanned = oldest + waiting[first : first + SCANNED_PER_PART]
        oldest = heapq.nsmallest(
            MAX_REQUESTS, scanned, key=lambda seq: (seq.req.arrival, seq.handle)
        )
        yield len(scanned)
    total = sum(len(seq.tokens) for seq in oldest)
    block = MIN_BLOCK_TOKENS
    while block * MAX_BLOCKS < total:
        block *= 2
    weight = params.short_first_output_weight
    if weight is None:
        weight = view.answer_share
    numbers: dict[tuple[int, bytes], int] = {}
    requests = []
    for seq in oldest:
        if seq.state not in (SeqState.WAITING, SeqState.OPENING):
            continue
        width = block * seq.tokens.itemsize
        parent = numbers.setdefault((-1, seq.req.namespace), len(numbers))
        blocks = []
        end = (len(seq.tokens) - 1) // block * width
        for start in range(0, end, width):
            parent = numbers.setdefault((parent, seq.key[start : start + width]), len(numbers))
            blocks.append(parent)
        answer_limit = min(seq.max_new_tokens - seq.generated, view.clip_max_new_tokens)
        requests.append(
            WaitingRequest(
                wait=round(view.now - seq.req.arrival, 6),
                tokens=seq.total_len,
                answer=round(weight * answer_limit, 3),
                waited_tokens=view.computed_tokens - seq.tokens_computed_at_arrival,
                blocks=tuple(blocks),
                cached=min(cached_tokens(seq) // block, len(blocks)),
            )
        )
        yield WORK_PER_REQUEST + len(blocks)
    share = overload_share(params, view)
    return QueueSnapshot(
        rate=round(view.prefill_rate, 3),
        block_tokens=block,
        cache_blocks=max(view.pool_tokens // block, 1),
        lpm_aging=params.lpm_aging_tokens_per_s,
        short_first_aging=params.short_first_aging_tokens_per_s,
        srpt_aging=round(
            params.srpt_aging * view.prefill_rate * (1.0 if share is None else share), 3
        ),
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
            self._cache_blocks(request.blocks[: request.cached])
        self._match_again(self.left)

    def count_tokens(self, index: int) -> int:
        """Tokens to compute for a request."""
        cached_tokens = self.matched[index] * self.snapshot.block_tokens
        return max(self.requests[index].tokens - cached_tokens, 1)

    def serve(self, index: int) -> float:
        """Compute a request; returns how long it takes [s]."""
        tokens = self.count_tokens(index)
        self.computed += tokens
        self.left.remove(index)
        if self._cache_blocks(self.requests[index].blocks):
            self._match_again(self.left)
        return tokens / self.snapshot.rate

    def _cache_blocks(self, blocks: Sequence[int]) -> bool:
        """Put blocks into the cache, the last one to be evicted first.

        Returns whether the cache has changed.
        """
        cache = self._cache
        has_changed = False
        for block in reversed(blocks):
            has_changed = has_changed or block not in cache
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > self.snapshot.cache_blocks:
            cache.popitem(last=False)
        return has_changed

    def _match_again(self, requests: Sequence[int]) -> None:
        """Count the leading blocks of these requests that the cache holds now."""
        cache = self._cache
        for index in requests:
            blocks = self.requests[index].blocks
            count = self.matched[index]
            while count and blocks[count - 1] not in cache:
                count -= 1
            while count < len(blocks) and blocks[count] in cache:
                count += 1
            self.matched[index] = count


def _fcfs_key(_replay: _Replay, index: int) -> float:
    return index


def _lpm_key(replay: _Replay, index: int) -> float:
    cached_tokens = replay.matched[index] * replay.snapshot.block_tokens
    return -(cached_tokens + replay.snapshot.lpm_aging * replay.requests[index].wait)


def _short_first_key(replay: _Replay, index: int) -> float:
    request = replay.requests[index]
    gained = replay.snapshot.short_first_aging * request.wait
    return replay.count_tokens(index) + request.answer - gained


def _hrrn_key(replay: _Replay, index: int) -> float:
    waited_tokens = replay.requests[index].waited_tokens + replay.computed
    return -waited_tokens / replay.count_tokens(index)


def _srpt_aging_key(replay: _Replay, index: int) -> float:
    gained = replay.snapshot.srpt_aging * replay.requests[index].wait
    return replay.count_tokens(index) - gained


@dataclass(frozen=True, slots=True)
class _ReplayedOrder:
    """An order that `adaptive` may choose."""

    policy: type[Policy]
    key: Callable[[_Replay, int], float]
    """The policy's number for request `index` of a replay, smallest first."""


CANDIDATES: dict[str, _ReplayedOrder] = {
    order.policy.name: order
    for order in (
        _ReplayedOrder(FcfsPolicy, _fcfs_key),
        _ReplayedOrder(LpmPolicy, _lpm_key),
        _ReplayedOrder(ShortFirst, _short_first_key),
        _ReplayedOrder(HrrnPolicy, _hrrn_key),
        _ReplayedOrder(SrptAging, _srpt_aging_key),
    )
}
"""Orders that `adaptive` chooses from. Of equal forecasts the first wins."""


def forecast_in_parts(snapshot: QueueSnapshot, order: str) -> Parts[OrderForecast]:
    """Mean and p99 of the time to first token, counted from arrival, if the queue is served in this
    order.
    """
    key = CANDIDATES[order].key
    replay = _Replay(snapshot)
    now = 0.0
    ttfts: list[float] = []
    while replay.left:
        chosen = min(replay.left, key=lambda index: (key(replay, index), index))
        now += replay.serve(chosen)
        ttfts.append(snapshot.requests[chosen].wait + now)
        yield 2 * len(replay.left)  # compared, and matched with the cache
    ttfts.sort()
    p99_rank = min(math.ceil(0.99 * len(ttfts)), len(ttfts))
    return OrderForecast(mean=sum(ttfts) / len(ttfts), p99=ttfts[p99_rank - 1])


def forecasts_in_parts(snapshot: QueueSnapshot) -> Parts[dict[str, OrderForecast]]:
    forecasts: dict[str, OrderForecast] = {}
    for order in CANDIDATES:
        forecasts[order] = yield from forecast_in_parts(snapshot, order)
    return forecasts


def decide(
    choice: OrderChoice, forecasts: dict[str, OrderForecast], tail_weight: float
) -> OrderChoice:
    cost = {
        order: forecast.mean + tail_weight * forecast.p99 for order, forecast in forecasts.items()
    }
    best = min(cost, key=lambda order: cost[order])  # the first of equals
    if cost[best] >= MARGIN * cost[choice.active]:
        return OrderChoice(choice.active)
    if choice.rival == best:
        return OrderChoice(best)
    return OrderChoice(choice.active, rival=best)


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
    forecasts = run_all(forecasts_in_parts(snapshot))
    today = decide(OrderChoice(**values["before"]), forecasts, values["tail_weight"])
    return OrderChoice(**values["after"]), today, forecasts


class AdaptivePolicy(Policy):
    """Uses fcfs, lpm, short-first, hrrn or srpt-aging: the one that a replay of the queue favors."""

    name = "adaptive"
    wants_queue_review = True

    def __init__(self, params: PolicyParams) -> None:
        super().__init__(params)
        self.choice = OrderChoice(FcfsPolicy.name)
        self._orders = {name: order.policy(params) for name, order in CANDIDATES.items()}
        self._next_review: float | None = None
        self._review: Parts[OrderReviewed | None] | None = None
        """The review in progress."""
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
        name, key_of_order = cache_key
        return self._orders[name].sort_keys(queue, view, key_of_order)

    def review(self, queue: Collection[Seq], view: PolicyContext) -> OrderReviewed | None:
        """Review the orders once per window, over as many plans as the work takes."""
        work_limit = max(WORK_PER_PLAN, WORK_PER_SEC * (view.now - self._last_plan))
        self._last_plan = view.now
        if self._next_review is None:
            self._next_review = view.now + self.params.adaptive_window_secs
        if self._review is None:
            if view.now < self._next_review:
                return None
            self._next_review = view.now + self.params.adaptive_window_secs
            self._review = self._review_in_parts(queue, view)
        work_done = 0
        try:
            while work_done < work_limit:
                work_done += next(self._review)
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
            # Nothing to compare: a rival of the last review is not better twice in a row.
            self.choice = OrderChoice(self.choice.active)
            return None
        forecasts = yield from forecasts_in_parts(snapshot)
        before = self.choice
        tail_weight = self.params.adaptive_tail_weight
        self.choice = decide(before, forecasts, tail_weight)
        line = functools.partial(as_line, before, tail_weight, snapshot, self.choice)
        return OrderReviewed(before.active, self.choice.active, line)
