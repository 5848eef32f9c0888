"""Priority of a request, and its aging."""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.cache.eviction import LOWEST_PRIORITY
from baton.sched.types.request import ValidatedRequest
from baton.sched.types.sequence import Seq, SortKey


@dataclass(frozen=True, slots=True)
class PriorityRule:
    """How a request's priority enters the order. `sign` is applied once: after it, larger is better
    in both directions.

    With aging a request gains `aging_rate` units per second of waiting, up to `aging_max`. Until
    then P + R * (now - t0) orders like the constant P - R * t0, so keys never change while a
    request waits (waiting_queue.py keeps those that have reached the maximum, whose key is constant
    too, in a second list). That constant is rounded down to whole units: requests of one unit are
    equally important, and among them the policy decides. Preemption compares the unaged priority.
    """

    enabled: bool = False
    low_values_first: bool = False
    aging_rate: float = 0.0
    aging_max: float = math.inf
    preemption_threshold: int = 10
    default: int | None = None
    """Priority of requests that state none; None: below every stated one (State.start_priority
    where they age).
    """

    def base(self, seq: Seq) -> int:
        """Priority with larger meaning better: what preemption and queue limits compare."""
        return self.base_of(seq.req)

    def base_of(self, req: ValidatedRequest) -> int:
        stated = self.default if req.priority is None else req.priority
        if stated is None:
            return LOWEST_PRIORITY
        return -stated if self.low_values_first else stated

    def unaged(self, seq: Seq) -> float:
        """Priority that the order starts from: the base, or as --priority-adjustment-function
        adjusted it.
        """
        if seq.adjusted_priority is not None:
            return seq.adjusted_priority
        return self.base(seq) if seq.start_priority is None else seq.start_priority

    def aging_key(self, seq: Seq) -> float:
        """Smaller is earlier, among requests that still age; true at all times."""
        if not self.enabled:
            return 0.0
        if not self.aging_rate:
            return -self.unaged(seq)
        return -math.floor(self.unaged(seq) - self.aging_rate * seq.req.arrival)

    def capped_key(self, seq: Seq) -> float:
        """Smaller is earlier, among requests that have gained all they can."""
        return -(self.unaged(seq) + self.aging_max)

    def capped_from(self, seq: Seq) -> float:
        """When a request stops to age."""
        if not self.enabled or not self.aging_rate:
            return math.inf
        return seq.req.arrival + self.aging_max / self.aging_rate

    def key(self, seq: Seq, now: float) -> float:
        """The definition, for any two requests at one time."""
        if now >= self.capped_from(seq):
            return self.capped_key(seq)
        return self.aging_key(seq) - (self.aging_rate * now if self.enabled else 0.0)

    @property
    def is_capped(self) -> bool:
        """Requests age up to a maximum, so that the order of two may change with time."""
        return self.enabled and self.aging_rate > 0 and self.aging_max < math.inf

    def sort_key(self, seq: Seq, now: float) -> SortKey:
        """Where no policy decides: (priority, arrival, handle). Without a cap it never changes."""
        key = self.key(seq, now) if self.is_capped else self.aging_key(seq)
        return key, seq.req.arrival, seq.handle
