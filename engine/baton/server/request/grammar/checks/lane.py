"""A lane of checks: those that wait, by client, and the processes that do them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from baton.errors import EngineError, QueueFull
from baton.server.request.grammar.checks.messages import CheckReply, CheckSetup
from baton.server.request.grammar.checks.process import CheckProcess, SlowCheck
from baton.server.request.grammar.checks.turns import CheckTurns

log = logging.getLogger("baton.grammar")


@dataclass(frozen=True, slots=True)
class CheckOrder:
    """A check that a request needs."""

    request: bytes
    """JSON of a `GrammarCheck`."""
    digest: bytes
    param: str
    """Field of the body that is named where the check takes too long."""
    client: str
    """Client whose turn it takes."""


OnEnd = Callable[[CheckOrder, float, bool], None]
"""Called when a check has ended, with its CPU time [seconds], and True if it took more than the
lane allows.
"""


@dataclass(frozen=True, slots=True)
class LaneLimits:
    name: str
    cpu_secs: float
    """CPU time of a check."""
    processes: int
    niceness: int
    max_waiting: int
    wait_secs: float
    """A check that has not begun by then is refused."""


@dataclass(eq=False, slots=True)
class _WaitingCheck:
    order: CheckOrder
    before: Callable[[], CheckReply | None]
    reply: asyncio.Future[CheckReply] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    expiry: asyncio.TimerHandle | None = None

    def end(self, outcome: CheckReply | Exception) -> None:
        """Answer the request that waits, unless its client has left."""
        if self.reply.done():
            return
        if isinstance(outcome, Exception):
            self.reply.set_exception(outcome)
        else:
            self.reply.set_result(outcome)


class CheckLane:
    """Not thread-safe: called on the event loop.

    A check that is in work goes on when its caller is cancelled, and its client's next one waits
    for its end: a client that leaves and comes again has no more of the lane than one that stays.
    """

    def __init__(
        self, limits: LaneLimits, load_setup: Callable[[], CheckSetup], on_end: OnEnd
    ) -> None:
        self._limits = limits
        self._on_end = on_end
        self._turns: CheckTurns[_WaitingCheck] = CheckTurns(
            max_waiting=limits.max_waiting, max_in_work=limits.processes
        )
        self._processes = [
            CheckProcess(load_setup, limits.niceness) for _ in range(limits.processes)
        ]
        self._idle = list(reversed(self._processes))
        self._threads = ThreadPoolExecutor(limits.processes, thread_name_prefix="grammar")
        self._runs: set[asyncio.Task[None]] = set()

    @property
    def waiting_count(self) -> int:
        return self._turns.waiting_count

    async def check(self, order: CheckOrder, before: Callable[[], CheckReply | None]) -> CheckReply:
        """The reply to a check. Raises SlowCheck, QueueFull, and what `before` and
        `CheckProcess.check` raise.

        Args:
            before: called when the turn has come; a reply of it spares the check.
        """
        waiting = _WaitingCheck(order, before)
        lost = self._turns.add(order.client, waiting)
        if lost is not None:
            lost.end(self._full())
        loop = asyncio.get_running_loop()
        waiting.expiry = loop.call_later(self._limits.wait_secs, self._expire, waiting)
        self._start_checks()
        try:
            return await waiting.reply
        finally:
            waiting.expiry.cancel()
            self._turns.remove(order.client, waiting)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()

    def _full(self) -> QueueFull:
        return QueueFull(
            f"{self._limits.max_waiting} grammars wait to be checked; try again later",
            retry_after_secs=1,
        )

    def _expire(self, waiting: _WaitingCheck) -> None:
        self._turns.remove(waiting.order.client, waiting)
        waiting.end(
            QueueFull(
                f"the grammar waited {self._limits.wait_secs:g} s for others to be checked; try "
                "again later",
                retry_after_secs=2,
            )
        )

    def _start_checks(self) -> None:
        """Start the checks whose turn it is, one per idle process."""
        while (turn := self._turns.start_next()) is not None:
            client, waiting = turn
            if waiting.expiry is not None:
                waiting.expiry.cancel()
            run = asyncio.create_task(self._run(client, waiting, self._idle.pop()))
            self._runs.add(run)  # the loop holds tasks by weak references
            run.add_done_callback(self._runs.discard)

    async def _run(self, client: str, waiting: _WaitingCheck, process: CheckProcess) -> None:
        try:
            outcome = await self._outcome(waiting, process)
        finally:
            self._idle.append(process)
            self._turns.finish(client)
            self._start_checks()
        waiting.end(outcome)

    async def _outcome(
        self, waiting: _WaitingCheck, process: CheckProcess
    ) -> CheckReply | Exception:
        order = waiting.order
        loop = asyncio.get_running_loop()
        started = time.monotonic()
        try:
            if (known := waiting.before()) is not None:
                return known
            reply = await loop.run_in_executor(
                self._threads, process.check, order.request, order.param, self._limits.cpu_secs
            )
        except (EngineError, SlowCheck) as err:
            # The process that has ended took its times with it.
            at_most_secs = min(time.monotonic() - started, self._limits.cpu_secs)
            self._on_end(order, at_most_secs, isinstance(err, SlowCheck))
            return err
        except Exception:
            # No process can be started, say. Without an outcome the request would wait for ever,
            # because its expiry is cancelled and no caller awaits this task.
            log.exception("a grammar cannot be checked")
            return EngineError("the grammar cannot be checked; see the log")
        self._on_end(order, reply.cpu_secs, False)
        return reply
