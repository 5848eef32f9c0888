"""Order of the waiting queue: a policy turns every waiting sequence into a number, smallest first.

Priority, when enabled, comes before the policy's number; ties end with (arrival, handle), so every order is total and
the same inputs give the same order. Retracted sequences keep their arrival, hence their place.

| policy | smallest first | good for | who suffers |
|---|---|---|---|
| fcfs | arrival | fairness | short requests behind long ones |
| lpm | - cached tokens | hit rate of a single engine | cold prompts, unless `lpm_aging` |
| dfs-weight | place in a walk of the radix tree, heaviest first | sharing among queued requests | cold prompts |
| lof | - max_new_tokens | keeping a decode batch full at the end of a job | prefill nodes: everybody |
| random | a hash of (step, request) | comparison | p99 |
| short-first | estimated tokens - ageing | mean TTFT with bimodal lengths | long requests, bounded by ageing |
| srpt-aging | tokens left to prefill - ageing, per chunk | mean TTFT of prefill nodes | long prompts, bounded |
| edf | first-token deadline, hopeless ones last | most requests inside their deadline | requests without a deadline |
| hrrn | - (waited work / own work) | a compromise without a parameter | nobody much, nobody gains much |

Sources: SGLang 0.5.7's semantics for fcfs, lpm, dfs-weight, lof and random, without its 128-request cliff; Schrage's
SRPT with ageing 0.05 as it did best on recorded traces (docs/simulate.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.sched.dfs_weight import dfs_weight_keys
from baton.sched.mix import uniform
from baton.sched.seq import Seq


class PrefixIndex(Protocol):
    """The part of the radix cache that an order may look at: it must not change what is evicted next."""

    def peek(self, tokens: bytes, namespace: bytes, max_tokens: int) -> int:
        """Tokens of the longest cached prefix of `tokens` (little-endian int32)."""
        ...

    def peek_path(self, tokens: bytes, namespace: bytes, max_tokens: int) -> Sequence[int]:
        """Serial numbers of the tree nodes along that prefix, from the root on; the last may be matched in part."""
        ...


@dataclass(frozen=True, slots=True)
class View:
    """What a policy may know beside the sequence."""

    now: float
    step: int
    index: PrefixIndex
    prefill_rate: float
    """Prompt tokens the engine computes per second, measured."""
    computed_tokens: int
    """Prompt tokens the engine has computed since it started."""
    estimate: Callable[[int], int]
    """Tokens a request with so many allowed tokens is expected to generate."""


@dataclass(frozen=True, slots=True)
class PolicyParams:
    """Knobs of all policies (names and defaults: baton.config)."""

    lpm_degrade_threshold: int = 4096
    lpm_aging_tokens_per_s: float = 0.0
    short_first_aging_tokens_per_s: float = 500.0
    srpt_aging: float = 0.05
    default_deadline_secs: float = 60.0
    demote_hopeless: bool = True


Keys = Callable[[Sequence[Seq], View], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    keys: Keys
    is_static: bool = False
    """A sequence's number never changes while it waits, so the queue can be kept sorted."""
    redecides_chunks: bool = False
    """Prompts in progress compete with waiting ones at every chunk boundary, instead of going first."""


def cached_tokens(seq: Seq, index: PrefixIndex) -> int:
    """Prompt tokens of a sequence that need no computing."""
    if seq.pages:
        return seq.computed
    return index.peek(seq.tokens.tobytes(), seq.req.namespace, len(seq.tokens) - 1)


def _work(seq: Seq, view: View) -> int:
    """Tokens to compute before the next one can be sampled."""
    return seq.total_len - cached_tokens(seq, view.index)


def _fcfs(queue: Sequence[Seq], _view: View) -> Sequence[float]:
    return [seq.req.arrival for seq in queue]


def _lof(queue: Sequence[Seq], _view: View) -> Sequence[float]:
    # The client's limit: a prefill node itself produces one token for everybody.
    return [-seq.req.params.max_new_tokens for seq in queue]


def _random(queue: Sequence[Seq], view: View) -> Sequence[float]:
    return [uniform(view.step, seq.handle) for seq in queue]


def _dfs_weight(queue: Sequence[Seq], view: View) -> Sequence[float]:
    paths = [view.index.peek_path(s.tokens.tobytes(), s.req.namespace, len(s.tokens) - 1) for s in queue]
    return dfs_weight_keys(paths)


def _hrrn(queue: Sequence[Seq], view: View) -> Sequence[float]:
    return [-(view.computed_tokens - seq.born_tokens) / max(_work(seq, view), 1) for seq in queue]


