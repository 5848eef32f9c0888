"""Arrival order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.sched.policies.base import Policy, PolicyContext
from baton.sched.types.sequence import Seq


class FcfsPolicy(Policy):
    name = "fcfs"

    def sort_keys(
        self, queue: Sequence[Seq], view: PolicyContext, cache_key: Any
    ) -> Sequence[float]:
        return [seq.req.arrival for seq in queue]
