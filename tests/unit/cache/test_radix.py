"""RadixCache against a naive model: a dictionary from (namespace, page-aligned prefix) to the page of its last tokens.

The model knows nothing of nodes or edges, so it cannot share the tree's mistakes. Small alphabets (two token values,
prompts of a few pages) make sharing, splitting and duplicates the normal case.
"""

from __future__ import annotations

import random
import struct
import timeit
from array import array
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.cache.eviction import EVICTION_POLICIES
from baton.cache.ledger import PageLedger
from baton.cache.pages import PageAllocator
from baton.cache.radix import DEAD_ENTRIES, LOWEST_PRIORITY, InsertResult, PrefixProbe, RadixCache
from tests.support.effort import examples
from tests.support.probes import RadixCacheProbe
from tests.support.sched.sched_sim import duplicates


def encode(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


def fill(
    cache: RadixCache, allocator: PageAllocator, tokens: list[int], namespace: bytes = b""
) -> InsertResult:
    """Act as a request without a prefix hit: compute all full pages, publish them, free the duplicates."""
    pages = allocator.alloc(len(tokens) // cache.page_size)
    assert pages is not None
    inserted = cache.insert(encode(tokens), pages, namespace)
    allocator.free(duplicates(pages, inserted))
    return inserted


@dataclass
class Held:
    """One lock a pretended request holds."""

    node: object
    namespace: bytes
    prefix: tuple[int, ...]


class RadixMachine(RuleBasedStateMachine):
    """Random publish, match, reuse, lock, evict and flush on a pool small enough to be full most of the time.

    The victim of each policy is found by brute force: page by page, over all leaf pages of the model.
    """

    CAPACITY = 12

    @initialize(
        page_size=st.sampled_from([1, 2, 4]), policy=st.sampled_from(list(EVICTION_POLICIES))
    )
    def start(self, page_size: int, policy: str) -> None:
        self.page_size = page_size
        self.policy = policy
        self.allocator = PageAllocator(self.CAPACITY)
        self.cache = RadixCache(page_size, self.allocator, eviction=policy)
        self.model: dict[tuple[bytes, tuple[int, ...]], int] = {}
        self.content: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self.used: dict[tuple[bytes, tuple[int, ...]], int] = {}
        self.created: dict[tuple[bytes, tuple[int, ...]], int] = {}
        self.reuses: dict[tuple[bytes, tuple[int, ...]], int] = {}
        self.priority: dict[tuple[bytes, tuple[int, ...]], int] = {}
        self.clock = 0
        self.held: list[Held] = []
        self.probes: list[tuple[bytes, list[int], PrefixProbe]] = []
        self.private: list[int] = []

    def prefixes(self, namespace: bytes, tokens: list[int]) -> list[tuple[bytes, tuple[int, ...]]]:
        """Keys of every whole page of `tokens`, shortest first."""
        size = self.page_size
        return [(namespace, tuple(tokens[: i * size])) for i in range(1, len(tokens) // size + 1)]

    def cached_prefixes(
        self, namespace: bytes, tokens: list[int]
    ) -> list[tuple[bytes, tuple[int, ...]]]:
        found = []
        for key in self.prefixes(namespace, tokens):
            if key not in self.model:
                break
            found.append(key)
        return found

    def mark_used(self, keys: list[tuple[bytes, tuple[int, ...]]]) -> None:
        self.clock += 1
        for key in keys:
            self.used[key] = self.clock

    def mark_important(self, keys: list[tuple[bytes, tuple[int, ...]]], priority: int) -> None:
        for key in keys:
            self.priority[key] = max(self.priority[key], priority)

    def rank(self, key: tuple[bytes, tuple[int, ...]]) -> tuple[int, ...]:
        """Smallest goes first; pages of one path that tie go last one first."""
        last = -len(key[1])
        if self.policy == "lru":
            return self.used[key], last
        if self.policy == "mru":
            return -self.used[key], last
        if self.policy == "fifo":
            return self.created[key], last
        if self.policy == "filo":
            return -self.created[key], last
        first = self.reuses[key] if self.policy == "lfu" else self.priority[key]
        return first, self.used[key], last

    def locked(self) -> set[tuple[bytes, tuple[int, ...]]]:
        return {
            key for held in self.held for key in self.prefixes(held.namespace, list(held.prefix))
        }

    shapes = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(0, 3))
    namespaces = st.sampled_from([b"", b"", b"tenant"])

    def sequence(self, shape: tuple[list[int], int]) -> list[int]:
        """Tokens of up to four pages of three kinds (two differ in their last token only), and a partial page."""
        size = self.page_size
        kinds = ([0] * size, [0] * (size - 1) + [1], [2] * size)
        pages, tail = shape
        return [token for kind in pages for token in kinds[kind]] + [0] * min(tail, size - 1)

    priorities = st.sampled_from([LOWEST_PRIORITY, 0, 1, 2])

    @rule(
        shape=shapes,
        namespace=namespaces,
        limit=st.sampled_from([0, 1, 3, 9, 20]),
        keep=st.booleans(),
        reuse=st.booleans(),
        beyond=st.integers(0, 4),
        priority=priorities,
    )
    def match(
        self,
        shape: tuple[list[int], int],
        namespace: bytes,
        limit: int,
        keep: bool,
        reuse: bool,
        beyond: int,
        priority: int,
    ) -> None:
        tokens = self.sequence(shape)
        expected = self.cached_prefixes(namespace, tokens[:limit])
        assert (
            self.cache.probe(encode(tokens), namespace, limit).num_tokens
            == len(expected) * self.page_size
        )
        match = self.cache.match(encode(tokens), namespace, limit)
        assert match.num_tokens == len(expected) * self.page_size
        assert list(match.pages) == [self.model[key] for key in expected]
        self.mark_used(expected)
        if reuse:
            held = self.cache.match(
                encode(tokens), namespace, min(beyond * self.page_size, match.num_tokens)
            )
            self.mark_used(expected[:beyond])
            self.cache.reuse(match.node, priority, held.node if beyond else None)
            self.mark_important(expected, priority)
            for key in expected[beyond:]:
                self.reuses[key] += 1
        if keep:
            self.cache.lock(match.node)
            self.held.append(Held(match.node, namespace, tuple(tokens[: match.num_tokens])))

    @rule(shape=shapes, namespace=namespaces)
    def probe(self, shape: tuple[list[int], int], namespace: bytes) -> None:
        tokens = self.sequence(shape)
        self.probes = [
            *self.probes[-7:],
            (namespace, tokens, self.cache.probe(encode(tokens), namespace, len(tokens))),
        ]

    @rule(
        shape=shapes,
        namespace=namespaces,
        extend=st.booleans(),
        keep=st.booleans(),
        priority=priorities,
    )
    def publish(
        self,
        shape: tuple[list[int], int],
        namespace: bytes,
        extend: bool,
        keep: bool,
        priority: int,
    ) -> None:
        """A request matches, computes the rest (or, `extend` off, all of it again) and publishes its full pages."""
        tokens = self.sequence(shape)
        keys = self.prefixes(namespace, tokens)
        known = self.cached_prefixes(namespace, tokens)
        match = self.cache.match(encode(tokens), namespace, len(tokens))
        self.mark_used(known)
        start = len(known) if extend else 0
        pages = self.allocator.alloc(len(keys) - start)
        if pages is None:
            return
        inserted = self.cache.insert(
            encode(tokens), pages, namespace, from_page=start, priority=priority
        )
        assert list(inserted.existing_pages) == [self.model[key] for key in known[start:]]
        assert list(duplicates(pages, inserted)) == list(pages[: len(known) - start])
        self.allocator.free(duplicates(pages, inserted))
        for key, page in list(zip(keys[start:], pages, strict=True))[len(known) - start :]:
            self.model[key] = page
            self.content[page] = (namespace, key[1][-self.page_size :])
            self.created[key], self.reuses[key], self.priority[key] = self.clock, 0, priority
        self.mark_important(keys, priority)
        self.mark_used(keys)
        assert list(self.cache.match(encode(tokens), namespace, len(tokens)).pages) == [
            self.model[k] for k in keys
        ]
        self.mark_used(keys)
        assert match.num_tokens == len(known) * self.page_size
        if keep:
            self.cache.lock(inserted.node)
            self.held.append(Held(inserted.node, namespace, keys[-1][1] if keys else ()))

    @rule(shape=shapes, namespace=namespaces)
    def republish_the_trees_own_pages(self, shape: tuple[list[int], int], namespace: bytes) -> None:
        """Inserting a page where it is already: nothing is duplicate, nothing is taken."""
        tokens = self.sequence(shape)
        match = self.cache.match(encode(tokens), namespace, len(tokens))
        inserted = self.cache.insert(encode(tokens), match.pages, namespace)
        assert inserted.existing_pages == match.pages
        assert not duplicates(match.pages, inserted)
        self.mark_used(self.cached_prefixes(namespace, tokens))

    @rule(shape=shapes, namespace=namespaces, beyond=st.integers(1, 3))
    def insert_behind_a_prefix_that_is_gone_is_refused(
        self, shape: tuple[list[int], int], namespace: bytes, beyond: int
    ) -> None:
        tokens = self.sequence(shape)
        known = len(self.cached_prefixes(namespace, tokens))
        start = known + beyond
        if start > len(tokens) // self.page_size:
            return
        with pytest.raises(ValueError, match="lock the prefix first"):
            self.cache.insert(encode(tokens), array("i"), namespace, from_page=start)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.cache.unlock(held.node)  # type: ignore[arg-type]

    @rule(n=st.sampled_from([0, 1, 1, 1, 2, 3, 14]))
    def evict(self, n: int) -> None:
        """Exactly the pages go that the model picks: the policy's first unlocked leaf page, one at a time."""
        gone = []
        locked = self.locked()
        for _ in range(n):
            inner = {(ns, key[: -self.page_size]) for ns, key in self.model}
            leaves = [key for key in self.model if key not in inner and key not in locked]
            if not leaves:
                break
            victim = min(leaves, key=self.rank)
            gone.append(self.model.pop(victim))
        assert self.cache.evict(n) == len(gone)
        for page in gone:
            del self.content[page]

    @rule()
    def flush(self) -> None:
        locked = self.locked()
        unlocked = [key for key in self.model if key not in locked]
        assert self.cache.flush() == len(unlocked)
        for key in unlocked:
            del self.content[self.model.pop(key)]

    @rule(n=st.integers(1, 3))
    def take_private_pages(self, n: int) -> None:
        self.private += self.allocator.alloc(n) or ()

    @rule()
    def free_private_pages(self) -> None:
        self.allocator.free(self.private)
        self.private = []

    @invariant()
    def pages_are_conserved(self) -> None:
        if not hasattr(self, "cache"):
            return
        locked = len(self.locked())
        assert self.cache.locked_pages == locked
        assert self.cache.evictable_pages == len(self.model) - locked
        PageLedger.count_pages(
            self.allocator, self.cache, private=len(self.private), in_transfer=0
        ).check(self.CAPACITY)
        assert len(set(self.model.values())) == len(self.model), "one page in two places"

    @invariant()
    def a_probe_asked_again_answers_like_a_new_one(self) -> None:
        if not hasattr(self, "cache"):
            return
        for i, (namespace, tokens, last) in enumerate(self.probes):
            again = self.cache.probe(encode(tokens), namespace, len(tokens), last)
            fresh = self.cache.probe(encode(tokens), namespace, len(tokens))
            assert again.num_tokens == len(self.cached_prefixes(namespace, tokens)) * self.page_size
            assert again == fresh
            assert self.cache.path_of(again) == self.cache.path_of(fresh)
            if i % 2:  # the others keep asking with their first, ever older answer
                self.probes[i] = (namespace, tokens, again)

    @invariant()
    def every_cached_page_holds_the_tokens_that_made_it(self) -> None:
        if not hasattr(self, "cache"):
            return
        for (namespace, prefix), page in self.model.items():
            assert self.content[page] == (namespace, prefix[-self.page_size :])
            assert self.cache.probe(encode(list(prefix)), namespace, len(prefix)).num_tokens == len(
                prefix
            )

    @invariant()
    def the_eviction_queue_is_bounded(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert len(RadixCacheProbe(self.cache).eviction_queue) <= 2 * self.CAPACITY + DEAD_ENTRIES

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for held in self.held:
            self.cache.unlock(held.node)  # type: ignore[arg-type]
        self.allocator.free(self.private)
        self.cache.flush()
        assert self.allocator.free_count == self.CAPACITY
        assert not RadixCacheProbe(self.cache).roots, "an empty namespace was kept"
        assert not RadixCacheProbe(self.cache).eviction_queue, "a dead node was kept"


RadixMachine.TestCase.settings = settings(
    max_examples=examples(200), stateful_step_count=40, deadline=None
)
TestRadix = RadixMachine.TestCase


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", list(EVICTION_POLICIES))
def test_full_pool_evicts_what_the_policy_says(policy: str, seed: int) -> None:
    """The same machine driven by a seeded mix that keeps the pool full of leaves: thousands of real choices."""
    rng = random.Random(f"{policy} {seed}")
    machine = RadixMachine()
    machine.start(page_size=rng.choice([1, 2, 4]), policy=policy)
    real_choices = 0
    for _ in range(1500):
        shape = ([rng.randrange(3) for _ in range(rng.randint(1, 4))], rng.randrange(4))
        namespace = rng.choice([b"", b"", b"tenant"])
        action = rng.random()
        if action < 0.3:
            machine.publish(
                shape, namespace, rng.random() < 0.7, rng.random() < 0.15, rng.randrange(3)
            )
        elif action < 0.6:
            limit, beyond, priority = rng.randrange(20), rng.randrange(3), rng.randrange(3)
            machine.match(
                shape, namespace, limit, rng.random() < 0.15, rng.random() < 0.7, beyond, priority
            )
        elif action < 0.85:
            real_choices += len(RadixCacheProbe(machine.cache).eviction_queue) > 1
            machine.evict(rng.choice([1, 1, 2, 3]))
        elif machine.held:
            held = machine.held.pop(rng.randrange(len(machine.held)))
            machine.cache.unlock(held.node)  # type: ignore[arg-type]
        machine.pages_are_conserved()
        machine.every_cached_page_holds_the_tokens_that_made_it()
        machine.the_eviction_queue_is_bounded()
    machine.teardown()
    assert real_choices > 150, "the mix no longer fills the pool"


def test_prefix_used_all_the_time_does_not_grow_the_eviction_queue() -> None:
    allocator = PageAllocator(8)
    cache = RadixCache(1, allocator, eviction="mru")
    for head in range(4):
        fill(cache, allocator, [head, 9])
    for i in range(10_000):
        cache.match(encode([i % 4, 9]), b"", 2)
    assert len(RadixCacheProbe(cache).eviction_queue) <= 2 * 4 + DEAD_ENTRIES
    assert cache.evict(2) == 2
    assert cache.probe(encode([3, 9]), b"", 2).num_tokens == 0


def test_unknown_eviction_policy_is_refused() -> None:
    with pytest.raises(
        ValueError, match="'slru': there is none of this name; there are lru, lfu, fifo"
    ):
        RadixCache(1, PageAllocator(1), eviction="slru")


def test_match_ends_inside_an_edge_at_a_page_boundary() -> None:
    allocator = PageAllocator(8)
    cache = RadixCache(2, allocator)
    fill(cache, allocator, [1, 2, 3, 4, 5, 6])
    match = cache.match(encode([1, 2, 3, 9, 5, 6]), b"", 6)
    assert (match.num_tokens, list(match.pages)) == (2, [0])


def test_handle_survives_a_split_of_its_edge() -> None:
    allocator = PageAllocator(8)
    cache = RadixCache(1, allocator)
    long = fill(cache, allocator, [1, 2, 3, 4])
    cache.lock(long.node)
    fill(cache, allocator, [1, 2, 7])
    assert (cache.locked_pages, cache.evictable_pages) == (4, 1)
    assert cache.flush() == 1
    cache.unlock(long.node)
    assert cache.flush() == 4
    assert allocator.free_count == 8


def test_lock_on_an_evicted_node_is_refused() -> None:
    allocator = PageAllocator(4)
    cache = RadixCache(1, allocator)
    node = fill(cache, allocator, [1, 2, 3]).node
    assert cache.evict(1) == 1
    with pytest.raises(ValueError, match="evicted"):
        cache.lock(node)
    assert cache.match(encode([1, 2, 3]), b"", 3).num_tokens == 2


def test_unlock_without_lock_is_refused() -> None:
    allocator = PageAllocator(4)
    cache = RadixCache(1, allocator)
    with pytest.raises(ValueError, match="not locked"):
        cache.unlock(fill(cache, allocator, [1]).node)


def test_eviction_frees_the_oldest_leaf_then_its_parent() -> None:
    allocator = PageAllocator(8)
    cache = RadixCache(1, allocator)
    fill(cache, allocator, [1, 2])
    fill(cache, allocator, [3])
    fill(cache, allocator, [1, 4])
    assert cache.evict(1) == 1  # [1, 2]'s tail: the shared [1] was used later
    assert cache.probe(encode([1, 2]), b"", 2).num_tokens == 1
    assert cache.evict(1) == 1
    assert cache.probe(encode([3]), b"", 1).num_tokens == 0
    assert cache.evict(5) == 2
    assert allocator.free_count == 8


def test_tokens_that_do_not_fill_the_pages_are_refused() -> None:
    allocator = PageAllocator(4)
    cache = RadixCache(2, allocator)
    pages = allocator.alloc(2)
    assert pages is not None
    with pytest.raises(ValueError, match="3 tokens do not fill 2 pages"):
        cache.insert(encode([1, 2, 3]), pages, b"")


def test_misses_create_no_namespaces() -> None:
    cache = RadixCache(1, PageAllocator(4))
    for i in range(100):
        cache.match(encode([1]), b"%d" % i, 1)
    assert not RadixCacheProbe(cache).roots


def test_matching_4096_tokens_is_far_from_a_loop_over_ints() -> None:
    """Budget 10 us in the research; a ratio to the loop it replaces holds on a busy machine too."""
    allocator = PageAllocator(256)
    cache = RadixCache(16, allocator)
    tokens = [i % 997 for i in range(4096)]
    fill(cache, allocator, tokens)
    key = encode(tokens)

    def naive() -> int:
        same = 0
        for a, b in zip(tokens, tokens, strict=True):
            if a != b:
                break
            same += 1
        return same

    fast = min(timeit.repeat(lambda: cache.match(key, b"", 4096), number=200, repeat=5))
    slow = min(timeit.repeat(naive, number=200, repeat=5))
    assert fast < slow / 5, f"match {fast / 200 * 1e6:.1f} us, loop {slow / 200 * 1e6:.1f} us"
