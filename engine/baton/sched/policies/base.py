"""Interface of the queue orders, and measures that several of them share."""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from baton.cache.radix import PrefixProbe, RadixCache
from baton.sched.types.sequence import Seq

NEVER = itertools.repeat(math.inf)
"""Times at which the keys of any number of requests change: never."""


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """Facts that a policy may use beside the sequence."""

    now: float
    step: int
    index: RadixCache
    """To look at only (`version`, `probe`, `find_outdated`, `watch`, `path_of`): what is evicted
    next must not change.
    """
    prefill_rate: float
    """Prompt tokens the engine computes per second, measured."""
    computed_tokens: int
    """Prompt tokens the engine has computed since it started."""
    answer_share: float
    """Share of its allowed tokens that a request is expected to generate, measured."""
    clip_max_new_tokens: int = 4096
    """An answer is never expected to be longer."""
    queued_tokens: int = 0
    """Prompt tokens of all waiting requests."""


@dataclass(frozen=True, slots=True)
class PolicyParams:
    """Knobs of all policies (names and defaults: baton.config)."""

    lpm_degrade_threshold: int = 4096
    lpm_aging_tokens_per_s: float = 0.0
    in_batch_prefix_caching_check_threshold: int = -1
    """lpm: look for an earlier request with the same head if at most so many tokens are cached; -1:
    never.
    """
    in_batch_prefix_caching_deprioritize_threshold: int = 32
    short_first_aging_tokens_per_s: float = 500.0
    short_first_output_weight: float | None = None
    """None: as large a share of the allowed tokens as the engine measures."""
    srpt_aging: float = 0.05
    srpt_aging_backlog_secs: float = 60.0
    default_deadline_secs: float = 60.0
    demote_hopeless: bool = True
    edf_demotion_secs: float = 300.0


class Policy(abc.ABC):
    """`sort_keys` is the order, the rest says when it changes.

    An instance belongs to one queue: it may have state.
    """

    name: ClassVar[str]
    keys_are_independent: bool = True
    """A sequence's number does not depend on who else waits, and on nothing in the tree but its
    cached prefix.
    """

    def __init__(self, params: PolicyParams) -> None:
        self.params = params

    @property
    def reorders_partial_prefills(self) -> bool:
        """Prompts in progress compete with waiting ones at every chunk boundary, instead of going
        first.
        """
        return False

    @property
    def active(self) -> str:
        """Name of the order in force now: this policy's, or that of the order it uses instead."""
        return self.name

    @property
    def degraded_total(self) -> int:
        """How often lpm turned to fcfs because of the queue's length."""
        return 0

    def cache_key(self, count: int, view: PolicyContext) -> Hashable:
        """Called first, with the queue's length: while it and the cached prefixes are equal, so are
        the sort keys.
        """
        return ()

    @abc.abstractmethod
    def sort_keys(
        self, queue: Sequence[Seq], view: PolicyContext, cache_key: Any
    ) -> Sequence[float]:
        """A number for each sequence, smallest first.

        `cache_key`: a result of `cache_key`, perhaps not the latest.
        """

    def keys_in_parts(
        self, queue: Sequence[Seq], part: int, view: Callable[[], PolicyContext], cache_key: Any
    ) -> Iterator[Iterable[tuple[Seq, float]]]:
        """`sort_keys` of a long queue, where keys are not independent: works on some `part`
        sequences at a time.

        Yields what is ready, often nothing; each sequence once in all. The queue and the tree may
        change meanwhile.
        """
        for seqs in batches(queue, part):
            all_cached_tokens(seqs, view().index)
            yield ()
        keys = self.sort_keys(queue, view(), cache_key)
        for first in range(0, len(queue), part):
            yield zip(queue[first : first + part], keys[first : first + part], strict=True)

    def expiries(
        self, queue: Sequence[Seq], view: PolicyContext, cache_key: Any
    ) -> Iterable[float]:
        """When the numbers that `sort_keys` has just given them are other ones, though nothing else
        changes.
        """
        return NEVER


class HysteresisValue:
    """A measured number as orders use it: it follows the measurement in steps of 5 %, so that noise
    sorts nothing.
    """

    def __init__(self) -> None:
        self._value = 0.0

    def __call__(self, measured: float) -> float:
        if not abs(measured - self._value) <= 0.05 * abs(self._value):
            self._value = measured
        return self._value


def batches(seqs: Sequence[Seq], size: int) -> Iterator[Sequence[Seq]]:
    return (seqs[first : first + size] for first in range(0, len(seqs), size))


def cached_tokens(seq: Seq, index: RadixCache) -> int:
    """Prompt tokens of a sequence that need no computing, by the pages of group 0.

    With further page groups fewer of them may be usable (KvManager.cached_tokens). Orders leave
    that out, because eviction in a further group changes it without a change of the tree.
    """
    if seq.pages:
        return seq.computed
    return refresh_probe(seq, index).num_tokens


def refresh_probe(seq: Seq, index: RadixCache) -> PrefixProbe:
    seq.probe = probe = index.probe(seq.key, seq.req.namespace, seq.reusable_tokens, seq.probe)
    return probe


def all_cached_tokens(queue: Sequence[Seq], index: RadixCache) -> list[int]:
    """`cached_tokens` of each. Asks again only where the tree has changed."""
    probes = [seq.probe for seq in queue]
    for i in index.find_outdated(probes):
        if not queue[i].pages:
            probes[i] = refresh_probe(queue[i], index)
    return [
        seq.computed if seq.pages or probe is None else probe.num_tokens
        for seq, probe in zip(queue, probes, strict=True)
    ]


def all_work(queue: Sequence[Seq], view: PolicyContext) -> list[int]:
    """`tokens_to_compute` of each."""
    cached_tokens = all_cached_tokens(queue, view.index)
    return [
        len(seq.tokens) + seq.inflight - cached
        for seq, cached in zip(queue, cached_tokens, strict=True)
    ]


def tokens_to_compute(seq: Seq, view: PolicyContext) -> int:
    """Tokens to compute before the next one can be sampled."""
    return seq.total_len - cached_tokens(seq, view.index)
