"""Shortest remaining prefill first, with aging."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from baton.sched.policies.base import HysteresisValue, Policy, PolicyContext, PolicyParams, all_work
from baton.sched.types.sequence import Seq


class SrptAging(Policy):
    """Aging is a share of the prefill rate, smaller in proportion when more than so many seconds of work wait.

    Without that an overloaded engine, where everybody waits for minutes, would serve by arrival: minutes of aging
    outweigh every prompt.
    """

    name = "srpt-aging"
    reorders_partial_prefills = True

    def __init__(self, params: PolicyParams) -> None:
        super().__init__(params)
        self._held, self._held_share = HysteresisValue(), HysteresisValue()

    def cache_key(self, count: int, view: PolicyContext) -> Hashable:
        most, backlog_secs = (
            self.params.srpt_aging_backlog_secs,
            view.queued_tokens / view.prefill_rate,
        )
        share = self._held_share(most / backlog_secs) if 0 < most < backlog_secs else 1.0
        return self._held(view.prefill_rate), share

    def sort_keys(
        self, queue: Sequence[Seq], view: PolicyContext, cache_key: Any
    ) -> Sequence[float]:
        rate, share = cache_key
        aging = self.params.srpt_aging * rate * share
        return [
            tokens + aging * seq.req.arrival
            for seq, tokens in zip(queue, all_work(queue, view), strict=True)
        ]
