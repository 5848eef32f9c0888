"""Which slots of the KV pool of a draft model or head hold the K and V of known tokens.

It has a page for each page of the target's pool, under the same number, so a
sequence's page table is that of both. What is in a draft page is known for one generation
of the page (`PageAllocator.generations`): a page that was handed out again, pulled from another
node or copied back from the host is empty here, whatever was computed into it before.

A slot is filled for the tokens that all users of its page have there. A page has several users only
through the prefix tree, which joins equal beginnings.
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
        self._filled = np.zeros((len(generations), page_size), np.bool_)

    def read_filled(self, pages: array[int]) -> NDArray[np.bool_]:
        """For each token of these pages: whether its K and V are there.

        Cost: O(tokens), about 10 microseconds for ten thousand.
        """
        table = np.frombuffer(pages, np.int32)
        is_current = self._generation[table] == self._current[table]
        filled: NDArray[np.bool_] = self._filled[table] & is_current[:, None]
        return filled.reshape(-1)

    def count_covered(self, pages: array[int]) -> int:
        """How many tokens, from the first one on, have their K and V in these pages."""
        filled = self.read_filled(pages)
        missing = np.flatnonzero(~filled)
        return int(missing[0]) if len(missing) else len(filled)

    def fill(self, pages: array[int], first: int, end: int) -> None:
        """The K and V of tokens [first, end) are there, where they have pages.

        Args:
            pages: the sequence's page table.
        """
        size = self._page_size
        for place in range(first // size, min(-(-end // size), len(pages))):
            page = pages[place]
            if self._generation[page] != self._current[page]:
                self._generation[page] = self._current[page]
                self._filled[page] = False
            self._filled[page, max(first - place * size, 0) : end - place * size] = True

    def clear(self, pages: array[int], token: int) -> None:
        """The K and V of a token are not there."""
        self._filled[pages[token // self._page_size], token % self._page_size] = False
