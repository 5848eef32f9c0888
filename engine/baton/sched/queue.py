"""The waiting queue: sequences that hold nothing, in the order of a policy.

Orders that never change while a sequence waits (fcfs, lof, with or without priority) are kept sorted by insertion, so
that a step with 10 000 waiting requests costs no sort. The others are sorted when the planner really looks.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator

from baton.sched.policy import Policy, PriorityRule, Rank, View, ordered, ranks
from baton.sched.seq import Seq


class WaitingQueue:
    """`view` is called when an order is needed; it must not change the queue."""

    def __init__(self, policy: Policy, priority: PriorityRule, view: Callable[[], View]) -> None:
        self.policy = policy
        self.priority = priority
        self._view = view
        self._seqs: dict[int, Seq] = {}
        self._sorted: list[tuple[Rank, Seq]] = []
        self._ranks: dict[int, Rank] = {}

    def __len__(self) -> int:
        return len(self._seqs)

    def __contains__(self, seq: Seq) -> bool:
        return seq.handle in self._seqs

    def add(self, seq: Seq) -> None:
        self._seqs[seq.handle] = seq
        if self.policy.is_static:
            rank = ranks([seq], self.policy, self.priority, self._view())[0]
            self._ranks[seq.handle] = rank
            bisect.insort(self._sorted, (rank, seq), key=lambda entry: entry[0])

    def discard(self, seq: Seq) -> None:
        """Take a sequence out; one that is not waiting is ignored."""
        if self._seqs.pop(seq.handle, None) is None or not self.policy.is_static:
            return
        at = bisect.bisect_left(self._sorted, self._ranks.pop(seq.handle), key=lambda entry: entry[0])
        del self._sorted[at]

    def in_order(self) -> Iterator[Seq]:
        """Sequences as the planner should try them. The queue may change while the caller iterates."""
        if self.policy.is_static:
            return iter([seq for _, seq in self._sorted])
        return iter(ordered(list(self._seqs.values()), self.policy, self.priority, self._view()))

    def __iter__(self) -> Iterator[Seq]:
        """In order of arrival here."""
        return iter(list(self._seqs.values()))
