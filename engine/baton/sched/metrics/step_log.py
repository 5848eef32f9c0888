"""Decisions of the planner and their reasons: one record per plan, the last ones in a ring.

The ring answers `GET /v1/scheduler/steps`; a shell may also take every record as it is made
(`sink`, --decision-log). Times of plans that chose nothing although requests wait are recorded when
they begin, not while they last.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple

from baton.sched.types.plan import ForwardMode, StopReason

RING = 256
"""Records kept in memory."""


class StepDecision(NamedTuple):
    """Record of a plan.

    Handles are the front's numbers of requests (its log has them beside the rid).
    """

    step: int
    """Number of the plan; for an idle one that of the last plan made."""
    now: float
    """Seconds on the scheduler's monotonic clock."""
    mode: str
    """sched.types.plan.ForwardMode; idle: nothing could be planned though requests wait."""
    stopped_by: str
    """Why no further prompt tokens were taken (sched.types.plan.StopReason)."""
    policy: str
    decode_rows: int
    drafted_tokens: int
    """In decode rows, beside the known token of each."""
    prefill_tokens: int
    prefill_requests: int
    token_budget: int
    """Most tokens of a step, decode rows included."""
    seconds_budget: float | None
    """Time limit of the step's prompts (--step-target-ms); None: there is no such limit."""
    request_budget: int | None
    """Most prompts of a step (--prefill-max-requests)."""
    pages_available: int
    """Free or evictable, after this plan."""
    pages_reserved: int | None
    """Expected growth of running requests, as the last admission of this plan saw it; None: none
    was tried.
    """
    slots_free: int
    new_token_ratio: float
    queued: dict[str, int]
    """Waiting requests by class, after this plan."""
    admitted: tuple[int, ...]
    requeued: tuple[tuple[int, str], ...]
    """(handle, reason): retracted (memory), preempted (priority, slots), since the record before
    suspended (admin).
    """


class StepLog:
    def __init__(self) -> None:
        self._ring: deque[StepDecision] = deque(maxlen=RING)
        self.sink: Callable[[StepDecision], None] | None = None
        self.steps: Counter[tuple[ForwardMode, StopReason]] = Counter()

    def record(self, decision: StepDecision) -> None:
        self._ring.append(decision)
        if self.sink is not None:
            self.sink(decision)

    def is_new_reason(self, stopped_by: StopReason) -> bool:
        """True if the last record does not have this reason for planning nothing."""
        if stopped_by is StopReason.QUEUE_EMPTY:
            return False
        if not self._ring:
            return True
        last = self._ring[-1]
        was_idle = last.mode == ForwardMode.IDLE.value
        return not was_idle or last.stopped_by != stopped_by.value

    def recent(self, n: int = RING) -> list[dict[str, Any]]:
        """The last n records, oldest first, as JSON objects."""
        return [decision._asdict() for decision in list(self._ring)[max(len(self._ring) - n, 0) :]]

    def counters(self) -> dict[str, float]:
        return {
            f'steps_total{{mode="{mode.value}",stopped_by="{stop.value}"}}': float(n)
            for (mode, stop), n in self.steps.items()
        }
