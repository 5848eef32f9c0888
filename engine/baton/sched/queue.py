"""The waiting queue: sequences that hold nothing, in the order of a policy, kept sorted as long as the order holds.

The sorted list is valid for the `inputs` of its policy (nothing for fcfs and lof, a measured rate for srpt-aging, …).
While they are equal, a sequence joins by insertion and leaves by bisection; when they have changed, the next look
computes all keys again. So a blocked queue of 10 000 costs no sort per step, under any policy but `random`. When only
the radix tree has changed, sequences with another cached prefix than before move, the others stay where they are.

Priority ageing with a maximum needs two lists: among requests that still age the order never changes, among those that
have aged all they can neither does; a look merges the two at the present time. A request moves from the first to the
second at arrival + maximum / rate.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Protocol

from baton.sched.events import OrderReviewed
from baton.sched.policy import Policy, PriorityRule, View
from baton.sched.seq import Seq

Entry = tuple[float, float, float, int, Seq]
"""(priority, policy, arrival, handle, sequence): handles differ, so comparing never reaches the sequence."""


class Watcher(Protocol):
    """Hears of everything that begins or ceases to wait."""

    def entered(self, seq: Seq) -> None: ...
    def left(self, seq: Seq) -> None: ...


class WaitingQueue:
    """`view` is called when an order is needed; it must not change the queue."""

    def __init__(
        self, policy: Policy, priority: PriorityRule, view: Callable[[], View], watcher: Watcher | None = None
    ) -> None:
        self.policy = policy
        self.priority = priority
        self._view = view
        self._watcher = watcher
        self._seqs: dict[int, Seq] = {}
        self._entries: dict[int, Entry] = {}
        """Of the sequences that are in a sorted list; the others joined after the order went out of date."""
        self._ageing: list[Entry] = []
        self._aged: list[Entry] = []
        self._moves: list[tuple[float, int]] = []
        self._valid_for: Hashable = None
        self._tree: int | None = None
        """The tree's version that the sorted lists know; None: they depend on no tree."""
        self.changes = 0
        """Grows with every change of a sorted list in place."""

    def __len__(self) -> int:
        return len(self._seqs)

    def __contains__(self, seq: Seq) -> bool:
        return seq.handle in self._seqs

    def __iter__(self) -> Iterator[Seq]:
        """In order of arrival here."""
        return iter(list(self._seqs.values()))

    def add(self, seq: Seq) -> None:
        seq.probe = None  # it may have run meanwhile, and have more tokens
        self._seqs[seq.handle] = seq
        if self.policy.each_alone and self._entries:
            view = self._view()
            if self._inputs(view) == self._valid_for:
                self._insert(seq, self.policy.keys([seq], view)[0], view.now, joins=True)
        if self._watcher is not None:
            self._watcher.entered(seq)

    def discard(self, seq: Seq) -> None:
        """Take a sequence out; one that is not waiting is ignored."""
        if self._seqs.pop(seq.handle, None) is None:
            return
        self._remove(seq)
        if not self.policy.each_alone:
            self._valid_for = None
        if self._watcher is not None:
            self._watcher.left(seq)

    def reprioritise(self, seq: Seq) -> None:
        """To be called after a change of the sequence's adjusted priority."""
        if seq.handle not in self._entries:
            return
        key = self._entries[seq.handle][1]
        self._remove(seq)
        self._insert(seq, key, self._view().now)

    def in_order(self, under_way: Sequence[Seq] = ()) -> Iterator[Seq]:
        """Sequences as the planner should try them, among them those `under_way`, which do not wait any more.

        These compete with waiting ones if the policy re-decides chunks; else they come first among equal priorities.
        The queue may change while the caller iterates: who left is not given, who joins may be.
        """
        view = self._view()
        self._bring_up_to_date(view)
        gained = self.priority.aging_rate * view.now if self.priority.enabled else 0.0
        lanes = [_Lane(self, self._ageing, -gained), _Lane(self, self._aged, 0.0)]
        if under_way:
            keys = self.policy.keys(under_way, view) if self.policy.redecides_chunks else [-math.inf] * len(under_way)
            others = sorted(
                (self.priority.key(seq, view.now), key, seq.req.arrival, seq.handle, seq)
                for seq, key in zip(under_way, keys, strict=True)
            )
            lanes.append(_Lane(None, others, 0.0))
        return _merged([lane for lane in lanes if lane.entries])

    def review(self) -> OrderReviewed | None:
        """Let the policy look at the queue as a whole, before a plan."""
        return self.policy.review(list(self._seqs.values()), self._view()) if self.policy.reviews else None

    def is_waiting(self, handle: int) -> bool:
        return handle in self._seqs

    # ------------------------------------------------------------------ keeping it sorted

    def _inputs(self, view: View) -> Hashable:
        inputs = self.policy.inputs(len(self._seqs), view)
        return self.policy.active, inputs

    def _bring_up_to_date(self, view: View) -> None:
        inputs = self._inputs(view)
        tree = view.index.version if self.policy.reads_tree else None
        is_as_before = inputs == self._valid_for and len(self._entries) == len(self._seqs)
        if not is_as_before or (tree != self._tree and not self.policy.each_alone):
            self._sort(view)
        elif tree != self._tree:
            self._move_changed(view)
        self._valid_for, self._tree = inputs, tree
        while self._moves and self._moves[0][0] <= view.now:
            _, handle = heapq.heappop(self._moves)
            entry = self._entries.get(handle)
            if entry is not None:
                seq = entry[4]
                self._remove(seq)
                self._insert(seq, entry[1], view.now)

    def _move_changed(self, view: View) -> None:
        """Only the tree has changed: bring those whose cached prefix is another one now to their new places."""
        seqs = list(self._seqs.values())
        stale = [seqs[i] for i in view.index.outdated([seq.probe for seq in seqs])]
        if len(stale) > len(seqs) // 4:
            self._sort(view)  # is cheaper then
            return
        keys = self.policy.keys(stale, view)
        moved = [(seq, key) for seq, key in zip(stale, keys, strict=True) if self._entries[seq.handle][1] != key]
        if moved:
            self._ageing, self._aged = self._ageing[:], self._aged[:]  # iterators over the old ones go on undisturbed
        for seq, key in moved:
            self._remove(seq)
            self._insert(seq, key, view.now)

    def _sort(self, view: View) -> None:
        seqs = list(self._seqs.values())
        rule, now = self.priority, view.now
        # New lists: iterators over the old ones go on undisturbed.
        self._ageing, self._aged, self._moves = [], [], []
        keys = self.policy.keys(seqs, view)
        if not rule.enabled:
            self._ageing = [(0.0, key, seq.req.arrival, seq.handle, seq) for seq, key in zip(seqs, keys, strict=True)]
        for seq, key in zip(seqs, keys, strict=True) if rule.enabled else ():
            until = rule.capped_from(seq)
            if until <= now:
                self._aged.append((rule.capped_key(seq), key, seq.req.arrival, seq.handle, seq))
            else:
                self._ageing.append((rule.ageing_key(seq), key, seq.req.arrival, seq.handle, seq))
                if until < math.inf:
                    self._moves.append((until, seq.handle))
        self._ageing.sort()
        self._aged.sort()
        heapq.heapify(self._moves)
        self._entries = {entry[3]: entry for lane in (self._ageing, self._aged) for entry in lane}

    def _insert(self, seq: Seq, key: float, now: float, *, joins: bool = False) -> None:
        rule = self.priority
        until = rule.capped_from(seq)
        is_aged = until <= now
        rank = rule.capped_key(seq) if is_aged else rule.ageing_key(seq)
        entry = (rank, key, seq.req.arrival, seq.handle, seq)
        bisect.insort(self._aged if is_aged else self._ageing, entry)
        if joins and not is_aged and until < math.inf:
            heapq.heappush(self._moves, (until, seq.handle))
        self._entries[seq.handle] = entry
        self.changes += 1

    def _remove(self, seq: Seq) -> None:
        entry = self._entries.pop(seq.handle, None)
        if entry is None:
            return
        for lane in (self._ageing, self._aged):
            at = bisect.bisect_left(lane, entry)
            if at < len(lane) and lane[at][3] == seq.handle:
                del lane[at]
        self.changes += 1


