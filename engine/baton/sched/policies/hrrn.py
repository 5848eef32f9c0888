"""Highest response ratio next."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from baton.sched.policies.base import Policy, PolicyContext, all_work
from baton.sched.types.sequence import Seq


class HrrnPolicy(Policy):
    name = "hrrn"

    def cache_key(self, count: int, view: PolicyContext) -> Hashable:
        return view.computed_tokens

    def sort_keys(
        self, queue: Sequence[Seq], view: PolicyContext, cache_key: Any
    ) -> Sequence[float]:
        computed_tokens = cache_key
        work_tokens = all_work(queue, view)
        return [
            -(computed_tokens - seq.tokens_computed_at_arrival) / max(tokens, 1)
            for seq, tokens in zip(queue, work_tokens, strict=True)
        ]
