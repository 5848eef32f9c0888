"""Order and rate of tenants inside a class; their limits are `baton.config.tenants.TenantRules`.

* `VirtualCounters` decide between tenants that wait for the same class: the least counter first. A
  counter grows by the tenant's computed tokens, divided by its weight. A tenant that comes back
  from a pause starts at the least counter of those that wait (or of the last one that waited): a
  pause earns nothing, and no tenant pays for capacity that none else wanted.
* `RateLimits` are token buckets of one minute's tokens: they refuse, the counters only order.

Bounds. Counters of two tenants that both wait differ by at most U, the largest amount one can be
charged after it was chosen (its prompt, and its answers that run); so over any time in which both
wait their normalized service differs by at most 2 U. A bucket lets through at most a minute's
tokens at once and its rate after that; answers are taken from it as they are generated and may
overdraw it, which the next request waits for.

Deterministic: no clock (`now` is an argument), no files. Source: Sheng et al., "Fairness in Serving
Large Language Models" (OSDI 2024, arXiv 2401.00588).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable

from baton.config.tenants import TenantRules


class VirtualCounters:
    """Counters of the tenants of one class. A tenant is *active* while it has requests waiting."""

    def __init__(self, max_idle: int) -> None:
        self._max_idle = max_idle
        self._active: dict[str, float] = {}
        self._idle: OrderedDict[str, float] = OrderedDict()
        self._lower_bounds: list[tuple[float, str]] = []
        """A heap with an entry of at most its counter for each active tenant (counters only grow),
        and stale ones.
        """
        self._last_left = ""
        self._last_floor = 0.0
        self.num_forgotten = 0

    def __getitem__(self, tenant: str) -> float:
        if tenant in self._active:
            return self._active[tenant]
        return self._idle.get(tenant, self._last_floor)

    def counters_of(self, tenants: Iterable[str]) -> list[float]:
        """Their counters: those of many without a call each."""
        active = self._active
        return [active[tenant] if tenant in active else self[tenant] for tenant in tenants]

    def activate(self, tenant: str) -> None:
        """A request of this tenant waits; called for the first one."""
        floor = self._least_counter()
        counter = max(self._idle.pop(tenant, 0.0), floor)
        self._active[tenant] = counter
        heapq.heappush(self._lower_bounds, (counter, tenant))
        if len(self._lower_bounds) > 64 + 2 * len(self._active):
            self._lower_bounds = [(value, name) for name, value in self._active.items()]
            heapq.heapify(self._lower_bounds)

    def deactivate(self, tenant: str) -> None:
        """None of its requests waits any more; what runs is still charged."""
        self._idle[tenant] = self._last_floor = self._active.pop(tenant)
        self._last_left = tenant
        if len(self._idle) > self._max_idle:
            self._idle.popitem(last=False)
            self.num_forgotten += 1

    def charge(self, tenant: str, amount: float) -> None:
        if tenant in self._active:
            self._active[tenant] += amount
        elif tenant in self._idle:
            self._idle[tenant] += amount
            self._idle.move_to_end(tenant)

    def _least_counter(self) -> float:
        """Least counter of the waiting tenants; of the last that waited when none does."""
        heap = self._lower_bounds
        while heap:
            bound, tenant = heap[0]
            counter = self._active.get(tenant)
            if counter is None:
                heapq.heappop(heap)
            elif counter > bound:
                heapq.heapreplace(heap, (counter, tenant))
            else:
                return counter
        return self._idle.get(self._last_left, self._last_floor)


class RateLimits:
    """Token buckets, one per tenant with a limit.

    Times are seconds of one clock that does not go back.
    """

    def __init__(self, rules: TenantRules, max_tenants: int) -> None:
        self._rules = rules
        self._max_tenants = max_tenants
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """tenant → (tokens in the bucket, when)."""

    def admit(self, tenant: str, tokens: int, now: float) -> float:
        """Take a request's prompt tokens: 0.0, or the seconds after which it would be let through
        (nothing is taken).

        A prompt larger than a minute's tokens needs a full bucket and overdraws it.
        """
        limit = self._rules.rule_of(tenant).tokens_per_minute
        if limit is None:
            return 0.0
        level = self._level_of(tenant, limit, now)
        missing = min(tokens, limit) - level
        if missing > 0:
            return missing * 60 / limit
        self._store_level(tenant, level - tokens, now)
        return 0.0

    def spend(self, tenant: str, tokens: int, now: float) -> None:
        """Take generated tokens; the bucket may go below empty.

        Negative: give back what was taken for nothing.
        """
        limit = self._rules.rule_of(tenant).tokens_per_minute
        if limit is not None:
            self._store_level(tenant, self._level_of(tenant, limit, now) - tokens, now)

    def _level_of(self, tenant: str, limit: int, now: float) -> float:
        level, measured_at = self._buckets.get(tenant, (float(limit), now))
        return min(level + (now - measured_at) * limit / 60, float(limit))

    def _store_level(self, tenant: str, level: float, now: float) -> None:
        self._buckets[tenant] = (level, now)
        self._buckets.move_to_end(tenant)
        if len(self._buckets) > self._max_tenants:
            self._buckets.popitem(last=False)