class _Lane:
    """Walks a sorted list that may change meanwhile. `queue` None: a list of our own, which does not."""

    __slots__ = ("_at", "_last", "_queue", "_seen", "_shift", "entries", "rank")

    def __init__(self, queue: WaitingQueue | None, entries: list[Entry], shift: float) -> None:
        self.entries = entries
        self.rank: tuple[float, float, float, int] | None = None
        """Of the sequence that `take` would return; None at the end."""
        self._queue = queue
        self._shift = shift
        """Makes priorities of the list comparable with those of other lists at the present time."""
        self._seen = queue.changes if queue else 0
        self._last: Entry | None = None
        self._at = 0

    def advance(self) -> None:
        """Look for the first sequence behind the last one taken that still waits."""
        queue = self._queue
        if queue is not None and queue.changes != self._seen:
            self._seen = queue.changes
            self._at = bisect.bisect_right(self.entries, self._last) if self._last is not None else 0
        while self._at < len(self.entries):
            entry = self.entries[self._at]
            if queue is None or queue.is_waiting(entry[3]):
                self.rank = (entry[0] + self._shift, entry[1], entry[2], entry[3])
                return
            self._at += 1
        self.rank = None

    def take(self) -> Seq:
        entry = self._last = self.entries[self._at]
        self._at += 1
        return entry[4]


def _merged(lanes: list[_Lane]) -> Iterator[Seq]:
    while True:
        best: _Lane | None = None
        for lane in lanes:
            lane.advance()
            if lane.rank is not None and (best is None or best.rank is None or lane.rank < best.rank):
                best = lane
        if best is None:
            return
        yield best.take()
