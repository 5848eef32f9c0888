"""Which slots of a draft model's KV pool hold the K and V of known tokens.

The draft model has a page for each page of the target's pool, under the same number, so a
sequence's page table is that of both models. What is in a draft page is known for one generation
of the page (`PageAllocator.generations`): a page that was handed out again, pulled from another
node or copied back from the host is empty here, whatever was computed into it before.

Invariant: the first `_filled` slots of a page hold K and V of the tokens that all its users have
there. A page has several users only through the prefix tree, which joins equal beginnings.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

NO_GENERATION = -1


class DraftPages:
    def __init__(self, page_size: int, generations: array[int]) -> None:
        """
        Args:
            generations: by page of the target's pool, as it changes.
        """
        self._page_size = page_size
        self._current: NDArray[np.int64] = np.frombuffer(generations, np.int64)
        self._generation = np.full(len(generations), NO_GENERATION, np.int64)
        """By page: the one in which its slots were filled."""
        self._filled = np.zeros(len(generations), np.int64)

    def count_covered(self, pages: array[int]) -> int:
        """How many tokens, from the first one on, have their K and V in these pages.

        Cost: O(pages), a few microseconds per thousand.
        """
        table = np.frombuffer(pages, np.int32)
        is_current = self._generation[table] == self._current[table]
        filled = np.where(is_current, self._filled[table], 0)
        partial = np.flatnonzero(filled < self._page_size)
        if not len(partial):
            return len(table) * self._page_size
        first = int(partial[0])
        return first * self._page_size + int(filled[first])

    def fill(self, pages: array[int], first: int, end: int) -> None:
        """The K and V of tokens [first, end) were computed, behind those of all tokens in front.

        Args:
            pages: the sequence's page table; tokens behind its end were computed elsewhere.
        """
        size = self._page_size
        for place in range(first // size, min(-(-end // size), len(pages))):
            page = pages[place]
            filled = min(end - place * size, size)
            if self._generation[page] == self._current[page]:
                filled = max(filled, int(self._filled[page]))
            self._generation[page] = self._current[page]
            self._filled[page] = filled
