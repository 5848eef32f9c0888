"""Earliest first-token deadline first."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from baton.sched.policies.base import (
    NEVER,
    HysteresisValue,
    Policy,
    PolicyContext,
    PolicyParams,
    all_work,
)
from baton.sched.types.sequence import Seq


class EdfPolicy(Policy):
    """Earliest first-token deadline first; one that cannot be met any more counts as
    `edf_demotion_secs` later.

    Without the demotion an overloaded engine works on lost causes only (they are always the most
    urgent); without its bound they would wait for as long as others come that can still be in time.
    """

    name = "edf"
    reorders_partial_prefills = True

    def __init__(self, params: PolicyParams) -> None:
        super().__init__(params)
        self._held = HysteresisValue()

    def cache_key(self, count: int, view: PolicyContext) -> Hashable:
        return self._held(view.prefill_rate) if self.params.demote_hopeless else 0.0

    def _deadline_of(self, seq: Seq) -> float:
        deadline = seq.req.ttft_deadline
        return seq.req.arrival + self.params.default_deadline_secs if deadline is None else deadline

    def sort_keys(
        self, queue: Sequence[Seq], view: PolicyContext, cache_key: Any
    ) -> Sequence[float]:
        deadlines = [self._deadline_of(seq) for seq in queue]
        if not self.params.demote_hopeless:
            return deadlines
        work_tokens = all_work(queue, view)
        later = self.params.edf_demotion_secs
        return [
            deadline + later if view.now > deadline - tokens / cache_key else deadline
            for deadline, tokens in zip(deadlines, work_tokens, strict=True)
        ]

    def expiries(
        self, queue: Sequence[Seq], view: PolicyContext, cache_key: Any
    ) -> Iterable[float]:
        if not self.params.demote_hopeless:
            return NEVER
        latest = [
            self._deadline_of(seq) - tokens / cache_key
            for seq, tokens in zip(queue, all_work(queue, view), strict=True)
        ]
        return [
            math.inf if view.now > start else math.nextafter(start, math.inf) for start in latest
        ]
