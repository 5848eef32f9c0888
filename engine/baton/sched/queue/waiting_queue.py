"""The waiting queue: sequences that hold nothing, in the order of a policy, kept sorted at a
bounded cost per look.

A look (`in_order`) of a queue of at most `EXACT_UP_TO` gives exactly the order that the policy
defines. In a longer one it brings `KEYS_PER_LOOK` sequences up to date, so that thousands cost a
step no more than these.

1. A sequence that joins gets its number at the next look; of many that join together the most
   important first. Should a caller want more than those in order, it gets the next ones.
2. When the radix tree changes, sequences move if their cached prefix may be another one
   (`ProbeWatch`), or if their number changes at a moment known before (`Policy.expiries`).
3. When the policy's `cache_key` changes (a measured rate for srpt-aging, the work done for hrrn,
   ...), a second order with the new numbers is built beside the one in force, and takes its place
   when it is complete.

A policy with numbers that depend on the other waiting sequences (dfs-weight, lpm with in-batch
thresholds) sorts all again, a long queue over many looks: a second order is built as under 3, and
those that join meanwhile go last in both.

Priority aging with a maximum needs two lists: among requests that still age the order never
changes, among those that have aged all they can neither does; a look merges the two at the present
time. A request moves from the first to the second at arrival + maximum / rate.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from baton.cache.radix import ProbeWatch
from baton.sched.fairness.sharing import SharingStrategy
from baton.sched.policies.base import NEVER, Policy, PolicyContext, cached_tokens
from baton.sched.types.priority import PriorityRule
from baton.sched.types.sequence import Seq

EXACT_UP_TO = 64
"""A queue of so many is brought up to date as a whole at each look."""
KEYS_PER_LOOK = 32
"""Sequences of a longer queue that are placed, or moved, at each look: some 0.2 ms."""
KINDS = 4
"""Reasons to place or move a sequence.

