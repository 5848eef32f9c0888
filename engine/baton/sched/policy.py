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
| adaptive | as fcfs, lpm, short-first, hrrn or srpt-aging, by a replay of the queue | changing traffic | as those |

A policy also says what its numbers depend on beside the sequences (`inputs`): while that is equal, nobody computes or
sorts anything again, and when it has changed, a long queue is sorted anew over several steps (queue.py).

Sources: SGLang 0.5.7's semantics for fcfs, lpm, dfs-weight, lof and random, without its 128-request cliff; Schrage's
SRPT with ageing 0.05 as it did best on recorded traces (docs/scheduling/orders.md).
"""

from __future__ import annotations

import abc
import functools
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from baton.cache.radix import Node, Probe, ProbeWatch
from baton.request import Validated
from baton.sched import adaptive
from baton.sched.dfs_weight import ROOT, Weights
from baton.sched.events import OrderReviewed
from baton.sched.mix import uniform
from baton.sched.seq import Seq

NEVER = itertools.repeat(math.inf)
"""Times at which the keys of any number of requests change: never."""


class PrefixIndex(Protocol):
    """The part of the radix cache that an order may look at: it must not change what is evicted next."""

    @property
    def version(self) -> int:
        """Changes whenever a probe's answer may change."""
        ...

    def probe(self, tokens: bytes, namespace: bytes, max_tokens: int, last: Probe | None) -> Probe:
        """The longest cached prefix of `tokens` (little-endian int32); `last` makes it cheap when it still holds."""
        ...

    def outdated(self, probes: Sequence[Probe | None]) -> Sequence[int]:
        """Places of the probes that have to be made again, or for the first time."""
        ...

    def watch(self) -> ProbeWatch:
        """Tells which probes have to be made again."""
        ...

    def path_of(self, probe: Probe) -> Sequence[int]:
        """Serial numbers of the tree nodes along a probe, from the root on; the last may be matched in part."""
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
    pool_tokens: int = 0
    """What the KV pool holds."""
    clip_new_tokens: int = 4096
    """An answer is never expected to be longer."""
    queued_tokens: int = 0
    """Prompt tokens of all waiting requests."""


@dataclass(frozen=True, slots=True)
class PolicyParams:
    """Knobs of all policies (names and defaults: baton.config)."""

    lpm_degrade_threshold: int = 4096
    lpm_aging_tokens_per_s: float = 0.0
    in_batch_check_threshold: int = -1
    """lpm: look for a leader in the queue if at most so many tokens are cached; -1: never."""
    in_batch_deprioritize_threshold: int = 32
    short_first_aging_tokens_per_s: float = 500.0
    short_first_output_weight: float | None = None
    """None: as large a share of the allowed tokens as the engine measures."""
    srpt_aging: float = 0.05
    srpt_aging_backlog_secs: float = 60.0
    default_deadline_secs: float = 60.0
    demote_hopeless: bool = True
    edf_demotion_secs: float = 300.0
    adaptive_window_secs: float = 15.0
    adaptive_tail_weight: float = 0.1


