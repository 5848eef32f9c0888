"""Longest cached prefix first."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from baton.sched.policies.base import (
    Policy,
    PolicyContext,
    PolicyParams,
    all_cached_tokens,
    cached_tokens,
)
from baton.sched.policies.fcfs import FcfsPolicy
from baton.sched.types.sequence import Seq


class LpmPolicy(Policy):
    """Above the threshold first come first served, until the queue has shrunk to 3/4 of it (no
    flapping).

    With the in-batch thresholds set, a request with a cold prefix that an earlier waiting one
    begins with as well goes last, so that the earlier one can compute it for both (SGLang 0.5.7).
    Requests of one step share their pages here without that, hence it is off by default.
    """

    name = "lpm"
    degraded_total = 0

    def __init__(self, params: PolicyParams) -> None:
        super().__init__(params)
        self.keys_are_independent = params.in_batch_prefix_caching_check_threshold < 0
        self.is_degraded = False

    @property
    def active(self) -> str:
        return FcfsPolicy.name if self.is_degraded else self.name

    def cache_key(self, count: int, view: PolicyContext) -> Hashable:
        limit = self.params.lpm_degrade_threshold
        was_degraded = self.is_degraded
        self.is_degraded = bool(limit) and count > (limit * 0.75 if was_degraded else limit)
        self.degraded_total += self.is_degraded and not was_degraded
        return self.is_degraded

    def sort_keys(
        self, queue: Sequence[Seq], view: PolicyContext, cache_key: Any
    ) -> Sequence[float]:
        if cache_key:
            return [seq.req.arrival for seq in queue]
        aging = self.params.lpm_aging_tokens_per_s
        # cached + aging * (now - arrival), less the term that is equal for all: the order needs no
        # clock.
        cached = all_cached_tokens(queue, view.index)
        keys = [aging * seq.req.arrival - tokens for seq, tokens in zip(queue, cached, strict=True)]
        if self.params.in_batch_prefix_caching_check_threshold >= 0:
            for index in self._find_shared_heads(queue, view):
                keys[index] = math.inf
        return keys

    def _find_shared_heads(self, queue: Sequence[Seq], view: PolicyContext) -> Iterator[int]:
        """Indices of requests that begin like an earlier one, by arrival, which computes that
        anyway.
        """
        head_tokens = self.params.in_batch_prefix_caching_deprioritize_threshold
        most_cached = self.params.in_batch_prefix_caching_check_threshold
        first_heads: set[tuple[bytes, bytes]] = set()
        for index in sorted(
            range(len(queue)), key=lambda index: (queue[index].req.arrival, queue[index].handle)
        ):
            seq = queue[index]
            if len(seq.tokens) < head_tokens or cached_tokens(seq, view.index) > most_cached:
                continue
            head = (seq.req.namespace, seq.key[: head_tokens * seq.tokens.itemsize])
            if head in first_heads:
                yield index
            first_heads.add(head)