Each gets its share of KEYS_PER_LOOK, and what the reasons before it did not use of theirs.
"""
MAX_DEAD_ENTRIES = 64
"""Superseded entries of a heap that are tolerated beside one per sequence."""

Entry = tuple[float, float, float, int, Seq]
"""(priority, policy, arrival, handle, sequence): handles differ, so comparing never reaches the
sequence.
"""


class _Order:
    """Sequences sorted for one cache key of the policy."""

    def __init__(self, rule: PriorityRule, cache_key: Hashable) -> None:
        self.cache_key = cache_key
        self.entries: dict[int, Entry] = {}
        self.aging: list[Entry] = []
        self.aged: list[Entry] = []
        self.changes = 0
        """Grows with every change of a sorted list."""
        self._rule = rule
        self._due: dict[int, float] = {}
        self._moves: list[tuple[float, int]] = []
        """(time, handle): when a sequence has to be entered again; valid if `_due` has this time.
        """

    def enter(
        self, seqs: Iterable[Seq], keys: Iterable[float], expiries: Iterable[float], now: float
    ) -> None:
        """Put in sequences, or move them to other places.

        Args:
            expiries: times at which their keys change; may have no end.
        """
        rule = self._rule
        entries = self.entries
        has_priority = rule.enabled
        is_capped = rule.is_capped
        for seq, key, due in zip(seqs, keys, expiries, strict=False):
            handle = seq.handle
            lane = self.aging
            # Entered twice, a request would be planned twice.
            if handle in entries:
                self.remove(handle)
            rank = rule.aging_key(seq) if has_priority else 0.0
            # Aging changes no order among requests that still age, nor among those that have aged
            # all they can: each kind has a list of its own.
            if is_capped:
                capped_from = rule.capped_from(seq)
                if capped_from <= now:
                    rank = rule.capped_key(seq)
                    lane = self.aged
                elif capped_from < due:
                    due = capped_from
            entry = entries[handle] = (rank, key, seq.req.arrival, handle, seq)
            bisect.insort(lane, entry)
            if due < math.inf:
                self._enter_again(handle, due)
            self.changes += 1

    def _enter_again(self, handle: int, due: float) -> None:
        self._due[handle] = due
        heapq.heappush(self._moves, (due, handle))
        # Each move of a request leaves an entry behind: without a sweep the heap grows for ever.
        if len(self._moves) > 2 * len(self.entries) + MAX_DEAD_ENTRIES:
            self._moves = [(due, handle) for handle, due in self._due.items()]
            heapq.heapify(self._moves)

    def remove(self, handle: int) -> None:
        """Take a request out; a handle that is not in the queue is ignored."""
        self._due.pop(handle, None)
        entry = self.entries.pop(handle, None)
        if entry is None:
            return
        for lane in (self.aging, self.aged):
            index = bisect.bisect_left(lane, entry)
            # The entry is in one of the two lists.
            if index < len(lane) and lane[index][3] == handle:
                del lane[index]
        self.changes += 1

    def pop_due(self, now: float, limit: int) -> list[Seq]:
        """Up to so many that have to be entered again by now."""
        due_seqs: list[Seq] = []
        while self._moves and self._moves[0][0] <= now and len(due_seqs) < limit:
            due, handle = heapq.heappop(self._moves)
            # Other entries are of requests that have moved or left since.
            if self._due.get(handle) == due:
                del self._due[handle]
                due_seqs.append(self.entries[handle][4])
        return due_seqs


class WaitingQueue:
    """`view` is called when an order is needed; it must not change the queue.

    `sharing` learns who waits.
    """

    def __init__(
        self,
        policy: Policy,
        priority: PriorityRule,
        view: Callable[[], PolicyContext],
        sharing: SharingStrategy,
    ) -> None:
        self.policy = policy
        self.priority = priority
        self._view = view
        self._sharing = sharing
        self._seqs: dict[int, Seq] = {}
        self._joined: dict[int, int] = {}
        """Handles that are in no order yet → number of their arrival here."""
        self._joins = 0
        self._to_join: list[tuple[float, float, int, int]] = []
        """(priority, arrival, handle, number of its arrival here): a heap; valid if `_joined` says
        so.
        """
        self._order = _Order(priority, None)
        """The order in force."""
        self._next: _Order | None = None
        """The order that is being built, for another cache key."""
        self._to_build: list[int] = []
        """Handles that `_next` lacks, and others that have left."""
        self._tree: int | None = None
        """The tree's version that the order in force knows, if all is sorted again for another one.
        """
        self._sorting: Iterator[Iterable[tuple[Seq, float]]] | None = None
        """Sorted parts that `_next` is built from; None when nothing is being sorted."""
        self._probes: ProbeWatch | None = None

    def __len__(self) -> int:
        return len(self._seqs)

    def __contains__(self, seq: Seq) -> bool:
        return seq.handle in self._seqs

    def __iter__(self) -> Iterator[Seq]:
        """Iterate in order of arrival here."""
        return iter(list(self._seqs.values()))

    def add(self, seq: Seq) -> None:
        seq.probe = None  # it may have run meanwhile, and have more tokens
        self._seqs[seq.handle] = seq
        self._joins += 1
        self._await_place(seq, self._joins)
        self._tree = None
        self._sharing.on_queued(seq)

    def discard(self, seq: Seq) -> None:
        """Take a sequence out; one that is not waiting is ignored."""
        handle = seq.handle
        # Each end of a request calls this; counting it twice would break its tenant's account.
        if self._seqs.pop(handle, None) is None:
            return
        self._joined.pop(handle, None)
        self._order.remove(handle)
        if self._next is not None:
            self._next.remove(handle)
        if self._probes is not None:
            self._probes.forget(handle)
        self._tree = None
        self._sharing.on_dequeued(seq)

    def reprioritize(self, seq: Seq) -> None:
        """Move a sequence after a change of its adjusted priority."""
        view = self._view()
        # Requests without a place have an entry in the heap of those that join.
        if seq.handle in self._joined:
            self._await_place(seq, self._joined[seq.handle])
        for order in self._all_orders():
            if seq.handle in order.entries:
                _, key, _, _, _ = order.entries[seq.handle]
                expiries = self.policy.expiries((seq,), view, order.cache_key)
                order.enter((seq,), (key,), expiries, view.now)

    def on_tokens(self, seq: Seq) -> None:
        """Look up the cached prefix again: a waiting sequence has other tokens than before."""
        seq.probe = None
        if self._probes is not None and seq.handle in self._order.entries:
            self._probes.stale[seq.handle] = None

    def in_order(self, unfinished: Sequence[Seq] = ()) -> Iterator[Seq]:
        """Waiting sequences as the planner should try them, with `unfinished` prompts among them.

        The latter compete with waiting ones if the policy re-decides chunks; else they come first
        among equal priorities. The queue may change while the caller iterates: sequences that have
        left or joined meanwhile are not given.
        """
        view = self._view()
        self._update_order(view)
        order = self._order
        waiting = self._waiting_entries(order, view, self._joins)
        # The merge below costs a comparison per request.
        if not unfinished:
            return (seq for _, _, _, _, seq in waiting)
        unfinished_handles = {seq.handle for seq in unfinished}
        entries = heapq.merge(waiting, self._entries_of(unfinished, view, order.cache_key))
        return (
            seq
            for _, _, _, handle, seq in entries
            if handle in self._seqs or handle in unfinished_handles
        )

    def sorted_of(self, seqs: Iterable[Seq]) -> list[Seq]:
        """Some that wait, in order; those that have no place yet go last.

        O(n log n) in their number.
        """
        now = self._view().now
        entries = self._order.entries

        def rank(seq: Seq) -> tuple[bool, float, float, float, int]:
            entry = entries.get(seq.handle)
            key = 0.0
            if entry is not None:
                _, key, _, _, _ = entry
            return entry is None, self.priority.key(seq, now), key, seq.req.arrival, seq.handle

        return sorted(seqs, key=rank)

    def sorted_alone(self, unfinished: Sequence[Seq]) -> list[Seq]:
        """Unfinished prompts in the order in which `in_order` gives them."""
        entries = self._entries_of(unfinished, self._view(), self._order.cache_key)
        return [seq for _, _, _, _, seq in entries]

    def _entries_of(
        self, unfinished: Sequence[Seq], view: PolicyContext, cache_key: Hashable
    ) -> list[Entry]:
        keys: Sequence[float] = [-math.inf] * len(unfinished)
        if self.policy.reorders_partial_prefills:
            keys = self.policy.sort_keys(unfinished, view, cache_key)
        return sorted(
            (self.priority.key(seq, view.now), key, seq.req.arrival, seq.handle, seq)
            for seq, key in zip(unfinished, keys, strict=True)
        )

    def _waiting_entries(
        self, order: _Order, view: PolicyContext, last_join: int
    ) -> Iterator[Entry]:
        """Those that wait, with their priorities at the present time; at the end those that have no
        place yet.
        """
        gained = self.priority.aging_rate * view.now if self.priority.enabled else 0.0
        entries = _walk_lane(order, order.aging, -gained)
        if self.priority.is_capped:
            entries = heapq.merge(entries, _walk_lane(order, order.aged, 0.0))
        for entry in entries:
            _, _, _, handle, _ = entry
            # It may have left while the caller iterates: a plan admits what it is given.
            if handle in self._seqs:
                yield entry
        # Another order has taken its place meanwhile: what joins is placed there, and comes with
        # the next look.
        while order is self._order:
            joined = self._place_joined(view, last_join)
            if not joined:
                return
            keys = (
                (self.priority.key(seq, view.now), order.entries[seq.handle][1], seq)
                for seq in joined
            )
            placed_entries = sorted(
                (rank, key, seq.req.arrival, seq.handle, seq) for rank, key, seq in keys
            )
            yield from (entry for entry in placed_entries if entry[3] in self._seqs)

    # ------------------------------------------------------------------ keeping it sorted

    def _all_orders(self) -> tuple[_Order, ...]:
        return (self._order,) if self._next is None else (self._order, self._next)

    def _await_place(self, seq: Seq, number: int) -> None:
        self._joined[seq.handle] = number
        heapq.heappush(
            self._to_join, (self.priority.aging_key(seq), seq.req.arrival, seq.handle, number)
        )
        # A request that leaves, or gets another priority, leaves an entry behind.
        if len(self._to_join) > 2 * len(self._joined) + MAX_DEAD_ENTRIES:
            self._to_join = [
                entry for entry in self._to_join if self._joined.get(entry[2]) == entry[3]
            ]
            heapq.heapify(self._to_join)

    def _update_order(self, view: PolicyContext) -> None:
        cache_key = self.policy.cache_key(len(self._seqs), view)
        if self._probes is None:
            self._probes = view.index.watch()
        # A key that depends on all requests cannot be brought up to date for one of them.
        if not self.policy.keys_are_independent:
            self._sort_all(view, cache_key)
            return
        # Nothing has a place yet: a second order would have nothing to be built from.
        if not self._order.entries:
            self._order = _Order(self.priority, cache_key)
            self._next = None
        # The policy has returned to the key of the order in force: that order is right again.
        elif cache_key == self._order.cache_key:
            self._next = None
        # An order that is being built is completed first, even for a key that has passed: a key
        # that changes at every look would else never have an order.
        elif self._next is None:
            self._next = _Order(self.priority, cache_key)
            self._to_build = list(self._order.entries)
        keys_left = KINDS * EXACT_UP_TO if len(self._seqs) <= EXACT_UP_TO else KEYS_PER_LOOK
        share = keys_left // KINDS
        keys_left -= self._build_next(view, keys_left - 3 * share)
        due = self._order.pop_due(view.now, keys_left - 2 * share)
        self._place_in(self._order, due, view)
        keys_left -= len(due)
        keys_left -= self._move_stale(self._probes, view, keys_left - share)
        self._place_joined(view, self._joins, keys_left)

    def _build_next(self, view: PolicyContext, limit: int) -> int:
        """Enter up to `limit` sequences in the next order. Returns how many."""
        if self._next is None:
            return 0
        handles = self._to_build[-limit:]
        del self._to_build[-limit:]
        entries = self._order.entries
        self._place_in(
            self._next, [entries[handle][4] for handle in handles if handle in entries], view
        )
        # Complete: requests that joined meanwhile were placed in both orders.
        if not self._to_build:
            self._order = self._next
            self._next = None
        return len(handles)

    def _move_stale(self, probes: ProbeWatch, view: PolicyContext, limit: int) -> int:
        """Move sequences whose cached prefix may have changed. Returns how many."""
        stale = [self._seqs[handle] for handle in itertools.islice(probes.stale, limit)]
        for order in self._all_orders() if stale else ():
            self._place_in(order, [seq for seq in stale if seq.handle in order.entries], view)
        for seq in stale:
            probes.stale.pop(seq.handle, None)
        return len(stale)

    def _place_joined(
        self, view: PolicyContext, last_join: int, limit: int = KEYS_PER_LOOK
    ) -> list[Seq]:
        """Place sequences that had joined by `last_join`, the `limit` most important ones.

        Returns them.
        """
        placed: list[Seq] = []
        not_yet: list[tuple[float, float, int, int]] = []
        while self._to_join and len(placed) < limit:
            entry = heapq.heappop(self._to_join)
            _, _, handle, number = entry
            if self._joined.get(handle) != number:
                continue  # an old entry: it has left, or has another priority
            # It joined during the look of the caller, who would be given it although it came later.
            if number > last_join:
                not_yet.append(entry)
                continue
            del self._joined[handle]
            placed.append(self._seqs[handle])
        for entry in not_yet:
            heapq.heappush(self._to_join, entry)
        for order in self._all_orders() if placed else ():
            self._place_in(order, placed, view)
        return placed

    def _place_in(self, order: _Order, seqs: Sequence[Seq], view: PolicyContext) -> None:
        if not seqs:
            return
        policy = self.policy
        if policy.keys_are_independent:
            keys = policy.sort_keys(seqs, view, order.cache_key)
        else:
            keys = [math.inf] * len(seqs)
            for seq in seqs:
                # Looked up now, a few at a time, so that sorting all of them takes no longer step.
                cached_tokens(seq, view.index)
        order.enter(seqs, keys, policy.expiries(seqs, view, order.cache_key), view.now)
        if policy.keys_are_independent and self._probes is not None:
            for seq in seqs:
                if seq.probe is not None:
                    self._probes.watch(seq.handle, seq.probe, seq.req.namespace)

    def _sort_all(self, view: PolicyContext, cache_key: Hashable) -> None:
        """Sort everything, because each key depends on all requests.

        A long queue is sorted over many looks.
        """
        # A request that joins changes the keys of the others.
        if self._place_joined(view, self._joins, EXACT_UP_TO):
            self._tree = None
        due = self._order.pop_due(view.now, KEYS_PER_LOOK)
        self._order.enter(due, [self._order.entries[seq.handle][1] for seq in due], NEVER, view.now)
        is_long = len(self._order.entries) >= 2 * EXACT_UP_TO
        # A queue that has become short is sorted at once; the parts made so far are of another one.
        if not is_long:
            self._sorting = self._next = None
        if self._sorting is None:
            # Nothing that the keys depend on has changed: a blocked queue costs its looks nothing.
            if cache_key == self._order.cache_key and self._tree == view.index.version:
                return
            self._tree = view.index.version  # a request that joins or leaves meanwhile resets it
            seqs = [entry[4] for entry in self._order.entries.values()]
            if not is_long:
                self._order = _Order(self.priority, cache_key)
                self._order.enter(
                    seqs, self.policy.sort_keys(seqs, view, cache_key), NEVER, view.now
                )
                return
            self._sorting = self.policy.keys_in_parts(seqs, EXACT_UP_TO, self._view, cache_key)
            self._next = _Order(self.priority, cache_key)
        self._continue_sorting(self._sorting, view)

    def _continue_sorting(
        self, sorting: Iterator[Iterable[tuple[Seq, float]]], view: PolicyContext
    ) -> None:
        assert self._next is not None, "it is made when sorting starts"
        ready = next(sorting, None)
        if ready is None:
            self._order = self._next
            self._next = None
            self._sorting = None
            return
        # A request that left and returned meanwhile is in `_next` already.
        entries = self._order.entries
        entries_of_next = self._next.entries
        new_keys = [
            (seq, key)
            for seq, key in ready
            if seq.handle in entries and seq.handle not in entries_of_next
        ]
        self._next.enter(
            [seq for seq, _ in new_keys], [key for _, key in new_keys], NEVER, view.now
        )


def _walk_lane(order: _Order, entries: list[Entry], shift: float) -> Iterator[Entry]:
    """Walk one of the order's lists, which may change meanwhile.

    Args:
        shift: makes priorities of this list comparable with those of others at the present time.
    """
    index = 0
    changes = order.changes
    while index < len(entries):
        last_entry = entries[index]
        yield (last_entry[0] + shift, *last_entry[1:])
        index += 1
        if order.changes != changes:
            index = bisect.bisect_right(entries, last_entry)
            changes = order.changes