class Policy(abc.ABC):
    """`keys` is the order, the rest says when it changes. An instance belongs to one queue: it may have a memory."""

    name: ClassVar[str]
    reviews: ClassVar[bool] = False
    """Wants to look at the whole queue before every plan."""
    each_alone: bool = True
    """A sequence's number does not depend on who else waits."""

    def __init__(self, params: PolicyParams) -> None:
        self.params = params

    @property
    def redecides_chunks(self) -> bool:
        """Prompts in progress compete with waiting ones at every chunk boundary, instead of going first."""
        return False

    @property
    def active(self) -> str:
        """The order in force now: another one's name while a policy stands back for it."""
        return self.name

    @property
    def degraded_total(self) -> int:
        """How often lpm turned to fcfs because of the queue's length."""
        return 0

    @property
    def chosen(self) -> dict[str, bool]:
        """The orders among which a policy chooses, and which it has chosen."""
        return {}

    @property
    def reads_tree(self) -> bool:
        """A sequence's number also depends on its cached prefix (if `each_alone`: on nothing else in the tree)."""
        return False

    def review(self, queue: Collection[Seq], view: View) -> OrderReviewed | None:
        return None

    def inputs(self, count: int, view: View) -> Hashable:
        """Called before `keys` with the queue's length: while it and what `reads_tree` means are equal, so are keys."""
        return ()

    @abc.abstractmethod
    def keys(self, queue: Sequence[Seq], view: View, inputs: Any) -> Sequence[float]:
        """A number for each sequence, smallest first. `inputs`: a result of `inputs`, perhaps not the latest."""

    def keys_in_parts(
        self, queue: Sequence[Seq], part: int, view: Callable[[], View], inputs: Any
    ) -> Iterator[Iterable[tuple[Seq, float]]]:
        """`keys` of a long queue, for policies that are not `each_alone`: work on some `part` sequences at a time.

        Yields what is ready, often nothing; each sequence once in all. The queue and the tree may change meanwhile.
        """
        for seqs in batches(queue, part):
            all_cached_tokens(seqs, view().index)
            yield ()
        keys = self.keys(queue, view(), inputs)
        for first in range(0, len(queue), part):
            yield zip(queue[first : first + part], keys[first : first + part], strict=True)

    def expiries(self, queue: Sequence[Seq], view: View, inputs: Any) -> Iterable[float]:
        """When the numbers that `keys` has just given them are other ones, though nothing else changes."""
        return NEVER


class Held:
    """A measured number as orders use it: it follows the measurement in steps of 5 %, so that noise sorts nothing."""

    def __init__(self) -> None:
        self._value = 0.0

    def __call__(self, measured: float) -> float:
        if not abs(measured - self._value) <= 0.05 * abs(self._value):
            self._value = measured
        return self._value


def batches(seqs: Sequence[Seq], size: int) -> Iterator[Sequence[Seq]]:
    return (seqs[first : first + size] for first in range(0, len(seqs), size))


def cached_tokens(seq: Seq, index: PrefixIndex) -> int:
    """Prompt tokens of a sequence that need no computing."""
    if seq.pages:
        return seq.computed
    return _probed(seq, index).num_tokens


def _probed(seq: Seq, index: PrefixIndex) -> Probe:
    seq.probe = probe = index.probe(seq.key, seq.req.namespace, len(seq.tokens) - 1, seq.probe)
    return probe


def all_cached_tokens(queue: Sequence[Seq], index: PrefixIndex) -> list[int]:
    """`cached_tokens` of each. Asks again only where the tree has changed."""
    probes = [seq.probe for seq in queue]
    for i in index.outdated(probes):
        if not queue[i].pages:
            probes[i] = _probed(queue[i], index)
    return [
        seq.computed if seq.pages or probe is None else probe.num_tokens
        for seq, probe in zip(queue, probes, strict=True)
    ]


def all_work(queue: Sequence[Seq], view: View) -> list[int]:
    """`work` of each."""
    found = all_cached_tokens(queue, view.index)
    return [len(seq.tokens) + seq.inflight - cached for seq, cached in zip(queue, found, strict=True)]


def work(seq: Seq, view: View) -> int:
    """Tokens to compute before the next one can be sampled."""
    return seq.total_len - cached_tokens(seq, view.index)


class Fcfs(Policy):
    name = "fcfs"

    def keys(self, queue: Sequence[Seq], view: View, inputs: Any) -> Sequence[float]:
        return [seq.req.arrival for seq in queue]


class Lof(Policy):
    """By the client's limit: a prefill node itself produces one token for everybody."""

    name = "lof"

    def keys(self, queue: Sequence[Seq], view: View, inputs: Any) -> Sequence[float]:
        return [-seq.req.params.max_new_tokens for seq in queue]


