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
        self._first = np.zeros(len(generations), np.int64)
        self._end = np.zeros(len(generations), np.int64)
        """Slots [first, end) of a page are filled."""

    def count_covered(self, pages: array[int]) -> int:
        """How many tokens, from the first one on, have their K and V in these pages.

        Cost: O(pages), a few microseconds per thousand.
        """
        table = np.frombuffer(pages, np.int32)
        is_filled = self._is_current(table) & (self._first[table] == 0)
        filled = np.where(is_filled, self._end[table], 0)
        partial = np.flatnonzero(filled < self._page_size)
        if not len(partial):
            return len(table) * self._page_size
        first = int(partial[0])
        return first * self._page_size + int(filled[first])

    def find_filled(self, pages: array[int]) -> NDArray[np.int64]:
        """Numbers of the tokens whose K and V are in these pages, rising.

        Cost: O(tokens).
        """
        table = np.frombuffer(pages, np.int32)
        slots = np.arange(self._page_size)
        end = np.where(self._is_current(table), self._end[table], 0)
        is_filled = (slots >= self._first[table][:, None]) & (slots < end[:, None])
        return np.flatnonzero(is_filled)

    def fill(self, pages: array[int], first: int, end: int) -> None:
        """The K and V of tokens [first, end) are there, where they have pages.

        Args:
            pages: the sequence's page table.
        """
        size = self._page_size
        for place in range(first // size, min(-(-end // size), len(pages))):
            page = pages[place]
            begin = max(first - place * size, 0)
            stop = min(end - place * size, size)
            is_known = self._generation[page] == self._current[page]
            if is_known and self._first[page] <= begin <= self._end[page]:
                stop = max(stop, int(self._end[page]))
            else:
                self._first[page] = begin
            self._generation[page] = self._current[page]
            self._end[page] = stop

    def forget_to(self, pages: array[int], token: int) -> None:
        """The K and V of a token that was filled are not there; those in front of it on its page
        count as missing, too."""
        self._first[pages[token // self._page_size]] = token % self._page_size + 1

    def _is_current(self, table: NDArray[np.int32]) -> NDArray[np.bool_]:
        is_current: NDArray[np.bool_] = self._generation[table] == self._current[table]
        return is_current
