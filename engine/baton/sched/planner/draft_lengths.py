"""How many drafted tokens each row of a step gets: as many as make the answers grow fastest.

A row with k drafts, each drawn with probability a where those in front of it were, is expected to
give 1 + a + a^2 + ... + a^k tokens. The step takes longer by a known time per draft, and where any
row drafts, by the time in which the device waits for the host (no plan is made while a drafted
token is in flight). The choice maximizes

    expected tokens of all rows / seconds of the step

and is found by taking drafts in the order of their probabilities: each is worth it as long as it
raises the ratio. No draft pays in a large batch, because there a draft costs as much as a row.

Every PROBE_INTERVAL-th choice against all drafts takes the most promising one all the same: the
time of a draft is only measured in steps that have some, and a measurement that was too high once
would keep drafts away for ever.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

PROBE_INTERVAL = 64


class StepCosts(NamedTuple):
    """Predicted times of the step that is planned [s]."""

    plain: float
    """Without drafts."""
    per_draft: float
    wait: float
    """Added once where the step has drafts."""


class DraftCandidate(NamedTuple):
    handle: int
    most: int
    """Drafts that the row may have."""
    acceptance: float


def choose_draft_lengths(
    candidates: Sequence[DraftCandidate], rows: int, room: int, costs: StepCosts
) -> dict[int, int]:
    """Drafts by handle; rows without any are left out.

    Args:
        rows: all rows that extend an answer, with drafts or without.
        room: most drafts of the step.
    """
    heap = [
        (-candidate.acceptance, index)
        for index, candidate in enumerate(candidates)
        if candidate.most > 0 and candidate.acceptance > 0
    ]
    heapq.heapify(heap)
    lengths = [0] * len(candidates)
    tokens = float(rows)
    seconds = costs.plain + costs.wait
    while heap and room > 0:
        negative, index = heap[0]
        # The draft raises the ratio if it gives more tokens per second than the step does so far.
        # All that are left give fewer.
        if -negative * seconds < costs.per_draft * tokens:
            break
        tokens -= negative
        seconds += costs.per_draft
        room -= 1
        lengths[index] += 1
        candidate = candidates[index]
        if lengths[index] < candidate.most:
            heapq.heapreplace(heap, (negative * candidate.acceptance, index))
        else:
            heapq.heappop(heap)
    # Together they may not make up for the wait.
    if tokens * costs.plain < rows * seconds:
        return {}
    chosen = zip(candidates, lengths, strict=True)
    return {candidate.handle: length for candidate, length in chosen if length}
