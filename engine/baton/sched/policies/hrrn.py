"""Highest response ratio next."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from baton.sched.policies.base import Policy, PolicyContext, all_work
from baton.sched.types.sequence import Seq


class HrrnPolicy(Policy):
    name = "hrrn"

    def inputs(self, count: int, view: PolicyContext) -> Hashable:
        return view.computed_tokens

    def keys(self, queue: Sequence[Seq], view: PolicyContext, inputs: Any) -> Sequence[float]:
        done, own = inputs, all_work(queue, view)
        return [-(done - seq.born_tokens) / max(tokens, 1) for seq, tokens in zip(queue, own, strict=True)]