class Random(Policy):
    name = "random"

    def inputs(self, count: int, view: View) -> int:
        return view.step

    def keys(self, queue: Sequence[Seq], view: View, inputs: Any) -> Sequence[float]:
        return [uniform(inputs, seq.handle) for seq in queue]


class Lpm(Policy):
    """Above the threshold first come first served, until the queue has shrunk to 3/4 of it (no flapping).

    With the in-batch thresholds set, a request with a cold prefix that an earlier waiting one begins with as well goes
    last, so that the earlier one can compute it for both (SGLang 0.5.7). Requests of one step share their pages here
    without that, hence it is off by default.
    """

    name = "lpm"

    def __init__(self, params: PolicyParams) -> None:
        super().__init__(params)
        self.each_alone = params.in_batch_check_threshold < 0
        self.is_degraded = False
        self._degraded_total = 0

    @property
    def degraded_total(self) -> int:
        return self._degraded_total

    @property
    def active(self) -> str:
        return Fcfs.name if self.is_degraded else self.name

    def inputs(self, count: int, view: View) -> Hashable:
        limit = self.params.lpm_degrade_threshold
        was_degraded = self.is_degraded
        self.is_degraded = bool(limit) and count > (limit * 0.75 if was_degraded else limit)
        self._degraded_total += self.is_degraded and not was_degraded
        return self.is_degraded

    @property
    def reads_tree(self) -> bool:
        return not self.is_degraded

    def keys(self, queue: Sequence[Seq], view: View, inputs: Any) -> Sequence[float]:
        if inputs:
            return [seq.req.arrival for seq in queue]
        aging = self.params.lpm_aging_tokens_per_s
        # cached + aging * (now - arrival), less the term that is equal for all: the order needs no clock.
        cached = all_cached_tokens(queue, view.index)
        found = [aging * seq.req.arrival - tokens for seq, tokens in zip(queue, cached, strict=True)]
        if self.params.in_batch_check_threshold >= 0:
            for at in self._followers(queue, view):
                found[at] = math.inf
        return found

    def _followers(self, queue: Sequence[Seq], view: View) -> Iterator[int]:
        """Places of those whose first tokens an earlier one, by arrival, has to compute anyway."""
        length = self.params.in_batch_deprioritize_threshold
        leaders: set[tuple[bytes, bytes]] = set()
        for at in sorted(range(len(queue)), key=lambda at: (queue[at].req.arrival, queue[at].handle)):
            seq = queue[at]
            if len(seq.tokens) < length or cached_tokens(seq, view.index) > self.params.in_batch_check_threshold:
                continue
            head = (seq.req.namespace, seq.key[: length * seq.tokens.itemsize])
            if head in leaders:
                yield at
            leaders.add(head)


class DfsWeight(Policy):
    name = "dfs-weight"
    each_alone = False

    @property
    def reads_tree(self) -> bool:
        return True

    def keys(self, queue: Sequence[Seq], view: View, inputs: Any) -> Sequence[float]:
        ends = _PrefixEnds()
        ends.add(queue, view.index)
        ends.walk(view.index)
        return [ends.place(seq) for seq in queue]

    def keys_in_parts(
        self, queue: Sequence[Seq], part: int, view: Callable[[], View], inputs: Any
    ) -> Iterator[Iterable[tuple[Seq, float]]]:
        ends = _PrefixEnds()
        for seqs in batches(queue, part):
            ends.add(seqs, view().index)
            yield ()
        ends.walk(view().index)
        yield ()
        for seqs in batches(queue, part):
            yield [(seq, ends.place(seq)) for seq in seqs]


