"""The pool's free list: which of the page ids 0..n-1 have no owner.

Life of a page: free → `alloc` → owned by the caller (a request, or the radix cache after `insert`)
→ `free` → free. Invariants: a page is handed out at most once until it is freed; a refused call
changes nothing; what was known of a page's content holds as long as its generation is the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class PageError(ValueError):
    """A page was freed twice or does not belong to the pool: a bug in the caller, never a user's
    mistake.
    """


class PageAllocator:
    """All-or-nothing allocator of page ids.

    Every call is O(pages asked for); no page content is touched.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool of {num_pages} pages cannot hold a token; give at least 1")
        self.num_pages = num_pages
        # A stack with the lowest ids on top: a fresh pool hands out ascending runs, which copy and
        # transfer as spans.
        self._free = array("i", range(num_pages - 1, -1, -1))
        self._is_owned = bytearray(num_pages)
        self.generations = array("q", bytes(8 * num_pages))
        """By page: how often it has been handed out."""

    @property
    def free_count(self) -> int:
        return len(self._free)

    def alloc(self, n: int) -> array[int] | None:
        """Take `n` pages, or none at all (None) when fewer are free."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages")
        if n > len(self._free):
            return None
        pages = self._free[len(self._free) - n :]
        del self._free[len(self._free) - n :]
        pages.reverse()
        owned = self._is_owned
        generations = self.generations
        for page in pages:
            owned[page] = 1
            generations[page] += 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back.

        Raises PageError, freeing none, for a page that is foreign, free, or listed twice.
        """
        returned = array("i", pages)
        owned = self._is_owned
        if returned and (min(returned) < 0 or max(returned) >= self.num_pages):
            foreign = next(page for page in returned if not 0 <= page < self.num_pages)
            raise PageError(f"cannot free page {foreign}: it is not one of 0..{self.num_pages - 1}")
        remaining = iter(returned)
        for page in remaining:
            if not owned[page]:
                num_freed = len(returned) - len(list(remaining)) - 1
                for freed in returned[:num_freed]:
                    owned[freed] = 1
                raise PageError(f"cannot free page {page}: it is free already")
            owned[page] = 0
        returned.reverse()
        self._free.extend(returned)
