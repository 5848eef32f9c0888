"""How many drafted tokens each row of a step gets: as many as make the answers grow fastest.

A row with k drafts, each drawn with probability a where those in front of it were, is expected to
give 1 + a + a^2 + ... + a^k tokens. The step takes longer by a known time per draft, and where any
row drafts, by the time in which the device waits for the host (no plan is made while a drafted
token is in flight). The choice maximizes

    expected tokens of all rows / seconds of the step

and is found by taking drafts in the order of their probabilities: each is worth it as long as it
raises the ratio. No draft pays in a large batch, because there a draft costs as much as a row.

Where a model makes the drafts, it does so one token at a time for all rows that get one more: each
of these drafting steps takes a known time, too. The choice is made for each number of drafting
steps, from one on, until one more lowers the ratio.

Where PROBE_INTERVAL steps had no drafts, the next one takes the most promising one all the same:
the time of a draft is only measured in steps that have some, and a measurement that was too high
once would keep drafts away for ever.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

PROBE_INTERVAL = 256
"""A probe is a step that nothing overlaps, so it is rarer than one of a hundred."""


class StepCosts(NamedTuple):
    """Predicted times of the step that is planned [s]."""

    plain: float
    """Without drafts."""
    per_draft: float
    wait: float
    """Added once where the step has drafts."""
    per_drafting_step: float = 0.0
    """Added for each token of the longest draft."""


class DraftingCosts(NamedTuple):
    """Predicted times of making drafts, in front of the step that has them [s]."""

    per_step: float
    """Of one more token for all rows that get one."""
    per_draft: float
    """Of each of those tokens on top."""


NO_DRAFTING_COSTS = DraftingCosts(0.0, 0.0)
"""Of drafts that are looked up, or made already."""


class DraftCandidate(NamedTuple):
    handle: int
    most: int
    """Drafts that the row may have."""
    acceptance: float


class DraftChoice(NamedTuple):
    lengths: dict[int, int]
    """Drafts by handle; rows without any are left out."""
    tokens: float
    """Expected of all rows."""
    seconds: float

    def is_slower_than(self, other: DraftChoice) -> bool:
        return self.tokens * other.seconds < other.tokens * self.seconds


def choose_draft_lengths(
    candidates: Sequence[DraftCandidate], rows: int, room: int, costs: StepCosts
) -> dict[int, int]:
    """Drafts by handle; rows without any are left out.

    Args:
        rows: all rows that extend an answer, with drafts or without.
        room: most drafts of the step.
    """
    longest = max((candidate.most for candidate in candidates), default=0)
    # Where a drafting step costs nothing, one choice among all lengths is the best one.
    shortest = 1 if costs.per_drafting_step else longest
    best: DraftChoice | None = None
    for steps in range(shortest, longest + 1):
        choice = _choose_within(candidates, rows, room, costs, steps)
        # Each further step adds less than the one before and takes as long.
        if best is not None and choice.is_slower_than(best):
            break
        best = choice
    # Together they may not make up for the wait.
    if best is None or best.is_slower_than(DraftChoice({}, rows, costs.plain)):
        return {}
    return best.lengths


def _choose_within(
    candidates: Sequence[DraftCandidate], rows: int, room: int, costs: StepCosts, steps: int
) -> DraftChoice:
    """The best choice with at most `steps` drafts of a row, whose time is spent."""
    heap = [
        (-candidate.acceptance, index)
        for index, candidate in enumerate(candidates)
        if candidate.most > 0 and candidate.acceptance > 0
    ]
    heapq.heapify(heap)
    lengths = [0] * len(candidates)
    tokens = float(rows)
    seconds = costs.plain + costs.wait + steps * costs.per_drafting_step
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
        if lengths[index] < min(candidate.most, steps):
            heapq.heapreplace(heap, (negative * candidate.acceptance, index))
        else:
            heapq.heappop(heap)
    chosen = zip(candidates, lengths, strict=True)
    by_handle = {candidate.handle: length for candidate, length in chosen if length}
    return DraftChoice(by_handle, tokens, seconds)