class _PrefixEnds:
    """Where the cached prefixes of requests end in the tree, and the places of these nodes in the walk."""

    def __init__(self) -> None:
        self._probe_of: dict[int, Probe] = {}
        self._ending: dict[Node, tuple[Probe, int]] = {}
        """A probe that ended there, and how many did."""
        self._places: dict[Node, int] = {}

    def add(self, queue: Sequence[Seq], index: PrefixIndex) -> None:
        for i in index.outdated([seq.probe for seq in queue]):
            _probed(queue[i], index)
        for seq in queue:
            assert seq.probe is not None, "outdated names those without"
            probe = self._probe_of[seq.handle] = seq.probe
            _, count = self._ending.get(probe.node, (probe, 0))
            self._ending[probe.node] = probe, count + 1

    def walk(self, index: PrefixIndex) -> None:
        """O(nodes on the way to these ends)."""
        weights = Weights()
        last: dict[Node, int] = {}
        for node, (probe, count) in self._ending.items():
            path = index.path_of(probe)
            weights.add(path, count)
            last[node] = path[-1] if path else ROOT
        places = weights.places()
        self._places = {node: places[number] for node, number in last.items()}

    def place(self, seq: Seq) -> int:
        return self._places[self._probe_of[seq.handle].node]


class Hrrn(Policy):
    name = "hrrn"

    @property
    def reads_tree(self) -> bool:
        return True

    def inputs(self, count: int, view: View) -> Hashable:
        return view.computed_tokens

    def keys(self, queue: Sequence[Seq], view: View, inputs: Any) -> Sequence[float]:
        done, own = inputs, all_work(queue, view)
        return [-(done - seq.born_tokens) / max(tokens, 1) for seq, tokens in zip(queue, own, strict=True)]


class ShortFirst(Policy):
    name = "short-first"

    def __init__(self, params: PolicyParams) -> None:
        super().__init__(params)
        self._ratio = Held()

    def inputs(self, count: int, view: View) -> Hashable:
        if self.params.short_first_output_weight is None:
            return self._ratio(view.estimate(view.clip_new_tokens) / view.clip_new_tokens)
        return self.params.short_first_output_weight

    @property
    def reads_tree(self) -> bool:
        return True

    def keys(self, queue: Sequence[Seq], view: View, inputs: Any) -> Sequence[float]:
        aging, weight = self.params.short_first_aging_tokens_per_s, inputs
        return [
            tokens + weight * min(seq.max_new_tokens - seq.generated, view.clip_new_tokens) + aging * seq.req.arrival
            for seq, tokens in zip(queue, all_work(queue, view), strict=True)
        ]


class SrptAging(Policy):
    """Ageing is a share of the prefill rate, smaller in proportion when more than so many seconds of work wait.

    Without that an overloaded engine, where everybody waits for minutes, would serve by arrival: minutes of ageing
    outweigh every prompt.
    """

    name = "srpt-aging"

    def __init__(self, params: PolicyParams) -> None:
        super().__init__(params)
        self._held, self._held_share = Held(), Held()

    def inputs(self, count: int, view: View) -> Hashable:
        most, backlog_secs = self.params.srpt_aging_backlog_secs, view.queued_tokens / view.prefill_rate
        share = self._held_share(most / backlog_secs) if 0 < most < backlog_secs else 1.0
        return self._held(view.prefill_rate), share

    @property
    def redecides_chunks(self) -> bool:
        return True

    @property
    def reads_tree(self) -> bool:
        return True

    def keys(self, queue: Sequence[Seq], view: View, inputs: Any) -> Sequence[float]:
        rate, share = inputs
        aging = self.params.srpt_aging * rate * share
        return [tokens + aging * seq.req.arrival for seq, tokens in zip(queue, all_work(queue, view), strict=True)]


