"""Random order, the same in every replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.sched.policies.base import Policy, PolicyContext
from baton.sched.types.hashing import uniform
from baton.sched.types.sequence import Seq


class RandomPolicy(Policy):
    name = "random"

    def cache_key(self, count: int, view: PolicyContext) -> int:
        return view.step

    def sort_keys(
        self, queue: Sequence[Seq], view: PolicyContext, cache_key: Any
    ) -> Sequence[float]:
        return [uniform(cache_key, seq.handle) for seq in queue]