def _lpm(params: PolicyParams) -> Keys:
    """Above the threshold first come first served, until the queue has shrunk to 3/4 of it (no flapping)."""
    degraded = False

    def keys(queue: Sequence[Seq], view: View) -> Sequence[float]:
        nonlocal degraded
        limit = params.lpm_degrade_threshold
        if limit:
            degraded = len(queue) > (limit * 0.75 if degraded else limit)
        if degraded:
            return _fcfs(queue, view)
        aging = params.lpm_aging_tokens_per_s
        # cached + aging * (now - arrival), less the term that is equal for all: the order needs no clock.
        return [aging * seq.req.arrival - cached_tokens(seq, view.index) for seq in queue]

    return keys


def _short_first(params: PolicyParams) -> Keys:
    def keys(queue: Sequence[Seq], view: View) -> Sequence[float]:
        aging = params.short_first_aging_tokens_per_s
        return [
            _work(seq, view) + view.estimate(seq.max_new_tokens - seq.generated) + aging * seq.req.arrival
            for seq in queue
        ]

    return keys


def _srpt_aging(params: PolicyParams) -> Keys:
    def keys(queue: Sequence[Seq], view: View) -> Sequence[float]:
        aging = params.srpt_aging * view.prefill_rate
        return [_work(seq, view) + aging * seq.req.arrival for seq in queue]

    return keys


def _edf(params: PolicyParams) -> Keys:
    """Earliest first-token deadline first; requests that cannot make theirs any more sort behind all that can.

    Without the demotion an overloaded engine works on lost causes only (they are always the most urgent).
    """

    def keys(queue: Sequence[Seq], view: View) -> Sequence[float]:
        found = []
        for seq in queue:
            deadline = seq.req.ttft_deadline
            key = seq.req.arrival + params.default_deadline_secs if deadline is None else deadline
            if params.demote_hopeless and view.now + _work(seq, view) / view.prefill_rate > key:
                key += HOPELESS
            found.append(key)
        return found

    return keys


HOPELESS = 1e9
"""Added to the deadline of a request that cannot meet it [s]: larger than any deadline."""

POLICIES: dict[str, Callable[[PolicyParams], Policy]] = {
    "fcfs": lambda _: Policy("fcfs", _fcfs, is_static=True),
    "lpm": lambda params: Policy("lpm", _lpm(params)),
    "dfs-weight": lambda _: Policy("dfs-weight", _dfs_weight),
    "lof": lambda _: Policy("lof", _lof, is_static=True),
    "random": lambda _: Policy("random", _random),
    "short-first": lambda params: Policy("short-first", _short_first(params)),
    "srpt-aging": lambda params: Policy("srpt-aging", _srpt_aging(params), redecides_chunks=True),
    "edf": lambda params: Policy("edf", _edf(params), redecides_chunks=True),
    "hrrn": lambda _: Policy("hrrn", _hrrn),
}


LOWEST_PRIORITY = -(2**31)


@dataclass(frozen=True, slots=True)
class PriorityRule:
    """How a request's priority enters the order. `sign` is applied once: after it, larger is better in both directions.

    With ageing a request gains `aging_rate` units per second of waiting. P + R * (now - t0) orders like the constant
    P - R * t0, so keys never change while a request waits. Preemption compares the unaged priority.
    """

    enabled: bool = False
    low_values_first: bool = False
    aging_rate: float = 0.0
    preemption_threshold: int = 10

    def base(self, seq: Seq) -> int:
        """Priority with larger meaning better; a request without one ranks below every given value."""
        if seq.req.priority is None:
            return LOWEST_PRIORITY
        return -seq.req.priority if self.low_values_first else seq.req.priority

    def key(self, seq: Seq) -> float:
        return -(self.base(seq) - self.aging_rate * seq.req.arrival) if self.enabled else 0.0


Rank = tuple[float, float, float, int]


def ranks(queue: Sequence[Seq], policy: Policy, priority: PriorityRule, view: View) -> list[Rank]:
    """The whole sort key of every sequence: (priority, policy, arrival, handle), all different."""
    keys = policy.keys(queue, view)
    return [(priority.key(seq), key, seq.req.arrival, seq.handle) for seq, key in zip(queue, keys, strict=True)]


def ordered(queue: Sequence[Seq], policy: Policy, priority: PriorityRule, view: View) -> list[Seq]:
    """The queue in the order in which the planner should look at it."""
    entries = sorted(zip(ranks(queue, policy, priority, view), queue, strict=True), key=lambda entry: entry[0])
    return [seq for _, seq in entries]
