"""Tenants: what each may use, who is served next inside a class, and how fast they may ask.

* `TenantRules` are the limits by name, read from a file (`parse_rules` reports every mistake in it).
* `VirtualCounters` decide between tenants who wait for the same class: the least counter first. A counter grows by
  what was done for the tenant, divided by its weight. A tenant that comes back from a pause starts at the least counter
  of those who wait (or of the last one that waited): a pause earns nothing, and nobody pays for capacity that nobody
  else wanted.
* `RateLimits` are token buckets of one minute's tokens: they refuse, the counters only order.

Bounds. Counters of two tenants that both wait differ by at most U, the largest amount one can be charged after it was
chosen (its prompt, and its answers that run); so over any time in which both wait their normalised service differs
by at most 2 U. A bucket lets through at most a minute's tokens at once and its rate after that; answers are
taken from it as they are generated and may overdraw it, which the next request waits for.

Pure: no clock (`now` is an argument), no files. Source: Sheng et al., "Fairness in Serving Large Language Models" (OSDI
2024, arXiv 2401.00588).
"""

from __future__ import annotations

import heapq
import math
import re
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

DEFAULT_TENANT = "default"
OTHER = "other"
INTERNAL = "internal"
"""Labels of metrics: tenants without one of their own, and requests of no tenant."""
TENANT_NAME = re.compile(r"[A-Za-z0-9._~:@/+=-]{1,128}")
"""Safe as a metric label and in a log line."""
NAME_RULE = "1 to 128 letters, digits or . _ ~ : @ / + = -"
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TenantRule:
    """Limits of one tenant. None: no limit."""

    weight: float = 1.0
    max_running: int | None = None
    """Requests with a slot, per rank."""
    max_queued: int | None = None
    """Requests waiting, per rank."""
    max_kv_tokens: int | None = None
    """Tokens that its running requests are expected to hold at their end, per rank."""
    tokens_per_minute: int | None = None
    """Prompt and generated tokens, per engine."""
    priority_class: str | None = None
    """The best class its requests may have, and the one of requests that ask for none."""
    min_priority: int | None = None
    max_priority: int | None = None

    def clamped(self, priority: int | None, low_values_first: bool) -> int | None:
        """The priority inside the tenant's range; none at all counts as the least important end."""
        if priority is None:
            return self.max_priority if low_values_first else self.min_priority
        low = -math.inf if self.min_priority is None else self.min_priority
        high = math.inf if self.max_priority is None else self.max_priority
        return int(min(max(priority, low), high))


@dataclass(frozen=True, slots=True)
class TenantRules:
    """`named` tenants, and what everybody else gets (each of them for himself)."""

    default: TenantRule = field(default_factory=TenantRule)
    named: Mapping[str, TenantRule] = field(default_factory=dict)

    def of(self, tenant: str) -> TenantRule:
        return self.named.get(tenant, self.default)

    @property
    def all(self) -> Iterable[TenantRule]:
        return (self.default, *self.named.values())


_RANGES: dict[str, tuple[float, float]] = {
    "weight": (0.001, 1e6),
    "max_running": (1, INT32_MAX),
    "max_queued": (0, INT32_MAX),
    "max_kv_tokens": (1, 2**53),
    "tokens_per_minute": (1, 2**53),
    "min_priority": (-INT32_MAX - 1, INT32_MAX),
    "max_priority": (-INT32_MAX - 1, INT32_MAX),
}


def parse_rules(document: object, class_names: Collection[str]) -> tuple[TenantRules, list[str]]:
    """A decoded tenant file → rules and every mistake in it. `class_names`: the classes that exist.

    Form: {"default": {limits}, "tenants": {name: {limits}}}; both parts may be left out.
    """
    if not isinstance(document, dict):
        return TenantRules(), [f"the file holds {type(document).__name__}; give an object with default and tenants"]
    bad = [f"{key}: unknown; the file has default and tenants" for key in document if key not in ("default", "tenants")]
    default = _rule("default", document.get("default", {}), class_names, bad)
    tenants = document.get("tenants", {})
    if not isinstance(tenants, dict):
        bad.append(f"tenants is {tenants!r}; give an object, a tenant's name to its limits")
        tenants = {}
    named = {}
    for name, limits in tenants.items():
        if not TENANT_NAME.fullmatch(name):
            bad.append(f"tenants.{name}: a name has {NAME_RULE}")
        named[name] = _rule(f"tenants.{name}", limits, class_names, bad)
    return TenantRules(default, named), bad


