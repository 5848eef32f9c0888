"""Arrival order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.sched.policies.base import Policy, View
from baton.sched.types.sequence import Seq


class Fcfs(Policy):
    name = "fcfs"

    def keys(self, queue: Sequence[Seq], view: View, inputs: Any) -> Sequence[float]:
        return [seq.req.arrival for seq in queue]
