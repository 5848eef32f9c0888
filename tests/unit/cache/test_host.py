"""The host tier behind the radix tree: contents against a shadow memory, and who is kept when room is short."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.cache.eviction import EVICTION_POLICIES
from baton.cache.host import HostPage, HostTier
from baton.cache.ledger import HostLedger, LedgerError
from baton.cache.pages import PageAllocator
from baton.cache.radix import RadixCache, RadixNode
from tests.support.effort import examples
from tests.support.probes import RadixCacheProbe


def key(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


class Machine:
    """Tree, pool and host tier with real contents: a page holds the whole prefix that it is the KV of."""

    def __init__(self, pages: int, slots: int, page_size: int = 2, eviction: str = "lru") -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(pages)
        self.cache = RadixCache(page_size, self.allocator, eviction=eviction)
        self.host = HostTier(slots, page_size, eviction)
        self.cache.on_remove = self.host.on_remove
        self.device: list[object] = [None] * pages
        self.memory: list[object] = [None] * slots
        self.locked: list[RadixNode] = []
        self.copied = {True: 0, False: 0}

    def allocate(self, n: int) -> array[int] | None:
        short = n - self.allocator.free_count
        if short > 0:
            self.cache.evict(short)
        return self.allocator.alloc(n)

    def carry_out(self) -> None:
        for run in self.host.take_copies():
            moved = []
            targets = run.slots if run.to_host else run.pages
            assert len(set(targets)) == len(targets)
            for page, slot in zip(run.pages, run.slots, strict=True):
                moved.append(self.device[page] if run.to_host else self.memory[slot])
            for page, slot, content in zip(run.pages, run.slots, moved, strict=True):
                if run.to_host:
                    self.memory[slot] = content
                else:
                    self.device[page] = content
            self.copied[run.to_host] += len(moved)

    def use(
        self, tokens: list[int], namespace: bytes = b"", *, keep: bool = False, write: bool = True
    ) -> int:
        """Admit a request: match, restore, compute the rest. Returns pages that needed no computing.

        `write=False`: the copies that were asked for wait for a later call, as those of plans without rows do.
        """
        whole = len(tokens) // self.page_size
        match = self.cache.match(key(tokens), namespace, len(tokens))
        self.cache.lock(match.node)
        self.cache.reuse(match.node)
        node, have = match.node, len(match.pages)
        found = self.host.find(node, key(tokens), namespace, have, whole)
        if found:
            self.host.pin(found)
            if (pages := self.allocate(len(found))) is not None:
                self.host.copy_in(found, pages)
                done = self.cache.insert(key(tokens), pages, namespace, have, like=found[0])
                self.cache.lock(done.node)
                self.cache.unlock(node)
                node, have = done.node, have + len(found)
            self.host.unpin(found)
        ready = have
        if (rest := self.allocate(whole - have)) is not None and len(rest):
            self.carry_out()  # a step's copies come before its rows
            for i, page in enumerate(rest):
                self.device[page] = (namespace, tuple(tokens[: (have + i + 1) * self.page_size]))
            done = self.cache.insert(key(tokens), rest, namespace, have)
            self.cache.lock(done.node)
            self.cache.unlock(node)
            node = done.node
        if keep:
            self.locked.append(node)
        else:
            self.cache.unlock(node)
        if write:
            self.carry_out()
        return ready

    def check(self) -> None:
        """Every page of the tree and, after the copies, every slot holds the prefix that it is found by."""
        self.carry_out()
        self.host.ledger()
        assert (
            self.allocator.free_count + self.cache.evictable_pages + self.cache.locked_pages
            == len(self.device)
        )
        todo: list[tuple[RadixNode, bytes, bytes]] = [
            (r, b"", ns) for ns, r in RadixCacheProbe(self.cache).roots.items()
        ]
        while todo:
            node, before, namespace = todo.pop()
            path = before + node.key if node.parent is not None else b""
            for i, page in enumerate(node.pages):
                end = len(before) + (i + 1) * self.page_size * 4
                assert self.device[page] == (namespace, tuple(array("i", path[:end]))), (
                    "the tree finds a wrong page"
                )
            todo += [(child, path, namespace) for child in node.children.values()]


@settings(max_examples=examples(150), deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(sorted(EVICTION_POLICIES)))
def test_whatever_happens_a_page_is_found_only_by_its_own_prefix(
    rng: random.Random, eviction: str
) -> None:
    slots = rng.randint(1, 16)
    m = Machine(rng.randint(4, 12), slots, rng.randint(1, 3), eviction)
    pinned: list[list[HostPage]] = []
    for _ in range(60):
        turn = rng.random()
        if turn < 0.7:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 6) * m.page_size)]
            keep = rng.random() < 0.3 and len(m.locked) < 2
            m.use(tokens, rng.choice([b"", b"other"]), keep=keep, write=rng.random() < 0.7)
        elif turn < 0.8 and m.locked:
            m.cache.unlock(m.locked.pop(rng.randrange(len(m.locked))))
        elif turn < 0.88 and m.locked:
            node = m.locked.pop(rng.randrange(len(m.locked)))
            m.cache.unlock(node)
            branch = [] if m.cache.is_quarantined(node) else m.cache.branch_nodes(node)
            keys, count = m.host.branch_keys(branch)
            assert count == sum(len(part.pages) for part in branch)
            if count and m.host.reserve(count):
                before = m.allocator.free_count
                assert m.cache.evict_branch(node) == count == m.allocator.free_count - before
                pinned.append(m.host.only_here(keys))
                assert len(pinned[-1]) == count, "reserved room is there"
                m.host.pin(pinned[-1])
        elif turn < 0.9:
            first, namespace = (
                key([rng.randrange(2) for _ in range(m.page_size)]),
                rng.choice([b"", b"other"]),
            )
            m.cache.quarantine(first, namespace)
            m.host.quarantine(first, namespace)
            assert (
                m.host.find(m.cache.match(first, namespace, 0).node, first, namespace, 0, 1) == []
            )
        elif turn < 0.97 and pinned:
            m.host.unpin(pinned.pop(rng.randrange(len(pinned))))
        elif turn >= 0.97:
            m.cache.flush()
            m.host.clear()
            assert m.host.ledger().cached == 0
        if rng.random() < 0.7:
            m.check()
    for kept in pinned:
        m.host.unpin(kept)
    m.check()
    m.host.ledger().check_idle(slots)


def test_evicted_pages_come_back_at_one_copy_each_way() -> None:
    m = Machine(pages=4, slots=8)
    first, other = [1] * 8, [2] * 8
    assert m.use(first) == 0
    assert m.use(other) == 0, "evicts all of the first"
    assert m.host.ledger() == HostLedger(4, 4, 0)
    assert m.use(first) == 4
    assert m.copied == {True: 8, False: 4}
    assert m.use(other) == 4
    assert m.use(first) == 4
    assert m.copied == {True: 8, False: 12}, (
        "a slot keeps its content: going out again costs nothing"
    )
    m.check()


def test_page_survives_the_loss_of_its_prefix() -> None:
    m = Machine(pages=8, slots=2, eviction="lru")
    m.use([1] * 8)
    m.cache.evict(4)
    assert m.host.ledger().cached == 2
    found = m.host.find(m.cache.match(key([1] * 8), b"", 8).node, key([1] * 8), b"", 0, 4)
    assert [p.index for p in found] == [0, 1], "of one leaf the pages closest to the root are kept"
    m.host._drop_page(found[0])
    m.use([1, 1])
    assert m.use([1] * 8) == 2, "one computed again, the other still here"
    m.check()


@pytest.mark.parametrize(("eviction", "kept"), [("lru", 3), ("mru", 1), ("fifo", 3), ("filo", 1)])
def test_eviction_policy_decides_which_pages_stay_on_the_host(eviction: str, kept: int) -> None:
    m = Machine(pages=9, slots=3, eviction=eviction)
    for token in (1, 2, 3, 1, 2, 3):
        m.use([token] * 6)
    m.cache.evict(9)
    m.carry_out()
    assert [t for t in (1, 2, 3) if m.use([t] * 6) == 3] == [kept]


def test_pages_never_requested_again_displace_no_others() -> None:
    m = Machine(pages=4, slots=4)
    m.use([1] * 8)
    m.cache.evict(4)
    for token in range(10, 20):
        m.use([token] * 8)  # free slots are all it may take
    m.cache.flush()
    m.check()
    assert m.copied == {True: 4, False: 0}
    assert m.use([1] * 8) == 4, "still here"


def test_next_turn_of_a_conversation_displaces_what_was_not_continued() -> None:
    m = Machine(pages=8, slots=6)
    m.use([9] * 8)
    m.cache.evict(4)
    for turn in (4, 8, 12):
        m.use([1] * turn)
    m.cache.evict(8)
    m.check()
    assert m.copied[True] == 4 + 6
    assert m.use([1] * 12) == 6, (
        "the third turn, too, though no request had asked for its pages yet"
    )


def test_duplicates_go_first_and_pinned_pages_never() -> None:
    m = Machine(pages=4, slots=4)
    m.use([1] * 4)
    m.cache.evict(2)
    m.use([1] * 4, keep=True)  # back on the device: both slots are duplicates
    m.use([2] * 4)
    m.cache.evict(2)
    pinned = m.host.only_here(m.host._pages)
    assert len(pinned) == 2
    m.host.pin(pinned)
    assert not m.host.reserve(2), "three quarters of the pool at most"
    m.use([3] * 4)
    m.cache.evict(2)
    assert m.host.ledger() == HostLedger(0, 2, 2)
    assert m.use([3] * 4) == 2
    m.host.unpin(pinned)
    m.check()


def test_full_host_without_room_just_forgets() -> None:
    m = Machine(pages=4, slots=2, eviction="mru")
    m.use([1] * 4)
    m.cache.evict(2)
    m.use([2] * 4)
    m.cache.evict(2)
    assert (m.use([2] * 4), m.use([1] * 4)) == (0, 2), (
        "mru: the new page is worth less than what is here"
    )
    with pytest.raises(LedgerError, match="sums to 3 of 2"):
        HostLedger(1, 1, 1).check(2)
    with pytest.raises(LedgerError, match="pinned"):
        HostLedger(1, 0, 1).check_idle(2)


def test_quarantine_forgets_all_behind_the_first_page_and_pinned_pages_keep_their_slot() -> None:
    m = Machine(6, 8)
    for tokens in ([1, 1, 2, 2], [1, 1, 3, 3], [5, 5, 6, 6], [7] * 12):
        m.use(tokens)
    path = key([1, 1, 2, 2])
    nowhere = m.cache.match(path, b"", 4).node
    found = m.host.find(nowhere, path, b"", 0, 2)
    m.host.pin(found[1:])
    assert m.host.ledger() == HostLedger(free=3, cached=4, pinned=1)
    assert m.host.quarantine(key([1, 1, 9, 9]), b"other") == 0
    assert m.host.quarantine(key([1, 1, 9, 9]), b"") == 3
    assert m.host.ledger() == HostLedger(free=5, cached=2, pinned=1)
    assert m.host.find(nowhere, path, b"", 0, 2) == []
    m.host.unpin(found[1:])
    assert m.host.ledger() == HostLedger(free=6, cached=2, pinned=0)
    assert m.use([5, 5, 6, 6]) == 2
    m.check()
