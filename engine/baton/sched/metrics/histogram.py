"""Histograms as the scheduler keeps them: a count per bucket, and a sum. The front only renders
them.

The bucket families are defined here once, for the metrics of the front and of the ranks:
exponential, factor 1.6 for seconds, powers of two for counts.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field


def exponential(first: float, factor: float, last: float) -> tuple[float, ...]:
    """Upper bounds first, first * factor, ... up to the first one that is at least `last`."""
    out = [first]
    while out[-1] < last:
        out.append(float(f"{out[-1] * factor:.4g}"))
    return tuple(out)


STAGE_BUCKETS = exponential(0.001, 1.6, 600.0)
"""Seconds that a stage of a request takes."""
GAP_BUCKETS = exponential(0.0005, 1.6, 2.0)
"""Seconds between two tokens."""
TOKEN_BUCKETS = exponential(1.0, 2.0, 2.0**18)
REQUEST_BUCKETS = (0.0, *exponential(1.0, 2.0, 2.0**12))
"""Numbers of requests; most observations are 0."""
_AHEAD = exponential(0.01, 2.5, 60.0)
SLACK_BUCKETS = (*(-bound for bound in reversed(_AHEAD)), 0.0, *_AHEAD)
"""Seconds left until a deadline; below 0 it was missed."""


@dataclass(slots=True)
class Histogram:
    """Bucket i counts the observations in (bounds[i-1], bounds[i]]; the last bucket has no upper
    bound.
    """

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    """All 0 when not given."""
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.sum += value * times
