"""Least estimated work first, with aging."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from baton.sched.policies.base import HysteresisValue, Policy, PolicyContext, PolicyParams, all_work
from baton.sched.types.sequence import Seq


class ShortFirst(Policy):
    name = "short-first"

    def __init__(self, params: PolicyParams) -> None:
        super().__init__(params)
        self._ratio = HysteresisValue()

    def cache_key(self, count: int, view: PolicyContext) -> Hashable:
        weight = self.params.short_first_output_weight
        return self._ratio(view.answer_share) if weight is None else weight

    def sort_keys(
        self, queue: Sequence[Seq], view: PolicyContext, cache_key: Any
    ) -> Sequence[float]:
        aging = self.params.short_first_aging_tokens_per_s
        weight = cache_key
        clip = view.clip_max_new_tokens
        return [
            tokens
            + weight * min(seq.max_new_tokens - seq.generated, clip)
            + aging * seq.req.arrival
            for seq, tokens in zip(queue, all_work(queue, view), strict=True)
        ]
