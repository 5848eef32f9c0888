"""Random order, the same in every replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.sched.policies.base import Policy, PolicyContext
from baton.sched.types.hashing import uniform
from baton.sched.types.sequence import Seq


class RandomPolicy(Policy):
    name = "random"

    def inputs(self, count: int, view: PolicyContext) -> int:
        return view.step

    def keys(self, queue: Sequence[Seq], view: PolicyContext, inputs: Any) -> Sequence[float]:
        return [uniform(inputs, seq.handle) for seq in queue]
