"""Checks of grammars: which lane does one, and which are refused at once.

1. a small check has a lane of its own, in which each may take little CPU time, so that it waits for
   no slow one;
2. what takes longer moves to the lane of large checks, where it begins again. Its client needs CPU
   time of the minute there (`CheckBudget`);
3. what is too slow for that lane too is refused, and again at once for some minutes (`SlowChecks`).

In both lanes clients take turns (`CheckTurns`).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from enum import Enum

from baton.errors import QueueFull, RateLimited
from baton.server.fields import bad
from baton.server.request.grammar.checks.history import CheckBudget, SlowChecks
from baton.server.request.grammar.checks.lane import CheckLane, CheckOrder, LaneLimits
from baton.server.request.grammar.checks.messages import CheckReply, CheckSetup
from baton.server.request.grammar.checks.process import SlowCheck
from baton.server.request.grammar.request_grammar import RequestGrammar

SMALL_CHECK_BYTES = 32 * 2**10
"""Schemas of requests in use are smaller, and checked within some 20 ms."""
SMALL_LANE = LaneLimits(
    name="small", cpu_secs=0.05, processes=1, niceness=5, max_waiting=256, wait_secs=15.0
)
"""Answers in progress go before checks where cores are scarce (`niceness`), and small checks before
large ones.
"""
LARGE_LANE = LaneLimits(
    name="large", cpu_secs=5.0, processes=2, niceness=10, max_waiting=256, wait_secs=30.0
)
"""llguidance's own limits end a check after some 2.5 s of CPU time. With two processes, a client
that sends one slow check after the other leaves one of them to others.
"""


TOO_SLOW = f"was not checked within {LARGE_LANE.cpu_secs:g} s of CPU time"


class CheckOutcome(Enum):
    """Outcome of a check, for the metric."""

    CHECKED = "checked"
    """Accepted, or refused for what it says."""
    MOVED = "moved"
    """Too slow for the lane of small ones; it has another outcome besides."""
    TOO_SLOW = "too_slow"
    KNOWN_SLOW = "known_slow"
    """Refused at once, because an equal one was too slow."""
    OVER_BUDGET = "over_budget"
    QUEUE_FULL = "queue_full"


class CheckQueue:
    """Waiting checks, and the processes that do them. Not thread-safe: called on the event loop."""

    def __init__(
        self,
        load_setup: Callable[[], CheckSetup],
        secs_per_minute: float,
        find_known: Callable[[bytes], RequestGrammar | None] = lambda digest: None,
    ) -> None:
        """
        Args:
            secs_per_minute: CPU time of slow checks that a client may use; 0: without limit.
            find_known: the grammar that a check with this digest has given.
        """
        self._budget = CheckBudget(secs_per_minute)
        self._secs_per_minute = secs_per_minute
        self._slow = SlowChecks()
        self._find_known = find_known
        self._small = CheckLane(SMALL_LANE, load_setup, self._on_small_end)
        self._large = CheckLane(LARGE_LANE, load_setup, self._on_large_end)
        self.outcomes: Counter[CheckOutcome] = Counter(dict.fromkeys(CheckOutcome, 0))
        self.cpu_secs: dict[str, float] = {SMALL_LANE.name: 0.0, LARGE_LANE.name: 0.0}
        """CPU time of checks by lane."""

    @property
    def waiting(self) -> dict[str, int]:
        """Checks that wait, by lane."""
        return {
            SMALL_LANE.name: self._small.waiting_count,
            LARGE_LANE.name: self._large.waiting_count,
        }

    async def check(self, order: CheckOrder) -> RequestGrammar:
        """The grammar of a check. Raises BadRequest, UnsupportedParameter, QueueFull or
        RateLimited.

        A check whose caller is cancelled before its turn is left out.
        """
        self._refuse_slow(order)
        try:
            reply = await self._reply(order)
        except QueueFull:
            self.outcomes[CheckOutcome.QUEUE_FULL] += 1
            raise
        self.outcomes[CheckOutcome.CHECKED] += 1
        return reply.grammar()

    def close(self) -> None:
        self._small.close()
        self._large.close()

    async def _reply(self, order: CheckOrder) -> CheckReply:
        if len(order.request) <= SMALL_CHECK_BYTES:
            try:
                return await self._small.check(order, lambda: self._known_reply(order))
            except SlowCheck:
                self.outcomes[CheckOutcome.MOVED] += 1
        # Before it waits, and when its turn has come: its client's others may have used the time
        # meanwhile.
        self._refuse_over_budget(order)
        try:
            return await self._large.check(order, lambda: self._reply_before_large(order))
        except SlowCheck:
            self.outcomes[CheckOutcome.TOO_SLOW] += 1
            raise bad(order.param, f"{TOO_SLOW}; simplify it") from None

    def _known_reply(self, order: CheckOrder) -> CheckReply | None:
        """The reply that an equal check has got since this one waits."""
        grammar = self._find_known(order.digest)
        return None if grammar is None else CheckReply.of_grammar(grammar)

    def _reply_before_large(self, order: CheckOrder) -> CheckReply | None:
        self._refuse_slow(order)
        self._refuse_over_budget(order)
        return self._known_reply(order)

    def _refuse_slow(self, order: CheckOrder) -> None:
        remaining_secs = self._slow.remaining_secs(order.digest, time.monotonic())
        if remaining_secs > 0.0:
            self.outcomes[CheckOutcome.KNOWN_SLOW] += 1
            minutes = math.ceil(remaining_secs / 60)
            raise bad(
                order.param,
                f"{TOO_SLOW} before; simplify it (it is not tried again for {minutes} min)",
            )

    def _refuse_over_budget(self, order: CheckOrder) -> None:
        wait_secs = self._budget.wait_secs(order.client, time.monotonic())
        if wait_secs > 0.0:
            self.outcomes[CheckOutcome.OVER_BUDGET] += 1
            retry_secs = math.ceil(wait_secs)
            raise RateLimited(
                f"this client has used its {self._secs_per_minute:g} s of CPU time per minute for "
                "schemas and grammars "
                f"that take long to check; send simpler ones, or retry in {retry_secs} s",
                param=order.param,
                retry_after_secs=retry_secs,
            )

    def _on_small_end(self, order: CheckOrder, cpu_secs: float, is_slow: bool) -> None:
        self.cpu_secs[SMALL_LANE.name] += cpu_secs
        if is_slow:
            self._budget.spend(order.client, cpu_secs, time.monotonic())

    def _on_large_end(self, order: CheckOrder, cpu_secs: float, is_slow: bool) -> None:
        now = time.monotonic()
        self.cpu_secs[LARGE_LANE.name] += cpu_secs
        self._budget.spend(order.client, cpu_secs, now)
        if is_slow:
            self._slow.add(order.digest, now)
