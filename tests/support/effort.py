"""How much a random test tries: a part of its examples in `make test`, all in `make test-all`.

Hypothesis draws other examples in each run, so that many short runs try as much as a long one; the
other seeds of a test that has them are left to `make test-all`.
`make test-all` sets BATON_TEST_EFFORT=all.
"""

from __future__ import annotations

import os

EVERY = os.environ.get("BATON_TEST_EFFORT") == "all"
PART = 4
"""`make test` tries one of so many examples."""
FEWEST = 8


def examples(count: int) -> int:
    """Return `max_examples` of a property test that tries `count` in `make test-all`."""
    return count if EVERY else max(count // PART, FEWEST)


def seeds(count: int) -> range:
    """Return the seeds of a test that has `count` of them in `make test-all`."""
    return range(min(count, examples(count)))
