"""Pages that came back from the host tier, until the device has compared their checksums.

1. A sequence gets pages from the host (`add`); the next plan copies them (`take_plan`).
2. The step's result says which of them are damaged (`commit`): until then other sequences may have
   begun on them, and pages computed from them may be in the tree.
3. Everything that reads a damaged page is found by the tokens that lead to it (`DamagedPrefix`),
   because the page itself may have another owner by then.

Invariant: the entries in flight are those of the plans that bring pages back, in their order.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.cache.host import CopyRun
from baton.cache.radix import TOKEN_BYTES
from baton.sched.types.sequence import Seq


@dataclass(frozen=True, slots=True)
class DamagedPrefix:
    """The tokens up to the end of a damaged page."""

    tokens: bytes
    namespace: bytes
    place: int
    """Of the page among the pages of tokens."""
    page: int
    """Group 0's page of these tokens."""

    def is_read_by(self, seq: Seq) -> bool:
        """True if a step may have computed this sequence from the page."""
        if seq.req.namespace != self.namespace or not seq.key.startswith(self.tokens):
            return False
        if seq.pages:
            return self.place < len(seq.pages) and seq.pages[self.place] == self.page
        # It has released its pages, perhaps after a row that read this one.
        return seq.inflight_steps > 0


@dataclass(frozen=True, slots=True)
class _RestoredPages:
    """Pages that came back for one sequence."""

    tokens: bytes
    namespace: bytes
    path: array[int]
    """Group 0's pages of the tokens, from the first one on."""
    places: Sequence[int]
    """Place of each page that came back, in the order of the copies."""

    def damaged_prefix(self, place: int, page_size: int) -> DamagedPrefix:
        tokens = self.tokens[: (place + 1) * page_size * TOKEN_BYTES]
        return DamagedPrefix(tokens, self.namespace, place, self.path[place])


class RestoreLog:
    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._pending: list[_RestoredPages] = []
        self._in_flight: deque[list[_RestoredPages]] = deque()

    @property
    def has_unverified(self) -> bool:
        """True if pages came back that no committed step vouches for."""
        return bool(self._pending or self._in_flight)

    def add(self, seq: Seq, places: Sequence[int]) -> None:
        """A sequence has got pages from the host.

        Args:
            places: of the pages, in the order in which their copies were asked for.
        """
        restored = _RestoredPages(seq.key, seq.req.namespace, seq.pages[:], places)
        self._pending.append(restored)

    def take_plan(self) -> None:
        """A plan takes all copies that were asked for."""
        if self._pending:
            self._in_flight.append(self._pending)
            self._pending = []

    def commit(
        self, copies: Iterable[CopyRun], damaged_pages: Sequence[int]
    ) -> list[DamagedPrefix]:
        """The oldest plan's copies are done. Returns what they brought back damaged.

        Args:
            damaged_pages: StepResult.damaged_pages.
        """
        # Only a plan that brings pages back has an entry.
        if all(run.to_host for run in copies):
            return []
        found = []
        first = 0
        for restored in self._in_flight.popleft():
            end = first + len(restored.places)
            places = [restored.places[i - first] for i in damaged_pages if first <= i < end]
            # Whatever reads a later page of these reads the first one as well.
            if places:
                found.append(restored.damaged_prefix(min(places), self._page_size))
            first = end
        return found
