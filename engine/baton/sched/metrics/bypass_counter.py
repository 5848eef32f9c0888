"""Counts of overtaking: for each waiting request, how many that arrived after it went first.

Requests that wait stand in order of arrival (arrival, handle). Between two neighbours stands a counter: `passed[r]` is
the number of admissions, since r came, of requests that arrived between r and the next one waiting after it. A request
was overtaken by all that is counted from its place on:

    waiting, by arrival     r0      r1        r2   r3
    passed                   0       2         0    1        overtaken: 3 3 1 1, less what was there when it came

When a request leaves, its counter is added to its predecessor's. Places are numbers with room between them, sums and
predecessors come from two Fenwick trees: O(log n) per operation, and a renumbering in O(n) after n/2 of them or when
late arrivals have used up the numbers of one gap.
"""

from __future__ import annotations

Key = tuple[float, int]
"""(arrival, handle): the order of arrival, all different."""

SPARE = 16
"""Numbers per request at a renumbering: room for four late arrivals at one place."""
LEAST = 1024


class _Fenwick:
    """Prefix sums over `size` counters; size is a power of two."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.total = 0
        self._tree = [0] * (size + 1)

    def add(self, at: int, n: int) -> None:
        self.total += n
        at += 1
        while at <= self.size:
            self._tree[at] += n
            at += at & -at

    def before(self, at: int) -> int:
        """Sum of the counters [0, at)."""
        tree, found = self._tree, 0
        while at:
            found += tree[at]
            at &= at - 1
        return found

    def select(self, k: int) -> int:
        """Index of the counter that holds the k-th unit, counting from 0; k < total."""
        tree, at, step = self._tree, 0, self.size
        while step:
            if at + step <= self.size and tree[at + step] <= k:
                at += step
                k -= tree[at]
            step >>= 1
        return at


class BypassCounter:
    def __init__(self) -> None:
        self._keys: dict[int, Key] = {}
        self._place: dict[int, int] = {}
        self._at: dict[int, int] = {}
        """Place → handle."""
        self._base: dict[int, int] = {}
        """Entries from its place on when the request came."""
        self._passed_at: dict[int, int] = {}
        self._clear(LEAST * SPARE)

    def _clear(self, size: int) -> None:
        self._present = _Fenwick(size)
        self._passed = _Fenwick(size)
        self._next = 0
        self._newest: Key | None = None

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, handle: int) -> bool:
        return handle in self._keys

    def enter(self, handle: int, arrival: float) -> None:
        """A request begins to wait (again). Its handle does not wait already."""
        key = (arrival, handle)
        self._keys[handle] = key
        if self._newest is None or key > self._newest:
            if self._next >= self._present.size:
                self._renumber()
                return
            self._newest = key
            self._put(handle, self._next)
            self._next += SPARE
        else:
            self._insert(handle, key)

    def admit(self, handle: int) -> int:
        """A waiting request is admitted: it overtakes those that arrived before it. Returns by how many it was."""
        return self._remove(handle, 1)

    def leave(self, handle: int) -> None:
        """Remove a waiting request: it overtakes none. One that does not wait is ignored."""
        if handle in self._keys:
            self._remove(handle, 0)

    def count(self, handle: int) -> int:
        """How many have overtaken this waiting request so far."""
        return self._passed.total - self._passed.before(self._place[handle]) - self._base[handle]

    def _put(self, handle: int, place: int) -> None:
        self._place[handle] = place
        self._at[place] = handle
        self._passed_at[place] = 0
        self._present.add(place, 1)
        self._base[handle] = self._passed.total - self._passed.before(place)

    def _insert(self, handle: int, key: Key) -> None:
        """Insert between two places: the request arrived before another that was entered first."""
        low, high = 0, self._present.total
        while low < high:  # how many arrived before it
            middle = (low + high) // 2
            if self._keys[self._at[self._present.select(middle)]] < key:
                low = middle + 1
            else:
                high = middle
        left = self._present.select(low - 1) if low else -1
        right = self._present.select(low) if low < self._present.total else self._next
        if right - left < 2:
            self._renumber()
        else:
            self._put(handle, (left + right) // 2)

    def _remove(self, handle: int, admitted: int) -> int:
        place = self._place[handle]
        found = self.count(handle)
        rank = self._present.before(place)
        moved = self._passed_at.pop(place)
        if moved:
            self._passed.add(place, -moved)
        self._present.add(place, -1)
        del self._keys[handle], self._place[handle], self._at[place], self._base[handle]
        if not self._keys:
            self._clear(LEAST * SPARE)
        elif rank and moved + admitted:
            before = self._present.select(rank - 1)
            self._passed.add(before, moved + admitted)
            self._passed_at[before] += moved + admitted
        return found

    def _renumber(self) -> None:
        """Give every waiting request a new place, with spare numbers between; one may not have a place yet."""
        in_order = sorted(self._keys.items(), key=lambda entry: entry[1])
        counts = {handle: self.count(handle) for handle in self._place}
        size = LEAST * SPARE
        while size < 2 * SPARE * len(in_order):
            size *= 2
        passed = [self._passed_at[self._place[h]] if h in self._place else 0 for h, _ in in_order]
        self._clear(size)
        self._place, self._at, self._passed_at, self._base = {}, {}, {}, {}
        for (handle, key), n in zip(in_order, passed, strict=True):
            place = self._next
            self._next += SPARE
            self._newest = key
            self._place[handle] = place
            self._at[place] = handle
            self._passed_at[place] = n
            self._present.add(place, 1)
            if n:
                self._passed.add(place, n)
        for handle, _ in in_order:
            all_passed = self._passed.total - self._passed.before(self._place[handle])
            self._base[handle] = all_passed - counts.get(handle, 0)
