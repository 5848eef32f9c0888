"""Conservation of pages: each page of the pool is in exactly one of four states, and the four add
up to the capacity.

free         no owner
cached       in the radix tree, evictable
held         locked in the radix tree, or private to a request
in_transfer  promised to or by a peer: pages a D node granted for a pull, or a P node leased to one

The scheduler takes a ledger after each step in tests and whenever it turns idle in production.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.cache.pages import PageAllocator
from baton.cache.radix import RadixCache


class LedgerError(RuntimeError):
    """Pages were lost, counted twice, or are still held for a request that has ended.

    The message has the numbers.
    """


@dataclass(frozen=True, slots=True)
class PageLedger:
    """Page counts by state at one moment."""

    free: int
    cached: int
    held: int
    in_transfer: int

    @classmethod
    def count_pages(
        cls, allocator: PageAllocator, cache: RadixCache, private: int, in_transfer: int
    ) -> PageLedger:
        """Count now.

        `private`: pages requests own outside the tree; `in_transfer`: pages counted as neither.
        """
        return cls(
            allocator.free_count, cache.evictable_pages, cache.locked_pages + private, in_transfer
        )

    def check(self, total: int) -> None:
        """Raises LedgerError unless every count is non-negative and they add up to `total`."""
        parts = (self.free, self.cached, self.held, self.in_transfer)
        if min(parts) < 0 or sum(parts) != total:
            raise LedgerError(f"pages do not add up: {self} sums to {sum(parts)} of {total}")

    def check_idle(self, total: int) -> None:
        """`check`, and no page is held: what must be true when no request is alive."""
        self.check(total)
        if self.held or self.in_transfer:
            raise LedgerError(f"no request is alive, yet pages are still in use: {self}")

    def gauges(self) -> dict[str, float]:
        """Gauges for messages.StatsMessage, one per state."""
        states = ("free", "cached", "held", "in_transfer")
        return {f'kv_pages{{state="{state}"}}': float(getattr(self, state)) for state in states}


@dataclass(frozen=True, slots=True)
class HostLedger:
    """Slots of the host tier by state at one moment: each is free, cached, or pinned for a
    preempted request.
    """

    free: int
    cached: int
    pinned: int

    def check(self, total: int) -> None:
        """Raises LedgerError unless every count is non-negative and they add up to `total`."""
        parts = (self.free, self.cached, self.pinned)
        if min(parts) < 0 or sum(parts) != total:
            raise LedgerError(f"host pages do not add up: {self} sums to {sum(parts)} of {total}")

    def check_idle(self, total: int) -> None:
        """`check`, and nothing is pinned: what must be true when no request is alive."""
        self.check(total)
        if self.pinned:
            raise LedgerError(f"no request is alive, yet host pages are pinned: {self}")

    def gauges(self) -> dict[str, float]:
        """Gauges for messages.StatsMessage, one per state."""
        return {
            f'kv_host_pages{{state="{s}"}}': float(getattr(self, s))
            for s in ("free", "cached", "pinned")
        }
