"""Turns of the checks that wait for a lane: round robin by client. Deterministic, no I/O, no clock.

1. `add` puts a check behind those of its client. Where too many wait, the client with the most of
   them loses its last one, so that a client that sends few keeps its places whatever others send;
2. `start_next` takes the first check of the client whose turn it is, and puts the client behind all
   others;
3. `finish` ends it; until then no other check of the client starts.

Invariants: at most `max_waiting` checks wait, at most `max_in_work` are in work, and at most one of
a client; between a client's first waiting check and its start, each other client starts at most
one.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class CheckTurns(Generic[T]):
    """Waiting checks of a lane, by client. Checks are compared by identity."""

    def __init__(self, *, max_waiting: int, max_in_work: int) -> None:
        self._max_waiting = max_waiting
        self._max_in_work = max_in_work
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        """Checks by client, oldest first; clients in the order of their turns, each with a
        check.
        """
        self._waiting_count = 0
        self._in_work: set[str] = set()

    @property
    def waiting_count(self) -> int:
        return self._waiting_count

    def add(self, client: str, check: T) -> T | None:
        """Let a check wait. Returns the check that has no place then, which may be this one."""
        self._waiting.setdefault(client, deque()).append(check)
        self._waiting_count += 1
        if self._waiting_count <= self._max_waiting:
            return None
        # The client of the new check loses where it has as many as another: else two clients that
        # send without pause would take each other's places, and their oldest checks would be the
        # only ones that are ever started.
        most = max(map(len, self._waiting.values()))
        is_own = len(self._waiting[client]) == most
        loser = client if is_own else self._first_client_with(most)
        lost = self._waiting[loser].pop()
        self._forget_one(loser)
        return lost

    def remove(self, client: str, check: T) -> None:
        """Take back a check that waits, if it still does."""
        checks = self._waiting.get(client, deque())
        kept = deque(each for each in checks if each is not check)
        if len(kept) < len(checks):
            self._waiting[client] = kept
            self._forget_one(client)

    def start_next(self) -> tuple[str, T] | None:
        """Client and check whose turn it is; None where none waits that may start."""
        if len(self._in_work) >= self._max_in_work:
            return None
        client = next((each for each in self._waiting if each not in self._in_work), None)
        if client is None:
            return None
        check = self._waiting[client].popleft()
        self._waiting.move_to_end(client)
        self._forget_one(client)
        self._in_work.add(client)
        return client, check

    def finish(self, client: str) -> None:
        """The check of a client that was in work has ended."""
        self._in_work.remove(client)

    def _first_client_with(self, count: int) -> str:
        return next(each for each, checks in self._waiting.items() if len(checks) == count)

    def _forget_one(self, client: str) -> None:
        """Count a check of a client that waits no longer."""
        self._waiting_count -= 1
        if not self._waiting[client]:
            del self._waiting[client]