class Edf(Policy):
    """Earliest first-token deadline first; one that cannot be met any more counts as `edf_demotion_secs` later.

    Without the demotion an overloaded engine works on lost causes only (they are always the most urgent); without its
    bound they would wait for as long as others come that can still be in time.
    """

    name = "edf"

    def __init__(self, params: PolicyParams) -> None:
        super().__init__(params)
        self._held = Held()

    def inputs(self, count: int, view: View) -> Hashable:
        return self._held(view.prefill_rate) if self.params.demote_hopeless else 0.0

    @property
    def redecides_chunks(self) -> bool:
        return True

    @property
    def reads_tree(self) -> bool:
        return self.params.demote_hopeless

    def _due(self, seq: Seq) -> float:
        deadline = seq.req.ttft_deadline
        return seq.req.arrival + self.params.default_deadline_secs if deadline is None else deadline

    def keys(self, queue: Sequence[Seq], view: View, inputs: Any) -> Sequence[float]:
        due = [self._due(seq) for seq in queue]
        if not self.params.demote_hopeless:
            return due
        own, later = all_work(queue, view), self.params.edf_demotion_secs
        return [at + later if view.now > at - tokens / inputs else at for at, tokens in zip(due, own, strict=True)]

    def expiries(self, queue: Sequence[Seq], view: View, inputs: Any) -> Iterable[float]:
        if not self.params.demote_hopeless:
            return NEVER
        latest = [self._due(seq) - tokens / inputs for seq, tokens in zip(queue, all_work(queue, view), strict=True)]
        return [math.inf if view.now > start else math.nextafter(start, math.inf) for start in latest]


class Adaptive(Policy):
    """Uses fcfs, lpm, short-first, hrrn or srpt-aging: the one that a replay of the queue favors (sched.adaptive)."""

    name = "adaptive"
    reviews = True

    def __init__(self, params: PolicyParams) -> None:
        super().__init__(params)
        self.choice = adaptive.Choice(Fcfs.name)
        candidates: tuple[type[Policy], ...] = (Fcfs, Lpm, ShortFirst, Hrrn, SrptAging)
        self._orders = {policy.name: policy(params) for policy in candidates}
        self._next_review: float | None = None
        self._review: adaptive.Parts[OrderReviewed | None] | None = None
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
        return self._orders[Lpm.name].degraded_total

    @property
    def redecides_chunks(self) -> bool:
        return self.order.redecides_chunks

    @property
    def chosen(self) -> dict[str, bool]:
        return {name: name == self.choice.active for name in self._orders}

    @property
    def reads_tree(self) -> bool:
        return self.order.reads_tree

    def inputs(self, count: int, view: View) -> Hashable:
        return self.choice.active, self.order.inputs(count, view)

    def keys(self, queue: Sequence[Seq], view: View, inputs: Any) -> Sequence[float]:
        name, of_order = inputs
        return self._orders[name].keys(queue, view, of_order)

    def review(self, queue: Collection[Seq], view: View) -> OrderReviewed | None:
        """Review the orders once per window, over as many plans as the work takes."""
        most = max(adaptive.WORK_PER_PLAN, adaptive.WORK_PER_SEC * (view.now - self._last_plan))
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

    def _review_in_parts(self, queue: Collection[Seq], view: View) -> adaptive.Parts[OrderReviewed | None]:
        snapshot = yield from adaptive.snapshot_in_parts(
            queue, view, self.params, lambda seq: cached_tokens(seq, view.index)
        )
        if len(snapshot.requests) < 2:
            self.choice = adaptive.Choice(self.choice.active)  # nothing to compare: not a second time in a row
            return None
        expected = yield from adaptive.forecasts_in_parts(snapshot)
        before, tail = self.choice, self.params.adaptive_tail_weight
        self.choice = adaptive.decide(before, expected, tail)
        line = functools.partial(adaptive.as_line, before, tail, snapshot, self.choice)
        return OrderReviewed(before.active, self.choice.active, line)


LOWEST_PRIORITY = -(2**31)


