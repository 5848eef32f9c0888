"""Requests that wait for their grammar: known to the rank, not to the scheduler yet.

They hold no pages and no slot and delay no other request. One ends here when it is aborted, when
its deadline passes, or when its grammar cannot be compiled; else the scheduler gets it once the
grammar is there, with its arrival unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.errors import (
    BadRequest,
    DeadlineMissed,
    EngineError,
    RequestTimeout,
    UnsupportedParameter,
)
from baton.runtime.grammar.limits import COMPILE_LIMIT_SECS
from baton.sched.metrics.histogram import Histogram
from baton.sched.types.request import ValidatedRequest

if TYPE_CHECKING:  # simulated engines have no grammars, and load nothing for them
    from baton.runtime.grammar.store import GrammarStore

Settled = tuple[ValidatedRequest, EngineError | None]
"""A request that waits no longer; it may be queued, or ends with the error."""


@dataclass(eq=False)
class GrammarQueue:
    store: GrammarStore | None
    """None: this engine follows no grammars."""
    unavailable: str = "this engine was started without structured output"
    """Why, as the first half of a sentence."""
    aborts_missed_deadlines: bool = False
    _requests: dict[int, ValidatedRequest] = field(default_factory=dict)
    """By handle, in order of arrival."""

    @property
    def count(self) -> int:
        return len(self._requests)

    def hold_request(self, req: ValidatedRequest) -> bool:
        """Keep a request that has to wait for its grammar. False: it may be queued now.

        Raises UnsupportedParameter or QueueFull.
        """
        params = req.params
        if not params.is_constrained:
            return False
        if self.store is None:
            cause = "a schema or grammar" if params.grammar else "a limit of its reasoning"
            raise UnsupportedParameter(f"{self.unavailable}; send the request without {cause}")
        # A limit of the reasoning alone needs no compiled grammar.
        if not params.grammar:
            return False
        resumed = params.resumed
        output = req.prompt[len(req.prompt) - resumed :].tolist() if resumed else ()
        # The grammar is compiled already: the request loses no time.
        if self.store.request(req.handle, params.grammar, output, params.reasoning):
            return False
        self._requests[req.handle] = req
        return True

    def take_settled(self, now: float) -> Iterator[Settled]:
        """Take out the requests that wait no longer at `now`."""
        if self.store is None:
            return
        for outcome in self.store.take_outcomes():
            req = self._requests.pop(outcome.handle, None)
            # Aborted or expired while the grammar was compiled.
            if req is not None:
                yield req, outcome.error
        yield from self._take_expired(now)
        overdue = self.store.overdue_job()
        late = None if overdue is None else self._requests.pop(overdue, None)
        if late is not None:
            yield (
                late,
                BadRequest(
                    f"the grammar was not compiled within {COMPILE_LIMIT_SECS:g} s; "
                    "simplify the schema or grammar"
                ),
            )

    def remove(self, handle: int) -> ValidatedRequest | None:
        return self._requests.pop(handle, None)

    def find_in_rooms(self, rooms: Collection[int]) -> list[int]:
        """Handles of the requests with these bootstrap rooms."""
        return [
            handle
            for handle, req in self._requests.items()
            if req.rendezvous is not None and req.rendezvous.room in rooms
        ]

    def counters(self) -> dict[str, float]:
        return {} if self.store is None else dict(self.store.counters)

    def histograms(self) -> dict[str, Histogram]:
        if self.store is None:
            return {}
        return {
            "grammar_compile_seconds": self.store.compile_seconds,
            "grammar_mask_seconds": self.store.filler.seconds,
        }

    def handles(self) -> list[int]:
        return list(self._requests)

    def __contains__(self, handle: int) -> bool:
        return handle in self._requests

    def next_deadline(self) -> float | None:
        """Earliest deadline of a request here."""
        return min(filter(None, map(self._deadline_of, self._requests.values())), default=None)

    def oldest_arrival(self) -> float | None:
        return min((req.arrival for req in self._requests.values()), default=None)

    def _deadline_of(self, req: ValidatedRequest) -> float | None:
        limits = [req.deadline, req.ttft_deadline if self.aborts_missed_deadlines else None]
        return min((limit for limit in limits if limit is not None), default=None)

    def _take_expired(self, now: float) -> Iterator[Settled]:
        for handle, req in list(self._requests.items()):
            limit = self._deadline_of(req)
            if limit is None or limit > now:
                continue
            del self._requests[handle]
            if limit == req.deadline:
                yield (
                    req,
                    RequestTimeout(
                        f"request {req.rid} passed its deadline while its grammar was compiled; "
                        "retry, with a longer deadline_ms if it stated one, or simplify the schema"
                    ),
                )
            else:
                yield (
                    req,
                    DeadlineMissed(
                        f"request {req.rid} waits for its grammar and its first token cannot come "
                        "within its ttft_deadline_ms any more; retry with a longer one, or "
                        "simplify the schema"
                    ),
                )
