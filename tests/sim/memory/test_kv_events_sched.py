"""KV events of a scheduler under load: nothing is announced before it is in memory, and replay gives the tree."""

from __future__ import annotations

import dataclasses
import random

import pytest

from baton.cache.eviction import EVICTION_POLICIES
from baton.cache.kv_events import EventBatch
from baton.sched.setup.limits import Limits
from tests.support.effort import seeds
from tests.support.probes import RadixCacheProbe, SchedulerProbe
from tests.support.sched.kv_replay import Consumer, settled_prefixes
from tests.support.sched.sched_sim import VOCAB, Node, chain, random_prompt, request

KEEP = 64


def in_memory(node: Node) -> set[bytes]:
    """Token bytes of every announced block, after checking that the pretend device holds its KV."""
    sched = node.sched
    log = sched.kv_events
    cache = SchedulerProbe(sched).memory.cache
    assert log is not None
    found = set()
    stack = [(b"", edge) for _, edge in RadixCacheProbe(cache).edges()]
    while stack:
        before, edge = stack.pop()
        for i, page in enumerate(edge.pages):
            if page not in log._hashes:
                continue
            prefix = before + edge.key[: (i + 1) * cache.page_size * 4]
            found.add(prefix)
            state, states = 1, []
            for token in memoryview(prefix).cast("i"):
                state = chain(state, token)
                states.append(state)
            assert node.device.memory[page] == states[-cache.page_size :], (
                "announced before it was computed"
            )
        stack += [(before + edge.key, child) for child in edge.children.values()]
    return found


def drain(node: Node, consumer: Consumer) -> EventBatch | None:
    log = node.sched.kv_events
    assert log is not None
    batch = log.take_batch(0.0)
    for event in batch.events if batch else ():
        consumer.apply(event)
    return batch


@pytest.mark.parametrize("seed", seeds(60))
def test_replay_gives_what_is_cached_and_computed(seed: int) -> None:
    rng = random.Random(seed)
    page = rng.choice([1, 2, 4])
    lim = Limits(
        rng.randint(12, 60) * (4 // page), page, rng.choice([1, 2, 4, 8]), 10_000, page * rng.randint(1, 8),
        policy=rng.choice(["fcfs", "lpm", "srpt-aging"]), radix_eviction_policy=rng.choice(list(EVICTION_POLICIES)),
        schedule_conservativeness=rng.choice([0.1, 1.0]), kv_event_batches=KEEP,
    )  # fmt: skip
    node = Node(lim, depth=rng.choice([1, 2, 3]))
    consumer = Consumer(page * 4)
    shared = [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 16))] for _ in range(3)]
    announced = 0
    for handle in range(40):
        prompt = random_prompt(rng, shared, min(24, lim.capacity_tokens - 1))
        node.sched.add(request(handle, prompt, rng.randint(1, 20), ignore_eos=rng.random() < 0.7))
        for _ in range(rng.randint(0, 5)):
            node.step()
            announced += drain(node, consumer) is not None
            held = in_memory(node)
            assert {tokens for _, tokens in consumer.prefixes} == held
            assert consumer.prefixes == settled_prefixes(node.probe.memory.cache)
        if rng.random() < 0.2:
            node.sched.abort(rng.randrange(handle + 1))
        if rng.random() < 0.05:
            node.sched.flush_cache()
    node.run()
    node.sched.plan()
    drain(node, consumer)
    assert announced > 10
    assert len(consumer.blocks) == node.sched.ledger().cached, (
        "idle: all that is cached is announced"
    )
    assert len(in_memory(node)) == len(consumer.blocks)
    fresh = Consumer(page * 4)
    for event in node.sched.report.cached_blocks():
        fresh.apply(event)
    assert fresh.blocks == consumer.blocks


def test_prompt_aborted_in_flight_is_announced_only_with_its_step() -> None:
    node = Node(Limits(16, 2, 4, 100, 64, kv_event_batches=KEEP), depth=3)
    consumer = Consumer(8)
    node.sched.add(request(0, [1, 2, 3, 4, 1], 4, ignore_eos=True))
    node.step()
    node.sched.abort(0)
    drain(node, consumer)
    assert not consumer.blocks
    node.run()
    drain(node, consumer)
    assert len(consumer.blocks) == 2
    in_memory(node)


def test_pages_that_arrive_on_d_are_announced_without_a_step() -> None:
    node = Node(Limits(16, 2, 4, 100, 64, role="decode", kv_event_batches=KEEP), depth=2)
    consumer = Consumer(8)
    node.sched.add(request(0, [1, 2, 3, 4, 1], 1, ignore_eos=True, room=7))
    node.step()
    drain(node, consumer)
    assert not consumer.blocks
    node.sched.transfer_committed(7, 3, 0, None)
    node.step()
    drain(node, consumer)
    assert len(consumer.blocks) == 2


def test_no_events_cost_nothing_unless_asked_for() -> None:
    plain = Node(Limits(16, 2, 4, 100, 64), depth=1)
    assert plain.sched.kv_events is None
    assert plain.sched.report.cached_blocks() == []
    assert dataclasses.replace(plain.limits, kv_event_batches=1).kv_event_batches == 1
