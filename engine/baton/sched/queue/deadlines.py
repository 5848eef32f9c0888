"""When requests run out of time: one heap for the deadlines of all live requests, of both kinds.

Every request has a limit for its whole answer (`--request-timeout-secs`, the field `deadline_ms`);
under `--deadline-miss-action abort` the time that its client gave for the first token
(`ttft_deadline_ms`) is one too.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator

from baton.sched.types.request import ValidatedRequest


class DeadlineQueue:
    """Entries of requests that have ended stay until their time comes, or until they are the larger
    part.
    """

    def __init__(self, *, with_first_token: bool) -> None:
        self._with_first_token = with_first_token
        self._heap: list[tuple[float, bool, int]] = []
        """(time, for the whole answer and not only its first token, handle)."""

    def watch_request(self, req: ValidatedRequest, alive: Container[int], alive_count: int) -> None:
        if req.deadline is not None:
            heapq.heappush(self._heap, (req.deadline, True, req.handle))
        if self._with_first_token and req.ttft_deadline is not None:
            heapq.heappush(self._heap, (req.ttft_deadline, False, req.handle))
        if len(self._heap) > 1024 + 4 * alive_count:
            self._heap = [entry for entry in self._heap if entry[2] in alive]
            heapq.heapify(self._heap)

    def pop_passed(self, now: float) -> Iterator[tuple[int, bool]]:
        """Handles whose time is over, perhaps after they ended, and whether it was for the whole
        answer; each once.
        """
        while self._heap and self._heap[0][0] <= now:
            _, is_whole, handle = heapq.heappop(self._heap)
            yield handle, is_whole

    def next_deadline(self) -> float | None:
        return self._heap[0][0] if self._heap else None
