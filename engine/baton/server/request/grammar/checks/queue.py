"""Checks of grammars that wait for their turn, in order of arrival.

Large checks have a process of their own, so that small ones, which take milliseconds, do not wait for them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from baton.errors import QueueFull
from baton.server.request.grammar.checks.messages import CheckSetup
from baton.server.request.grammar.checks.process import CheckProcess
from baton.server.request.grammar.request_grammar import RequestGrammar

SMALL_CHECK_BYTES = 32 * 2**10
"""Schemas of requests in use are smaller, and checked within some 20 ms."""
MAX_WAITING = 256
WAIT_LIMIT_SECS = 15.0
"""A check whose turn comes later is refused: others take their seconds."""


@dataclass(eq=False)
class _CheckLane:
    """Process that checks grammars, and the thread that waits for it."""

    process: CheckProcess
    thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="grammar")
    )

    def check(self, request: bytes, param: str, arrival: float) -> RequestGrammar:
        """The grammar of a check. Runs on the thread."""
        if time.monotonic() - arrival > WAIT_LIMIT_SECS:
            raise QueueFull(
                f"the grammar waited {WAIT_LIMIT_SECS:g} s for others to be checked; try again later",
                retry_after_secs=2,
            )
        return self.process.check(request, param).grammar()

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)
        self.process.close()


class CheckQueue:
    """Waiting checks, and the processes that do them. Not thread-safe: called on the event loop."""

    def __init__(self, load_setup: Callable[[], CheckSetup]) -> None:
        self._small = _CheckLane(CheckProcess(load_setup))
        self._large = _CheckLane(CheckProcess(load_setup))
        self._waiting = 0

    async def check(self, request: bytes, param: str) -> RequestGrammar:
        """The grammar of a check (JSON of a `GrammarCheck`). Raises BadRequest, UnsupportedParameter or QueueFull.

        A check whose caller is cancelled before its turn is left out.
        """
        if self._waiting >= MAX_WAITING:
            raise QueueFull(
                f"{MAX_WAITING} grammars wait to be checked; try again later", retry_after_secs=1
            )
        lane = self._small if len(request) <= SMALL_CHECK_BYTES else self._large
        work = partial(lane.check, request, param, time.monotonic())
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(lane.thread, work)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        self._small.close()
        self._large.close()
