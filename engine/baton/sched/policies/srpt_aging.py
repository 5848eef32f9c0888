"""Shortest remaining prefill first, with aging."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from baton.sched.policies.base import HysteresisValue, Policy, PolicyContext, PolicyParams, all_work
from baton.sched.types.sequence import Seq


class SrptAging(Policy):
    """Aging is a share of the prefill rate, smaller in proportion when more than so many seconds of
    work wait.

    Without that an overloaded engine, in which all requests wait for minutes, would serve by
    arrival: minutes of aging outweigh every prompt.
    """

    name = "srpt-aging"
    reorders_partial_prefills = True

    def __init__(self, params: PolicyParams) -> None:
        super().__init__(params)
        self._rate = HysteresisValue()
        self._share = HysteresisValue()

    def cache_key(self, count: int, view: PolicyContext) -> Hashable:
        share = overload_share(self.params, view)
        held_share = 1.0 if share is None else self._share(share)
        return self._rate(view.prefill_rate), held_share

    def sort_keys(
        self, queue: Sequence[Seq], view: PolicyContext, cache_key: Any
    ) -> Sequence[float]:
        rate, share = cache_key
        aging = self.params.srpt_aging * rate * share
        return [
            tokens + aging * seq.req.arrival
            for seq, tokens in zip(queue, all_work(queue, view), strict=True)
        ]


def overload_share(params: PolicyParams, view: PolicyContext) -> float | None:
    """Share of the aging that is left while more than so many seconds of work wait; None: all."""
    most_secs = params.srpt_aging_backlog_secs
    backlog_secs = view.queued_tokens / view.prefill_rate
    return most_secs / backlog_secs if 0 < most_secs < backlog_secs else None
