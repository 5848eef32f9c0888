"""Share of the drafts made for one sequence that are the tokens drawn, of those compared."""

from __future__ import annotations

from collections.abc import Sequence

MEMORY = 0.95
"""Weight that earlier comparisons keep per token compared: about the last 20 count."""
PRIOR_TRIALS = 2.0
PRIOR_ACCEPTED = 1.0
"""Before anything is compared, every second draft is expected to be right."""


class Acceptance:
    def __init__(self) -> None:
        self._accepted = 0.0
        self._trials = 0.0

    @property
    def share(self) -> float:
        """Expected share of drafts that are drawn where those in front of them were, 0 to 1."""
        return (self._accepted + PRIOR_ACCEPTED) / (self._trials + PRIOR_TRIALS)

    def compare(self, drafts: Sequence[int], drawn: Sequence[int]) -> None:
        """Learn from the tokens that came where these drafts had been made.

        A draft behind the first wrong one says nothing: it was made for another beginning.
        """
        compared = min(len(drafts), len(drawn))
        right = 0
        while right < compared and drafts[right] == drawn[right]:
            right += 1
        trials = right + (right < compared)
        keep = MEMORY**trials
        self._accepted = self._accepted * keep + right
        self._trials = self._trials * keep + trials
