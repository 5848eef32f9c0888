"""Share of the drafts that are the tokens drawn, measured where both are known."""

from __future__ import annotations

from bisect import bisect_right
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
        return self.share_above(0.0)

    def share_above(self, least: float) -> float:
        """The share, expected to be `least` or more until drafts are compared."""
        accepted = self._accepted + max(self._expected, least) * PRIOR_TRIALS
        return accepted / (self._trials + PRIOR_TRIALS)

    def learn(self, right: int, trials: int) -> None:
        """So many of the drafts that were compared were right."""
        keep = self._memory**trials
        self._accepted = self._accepted * keep + right
        self._trials = self._trials * keep + trials


STREAKS = (0, 1, 4, 8)
"""Drafts in a row that were right, from each of which on the next one is counted apart: where an
answer copies a text, most are, and elsewhere the first one is wrong more often than not."""


class AcceptanceByStreak:
    """The share by how many drafts in front were right without one that was wrong."""

    def __init__(self, expected: Sequence[float], memory: float) -> None:
        """
        Args:
            expected: shares until drafts are compared, one for each of STREAKS.
        """
        self._of_streaks = [Acceptance(share, memory) for share in expected]

    @property
    def shares(self) -> list[float]:
        """One for each of STREAKS. Behind more of them that were right, as many or more are
        expected to be."""
        shares = [0.0]
        for each in self._of_streaks:
            shares.append(each.share_above(shares[-1]))
        return shares[1:]

    def share(self, streak: int) -> float:
        return self.shares[_place(streak)]

    def learn(self, streak: int, right: int, trials: int) -> None:
        """So many of the drafts that were compared were right, behind so many others."""
        for place in range(trials):
            self._of_streaks[_place(streak + place)].learn(int(place < right), 1)


def _place(streak: int) -> int:
    """Of the streak's kind in STREAKS."""
    return bisect_right(STREAKS, streak) - 1


def compare_drafts(drafts: Sequence[int], drawn: Sequence[int]) -> tuple[int, int]:
    """How many drafts are the tokens that came in their places, and how many could be compared.

    A draft behind the first wrong one says nothing: it was made for another beginning.
    """
    compared = min(len(drafts), len(drawn))
    right = 0
    while right < compared and drafts[right] == drawn[right]:
        right += 1
    return right, right + (right < compared)
