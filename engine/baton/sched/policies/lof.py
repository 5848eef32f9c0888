"""Longest answer first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.sched.policies.base import Policy, PolicyContext
from baton.sched.types.sequence import Seq


class LofPolicy(Policy):
    """Longest answer by the client's limit: a prefill node itself produces one token per
    request.
    """

    name = "lof"

    def sort_keys(
        self, queue: Sequence[Seq], view: PolicyContext, cache_key: Any
    ) -> Sequence[float]:
        return [-seq.req.params.max_new_tokens for seq in queue]
