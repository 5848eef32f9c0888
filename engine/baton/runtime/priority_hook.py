"""--priority-adjustment-function: the operator's own order of requests, called between plans.

1. `load_function` imports `module:callable` at the start; a mistake there ends the start with a
   sentence.
2. A request is due when it was submitted, and again every --priority-adjust-interval-ms while it
   waits. `run_due` calls the function for requests that are due, at most MAX_CALLS per turn, the
   longest due first, and hands the results to the scheduler: a number replaces the priority in the
   queue order (never in preemption), None gives the request its own again.
3. An answer that is no number within the bounds of a request's priority, or a call that raises,
   changes nothing and is counted.
4. A hook that takes more than 1 ms per turn in the mean of 10 s is switched off, with one warning;
   the priorities that it has given stay in force.

The clock is here and not in the scheduler: `baton replay` repeats the numbers, not the calls.
"""

from __future__ import annotations

import heapq
import importlib
import logging
import time
from collections.abc import Callable

from baton.config.classes import LEAST_PRIORITY, MOST_PRIORITY
from baton.errors import ConfigError
from baton.sched.queue.priority_hook import LoadView, RequestView
from baton.sched.scheduler import Scheduler

log = logging.getLogger("baton.engine")

Adjust = Callable[[RequestView, LoadView], float | None]
MAX_CALLS = 256
"""Per turn: with a whole queue due at once, running requests still get their next token."""
MAX_MEAN_SECS = 0.001
JUDGED_EVERY_SECS = 10.0


def load_function(spec: str) -> Adjust:
    """Import the function that `module:callable` names. Raises ConfigError."""
    flag = f"--priority-adjustment-function {spec}"
    module, _, name = spec.partition(":")
    if not module or not name:
        raise ConfigError(f"{flag}: give it as module:callable")
    try:
        target = importlib.import_module(module)
    except Exception as err:
        raise ConfigError(
            f"{flag}: {module} cannot be imported ({type(err).__name__}: {err}); "
            "is its folder in PYTHONPATH?"
        ) from err
    for part in name.split("."):
        if not hasattr(target, part):
            raise ConfigError(f"{flag}: {module} has no {name}")
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError(f"{flag}: {name} is a {type(target).__name__}, which cannot be called")
    return target


def read_priority(answer: object) -> float | None:
    """Read the answer of an adjustment function as a priority; None: the request's own.

    Raises TypeError for what is no number, ValueError beyond the bounds of a request's `priority`.
    """
    if answer is None:
        return None
    if isinstance(answer, (bool, str, bytes)) or not hasattr(answer, "__float__"):
        raise TypeError(f"{answer!r:.100} is no priority; return a number or None")
    priority = float(answer)
    if not LEAST_PRIORITY <= priority <= MOST_PRIORITY:
        raise ValueError(
            f"{priority} is no priority; "
            f"return a number from {LEAST_PRIORITY} to {MOST_PRIORITY}, or None"
        )
    return priority


class PriorityHook:
    def __init__(
        self, adjust: Adjust, interval_secs: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.errors = 0
        self.is_off = False
        self._adjust = adjust
        self._interval = interval_secs
        self._clock = clock
        self._due: list[tuple[float, int]] = []
        self._judged_from: float | None = None
        self._turns = 0
        self._spent_secs = 0.0

    def watch_request(self, handle: int, now: float) -> None:
        """Call the function for a new request from now on."""
        if not self.is_off:
            heapq.heappush(self._due, (now, handle))

    def run_due(self, sched: Scheduler, now: float) -> None:
        """Call the function for requests due at `now` (the clock of ValidatedRequest.arrival)."""
        if self.is_off or not self._due or self._due[0][0] > now:
            return
        load_view = sched.report.load_view()
        changed: dict[int, float | None] = {}
        started = self._clock()
        calls = 0
        while self._due and self._due[0][0] <= now and calls < MAX_CALLS:
            _, handle = heapq.heappop(self._due)
            # A request that has ended is not due again: the heap would keep its handle for ever.
            if not sched.is_alive(handle):
                continue
            heapq.heappush(self._due, (now + self._interval, handle))
            view = sched.report.request_view(handle, now)
            # It runs: a priority of the queue changes nothing until it waits again.
            if view is not None:
                calls += 1
                self._call_function(handle, view, load_view, changed)
        if changed:
            sched.adjust_priorities(changed)
        if calls:
            self._judge_cost(now, self._clock() - started)

    def _call_function(
        self, handle: int, view: RequestView, load_view: LoadView, changed: dict[int, float | None]
    ) -> None:
        try:
            value = read_priority(self._adjust(view, load_view))
        # Foreign code may raise anything, and no request may suffer from it.
        except (Exception, SystemExit) as err:  # noqa: BLE001
            self.errors += 1
            if self.errors == 1:
                log.warning(
                    "--priority-adjustment-function failed (later failures are only counted): %r",
                    err,
                )
            return
        changed[handle] = value

    def _judge_cost(self, now: float, seconds: float) -> None:
        if self._judged_from is None:
            self._judged_from = now
        self._turns += 1
        self._spent_secs += seconds
        if now - self._judged_from < JUDGED_EVERY_SECS:
            return
        mean = self._spent_secs / self._turns
        if mean > MAX_MEAN_SECS:
            self.is_off = True
            self._due.clear()
            log.warning(
                "--priority-adjustment-function is switched off: it took %.1f ms per turn over the "
                "last %.0f s, 1 ms is allowed", mean * 1e3, now - self._judged_from,
            )  # fmt: skip
        self._judged_from = now
        self._turns = 0
        self._spent_secs = 0.0
