"""Costs of earlier checks: CPU time by client, and checks that were too slow.

Deterministic, no I/O. Times are seconds of one clock that does not go back.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_CLIENTS = 4096
"""Clients whose use is remembered; the one that spent longest ago is forgotten first."""
SLOW_CHECK_SECS = 600.0
"""A check that was too slow is refused at once for so long. Later it is tried again: the limit of
its CPU time is measured, and a machine may have been slow.
"""
MAX_SLOW_CHECKS = 4096
"""Checks that were too slow and are remembered, at 32 bytes each; the oldest is forgotten first."""


class CheckBudget:
    """CPU time that each client may use for slow checks: a bucket that fills within a minute."""

    def __init__(self, secs_per_minute: float) -> None:
        """0: no client has a limit."""
        self._capacity = secs_per_minute
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """client → (seconds left, when)."""

    def wait_secs(self, client: str, now: float) -> float:
        """Time until a slow check of a client may start; 0.0: now.

        One that starts may overdraw the bucket: how much a check takes is known when it has ended.
        """
        if self._capacity == 0.0:
            return 0.0
        missing = max(-self._level_of(client, now), 0.0)
        return missing * 60.0 / self._capacity

    def spend(self, client: str, secs: float, now: float) -> None:
        if self._capacity == 0.0:
            return
        self._levels[client] = (self._level_of(client, now) - secs, now)
        self._levels.move_to_end(client)
        if len(self._levels) > MAX_CLIENTS:
            self._levels.popitem(last=False)

    def _level_of(self, client: str, now: float) -> float:
        level, measured_at = self._levels.get(client, (self._capacity, now))
        return min(level + (now - measured_at) * self._capacity / 60.0, self._capacity)


class SlowChecks:
    """Digests of checks that were too slow lately."""

    def __init__(self) -> None:
        self._ends: OrderedDict[bytes, float] = OrderedDict()
        """digest → end of its time, earliest first."""

    def add(self, digest: bytes, now: float) -> None:
        self._ends[digest] = now + SLOW_CHECK_SECS
        self._ends.move_to_end(digest)
        while len(self._ends) > MAX_SLOW_CHECKS:
            self._ends.popitem(last=False)

    def remaining_secs(self, digest: bytes, now: float) -> float:
        """Time for which a check is refused; 0.0: it is not."""
        return max(self._ends.get(digest, now) - now, 0.0)
