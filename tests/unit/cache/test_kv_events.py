"""The event log against the tree: what a consumer builds from it is exactly what the tree holds and has computed."""

from __future__ import annotations

import hashlib
import random
import struct
from array import array

import pytest

from baton.cache.eviction import EVICTION_POLICIES
from baton.cache.kv_events import Cleared, KvEventLog, Removed, Stored, chain, first_parent
from baton.cache.pages import PageAllocator
from baton.cache.radix import RadixCache
from tests.support.effort import seeds
from tests.support.sched.kv_replay import Consumer, settled_prefixes

KEEP = 50


def encode(*tokens: int) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


def make(
    page_size: int = 1, pages: int = 16, eviction: str = "lru"
) -> tuple[RadixCache, PageAllocator, KvEventLog]:
    allocator = PageAllocator(pages)
    log = KvEventLog(page_size * 4, keep=KEEP)
    return RadixCache(page_size, allocator, eviction=eviction, log=log), allocator, log


def publish(
    cache: RadixCache, allocator: PageAllocator, tokens: bytes, namespace: bytes = b""
) -> None:
    known = cache.match(tokens, namespace, len(tokens) // 4)
    cache.lock(known.node)
    start = known.num_tokens // cache.page_size
    short = len(tokens) // 4 // cache.page_size - start - allocator.free_count
    cache.evict(max(short, 0))
    pages = allocator.alloc(len(tokens) // 4 // cache.page_size - start)
    if pages:
        cache.insert(tokens, pages, namespace, start)
    cache.unlock(known.node)


@pytest.mark.parametrize("seed", seeds(60))
def test_replay_gives_exactly_the_settled_pages(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4])
    cache, allocator, log = make(size, rng.randint(8, 30), rng.choice(list(EVICTION_POLICIES)))
    consumer = Consumer(size * 4)
    late = Consumer(size * 4)
    seqs = []
    locked = []
    marks: list[int] = []
    for _ in range(400):
        tokens = encode(*[t for _ in range(rng.randint(1, 5)) for t in [rng.randrange(3)] * size])
        namespace = rng.choice([b"", b"", b"tenant"])
        action = rng.random()
        if action < 0.45:
            publish(cache, allocator, tokens, namespace)
        elif action < 0.6:
            cache.evict(rng.randint(1, 4))
        elif action < 0.7:
            match = cache.match(tokens, namespace, rng.randint(0, 20))
            cache.lock(match.node)
            locked.append(match.node)
        elif action < 0.8 and locked:
            cache.unlock(locked.pop(rng.randrange(len(locked))))
        elif action < 0.9:
            marks.append(cache.clock)  # a step is planned
        elif marks:
            cache.settle(marks.pop(0))  # the oldest step commits
        if rng.random() < 0.3 and (batch := log.take_batch(0.0)):
            seqs.append(batch.seq)
            for event in batch.events:
                consumer.apply(event)
            assert consumer.prefixes == settled_prefixes(cache)
        if rng.random() < 0.05 and not log._open:
            late = Consumer(size * 4)
            for event in log.snapshot(cache.edges()):
                late.apply(event)
            assert late.blocks == consumer.blocks
        assert len(log._pending) + len(log._hashes) == cache.evictable_pages + cache.locked_pages
    assert seqs == list(range(len(seqs)))
    assert len(log._batches) <= KEEP
    for node in locked:
        cache.unlock(node)
    cache.flush()
    if batch := log.take_batch(0.0):
        for event in batch.events:
            consumer.apply(event)
    assert not consumer.blocks
    cache.settle(cache.clock)
    assert not log._queue
    assert log.take_batch(0.0) is None


def test_first_word_is_that_there_is_nothing() -> None:
    log = KvEventLog(4, keep=1)
    batch = log.take_batch(1.5)
    assert batch is not None
    assert (batch.seq, batch.ts, batch.events) == (0, 1.5, (Cleared(),))
    assert log.take_batch(2.0) is None


def test_page_is_announced_when_its_step_has_committed_and_not_before() -> None:
    cache, allocator, log = make()
    log.take_batch(0.0)
    publish(cache, allocator, encode(1, 2))
    planned = cache.clock
    publish(cache, allocator, encode(1, 2, 3))
    assert log.take_batch(0.0) is None
    cache.settle(planned)
    first = log.take_batch(0.0)
    assert first is not None
    one, two = chain(0, encode(1)), chain(chain(0, encode(1)), encode(2))
    assert first.events == (Stored((one, two), None, encode(1, 2), b""),)
    cache.settle(cache.clock)
    second = log.take_batch(0.0)
    assert second is not None
    assert second.events == (Stored((chain(two, encode(3)),), two, encode(3), b""),)


def test_blocks_never_announced_leave_without_an_event() -> None:
    cache, allocator, log = make()
    log.take_batch(0.0)
    publish(cache, allocator, encode(1, 2, 3))
    cache.evict(2)
    cache.settle(cache.clock)
    batch = log.take_batch(0.0)
    assert batch is not None
    assert batch.events == (Stored((chain(0, encode(1)),), None, encode(1), b""),)
    publish(cache, allocator, encode(9))
    cache.evict(2)
    cache.settle(cache.clock)
    batch = log.take_batch(0.0)
    assert batch is not None
    assert batch.events == (Removed((chain(0, encode(1)),)),)


def test_hashes_are_the_documented_ones_and_differ_between_namespaces() -> None:
    parent = int.from_bytes(hashlib.sha256(b"tenant").digest()[:8], "big")
    assert first_parent(b"tenant") == parent
    digest = hashlib.sha256(struct.pack(">Q", parent) + struct.pack("<2i", 7, 8)).digest()
    assert chain(parent, encode(7, 8)) == struct.unpack(">Q", digest[:8])[0]
    assert chain(first_parent(b""), encode(7, 8)) != chain(parent, encode(7, 8))


def test_replay_goes_back_as_far_as_batches_are_kept() -> None:
    cache, allocator, log = make(pages=64)
    for token in range(KEEP + 10):
        publish(cache, allocator, encode(token))
        cache.settle(cache.clock)
        assert log.take_batch(float(token)) is not None
    assert [b.seq for b in log.batches_since(0)] == list(range(10, KEEP + 10))
    assert [b.seq for b in log.batches_since(KEEP + 8)] == [KEEP + 8, KEEP + 9]
    assert list(log.batches_since(log.next_seq)) == []


def test_tree_without_a_log_works_the_same() -> None:
    with_log, without = make(2, 8)[:2], (RadixCache(2, allocator := PageAllocator(8)), allocator)
    for seed in range(200):
        rng = random.Random(seed)
        tokens = encode(*[rng.randrange(2) for _ in range(8)])
        for cache, pages in (with_log, without):
            publish(cache, pages, tokens)
            cache.settle(cache.clock)
    assert with_log[0].match(tokens, b"", 8).pages == without[0].match(tokens, b"", 8).pages
    assert array("i", with_log[1]._free) == array("i", without[1]._free)
