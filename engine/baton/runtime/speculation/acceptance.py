"""Share of the drafts that are the tokens drawn, measured where both are known."""

from __future__ import annotations

from collections.abc import Sequence

SEQ_MEMORY = 0.95
"""Weight that comparisons of a sequence keep with each later one: about the last 20 count."""
RANK_MEMORY = 0.995
"""Likewise for all sequences of a rank: about the last 200."""
PRIOR_TRIALS = 2.0
"""Comparisons that the expectation at the beginning is worth."""
FIRST_SHARE = 0.5
"""Expected of a rank before anything is compared."""


class Acceptance:
    def __init__(self, expected: float, memory: float) -> None:
        """
        Args:
            expected: share until drafts are compared.
        """
        self._expected = expected
        self._memory = memory
        self._accepted = 0.0
        self._trials = 0.0

    @property
    def share(self) -> float:
        """Expected share of drafts that are drawn where those in front of them were, 0 to 1."""
        accepted = self._accepted + self._expected * PRIOR_TRIALS
        return accepted / (self._trials + PRIOR_TRIALS)

    def learn(self, right: int, trials: int) -> None:
        """So many of the drafts that were compared were right."""
        keep = self._memory**trials
        self._accepted = self._accepted * keep + right
        self._trials = self._trials * keep + trials


def compare_drafts(drafts: Sequence[int], drawn: Sequence[int]) -> tuple[int, int]:
    """How many drafts are the tokens that came in their places, and how many could be compared.

    A draft behind the first wrong one says nothing: it was made for another beginning.
    """
    compared = min(len(drafts), len(drawn))
    right = 0
    while right < compared and drafts[right] == drawn[right]:
        right += 1
    return right, right + (right < compared)