def _rule(where: str, given: object, class_names: Collection[str], bad: list[str]) -> TenantRule:
    if not isinstance(given, dict):
        bad.append(f"{where} is {given!r}; give an object of limits")
        return TenantRule()
    values: dict[str, Any] = {}
    known = [f.name for f in fields(TenantRule)]
    for key, value in given.items():
        if key not in known:
            bad.append(f"{where}.{key}: unknown; limits are {', '.join(known)}")
        elif key == "priority_class":
            if value not in class_names:
                there = ", ".join(class_names) or "none: give --priority-classes"
                bad.append(f"{where}.priority_class is {value!r}; there is {there}")
            values[key] = value
        else:
            low, high = _RANGES[key]
            kinds = (int, float) if key == "weight" else (int,)
            if type(value) not in kinds or not low <= value <= high:
                kind = "a number" if key == "weight" else "a whole number"
                bad.append(f"{where}.{key} is {value!r}; give {kind} from {low:g} to {high:g}")
            else:
                values[key] = value
    rule = TenantRule(**values)
    if rule.min_priority is not None and rule.max_priority is not None and rule.min_priority > rule.max_priority:
        bad.append(f"{where}: min_priority {rule.min_priority} is above max_priority {rule.max_priority}")
    return rule


class VirtualCounters:
    """Counters of the tenants of one class. A tenant is *active* while it has requests waiting."""

    def __init__(self, max_idle: int) -> None:
        self._max_idle = max_idle
        self._active: dict[str, float] = {}
        self._idle: OrderedDict[str, float] = OrderedDict()
        self._lower_bounds: list[tuple[float, str]] = []
        """A heap with an entry of at most its counter for each active tenant (counters only grow), and stale ones."""
        self._last_left = ""
        self._last_floor = 0.0
        self.forgotten = 0

    def __getitem__(self, tenant: str) -> float:
        if tenant in self._active:
            return self._active[tenant]
        return self._idle.get(tenant, self._last_floor)

    def of(self, tenants: Iterable[str]) -> list[float]:
        """Their counters: those of many without a call each."""
        active = self._active
        return [active[tenant] if tenant in active else self[tenant] for tenant in tenants]

    def enter(self, tenant: str) -> None:
        """A request of this tenant waits; called for the first one."""
        floor = self._floor()
        counter = max(self._idle.pop(tenant, 0.0), floor)
        self._active[tenant] = counter
        heapq.heappush(self._lower_bounds, (counter, tenant))
        if len(self._lower_bounds) > 64 + 2 * len(self._active):
            self._lower_bounds = [(value, name) for name, value in self._active.items()]
            heapq.heapify(self._lower_bounds)

    def leave(self, tenant: str) -> None:
        """None of its requests waits any more; what runs is still charged."""
        self._idle[tenant] = self._last_floor = self._active.pop(tenant)
        self._last_left = tenant
        if len(self._idle) > self._max_idle:
            self._idle.popitem(last=False)
            self.forgotten += 1

    def charge(self, tenant: str, amount: float) -> None:
        if tenant in self._active:
            self._active[tenant] += amount
        elif tenant in self._idle:
            self._idle[tenant] += amount
            self._idle.move_to_end(tenant)

    def _floor(self) -> float:
        """The least counter of those who wait; of the last that did when nobody does."""
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
    """One token bucket per tenant with a limit. Times are seconds of one clock that does not go back."""

    def __init__(self, rules: TenantRules, max_tenants: int) -> None:
        self._rules = rules
        self._max_tenants = max_tenants
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """tenant → (tokens in the bucket, when)."""

    def admit(self, tenant: str, tokens: int, now: float) -> float:
        """Take a request's prompt tokens: 0.0, or the seconds after which it would be let through (nothing is taken).

        A prompt larger than a minute's tokens needs a full bucket and overdraws it.
        """
        limit = self._rules.of(tenant).tokens_per_minute
        if limit is None:
            return 0.0
        level = self._level(tenant, limit, now)
        missing = min(tokens, limit) - level
        if missing > 0:
            return missing * 60 / limit
        self._store(tenant, level - tokens, now)
        return 0.0

    def spend(self, tenant: str, tokens: int, now: float) -> None:
        """Take generated tokens; the bucket may go below empty. Negative: give back what was taken for nothing."""
        limit = self._rules.of(tenant).tokens_per_minute
        if limit is not None:
            self._store(tenant, self._level(tenant, limit, now) - tokens, now)

    def _level(self, tenant: str, limit: int, now: float) -> float:
        level, at = self._buckets.get(tenant, (float(limit), now))
        return min(level + (now - at) * limit / 60, float(limit))

    def _store(self, tenant: str, level: float, now: float) -> None:
        self._buckets[tenant] = (level, now)
        self._buckets.move_to_end(tenant)
        if len(self._buckets) > self._max_tenants:
            self._buckets.popitem(last=False)