@dataclass(frozen=True, slots=True)
class PriorityRule:
    """How a request's priority enters the order. `sign` is applied once: after it, larger is better in both directions.

    With aging a request gains `aging_rate` units per second of waiting, up to `aging_max`. Until then
    P + R * (now - t0) orders like the constant P - R * t0, so keys never change while a request waits (queue.py keeps
    those that have reached the maximum, whose key is constant too, in a second list). That constant is rounded down to
    whole units: requests of one unit are equally important, and among them the policy decides. Preemption compares the
    unaged priority.
    """

    enabled: bool = False
    low_values_first: bool = False
    aging_rate: float = 0.0
    aging_max: float = math.inf
    preemption_threshold: int = 10
    default: int | None = None
    """Priority of requests that state none; None: below every stated one (State.start_priority where they age)."""

    def base(self, seq: Seq) -> int:
        """Priority with larger meaning better: what preemption and queue limits compare."""
        return self.base_of(seq.req)

    def base_of(self, req: Validated) -> int:
        stated = self.default if req.priority is None else req.priority
        if stated is None:
            return LOWEST_PRIORITY
        return -stated if self.low_values_first else stated

    def unaged(self, seq: Seq) -> float:
        """What the order starts from: the base, or what --priority-adjustment-function made of it."""
        if seq.adjusted_priority is not None:
            return seq.adjusted_priority
        return self.base(seq) if seq.start_priority is None else seq.start_priority

    def ageing_key(self, seq: Seq) -> float:
        """Smaller is earlier, among requests that still age; true at all times."""
        if not self.enabled:
            return 0.0
        if not self.aging_rate:
            return -self.unaged(seq)
        return -math.floor(self.unaged(seq) - self.aging_rate * seq.req.arrival)

    def capped_key(self, seq: Seq) -> float:
        """Smaller is earlier, among requests that have gained all they can."""
        return -(self.unaged(seq) + self.aging_max)

    def capped_from(self, seq: Seq) -> float:
        """When a request stops to age."""
        if not self.enabled or not self.aging_rate:
            return math.inf
        return seq.req.arrival + self.aging_max / self.aging_rate

    def key(self, seq: Seq, now: float) -> float:
        """The definition, for any two requests at one time."""
        if now >= self.capped_from(seq):
            return self.capped_key(seq)
        return self.ageing_key(seq) - (self.aging_rate * now if self.enabled else 0.0)

    @property
    def is_capped(self) -> bool:
        """Requests age up to a maximum, so that the order of two may change with time."""
        return self.enabled and self.aging_rate > 0 and self.aging_max < math.inf

    def place(self, seq: Seq, now: float) -> tuple[float, float, int]:
        """Where no policy decides: (priority, arrival, handle). Without a cap it never changes."""
        key = self.key(seq, now) if self.is_capped else self.ageing_key(seq)
        return key, seq.req.arrival, seq.handle


Rank = tuple[float, float, float, int]


def ranks(queue: Sequence[Seq], policy: Policy, priority: PriorityRule, view: View, inputs: Hashable) -> list[Rank]:
    """The whole sort key of every sequence: (priority, policy, arrival, handle), all different."""
    keys = policy.keys(queue, view, inputs)
    aged = [priority.key(seq, view.now) for seq in queue]
    return [(p, key, seq.req.arrival, seq.handle) for p, key, seq in zip(aged, keys, queue, strict=True)]


def ordered(queue: Sequence[Seq], policy: Policy, priority: PriorityRule, view: View) -> list[Seq]:
    """The queue in the order in which the planner should look at it, computed afresh."""
    found = ranks(queue, policy, priority, view, policy.inputs(len(queue), view))
    entries = sorted(zip(found, queue, strict=True), key=lambda entry: entry[0])
    return [seq for _, seq in entries]


_ALL: tuple[type[Policy], ...] = (Fcfs, Lpm, DfsWeight, Lof, Random, ShortFirst, SrptAging, Edf, Hrrn, Adaptive)
POLICIES: dict[str, Callable[[PolicyParams], Policy]] = {policy.name: policy for policy in _ALL}
