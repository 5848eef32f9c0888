"""Eviction policies inside the scheduler: what requests do reaches the tree, and answers never depend on it."""

from __future__ import annotations

import dataclasses
import random

import pytest

from baton.cache.eviction import EVICTION_POLICIES
from baton.sched.setup.limits import Limits
from baton.sched.types.priority import PriorityRule
from baton.sched.types.request import FinishReason
from tests.support.probes import RadixCacheProbe
from tests.support.sched.sched_sim import VOCAB, Node, random_prompt, reference, request

PAGE = 4


def cached(node: Node, prompt: list[int]) -> int:
    """Prompt tokens that a request for `prompt` would find now."""
    handle = 10_000 + len(node.finished)
    node.sched.add(request(handle, [*prompt, 1], 1, ignore_eos=True))
    node.run()
    return node.cached[handle]


@pytest.mark.parametrize("policy", list(EVICTION_POLICIES))
@pytest.mark.parametrize("seed", range(6))
def test_answers_do_not_depend_on_what_is_evicted(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    lim = Limits(
        rng.randint(12, 30),
        rng.choice([1, 2, 4]),
        4,
        1000,
        16,
        radix_eviction_policy=policy,
        schedule_conservativeness=0.2,
    )
    node = Node(lim, depth=rng.choice([1, 2]))
    shared = [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 10))] for _ in range(3)]
    want = {}
    for handle in range(60):
        prompt = random_prompt(rng, shared, min(20, lim.capacity_tokens - 1))
        req = request(handle, prompt, rng.randint(1, 10), ignore_eos=True)
        req = dataclasses.replace(req, priority=rng.choice([None, 0, 5]))
        node.sched.add(req)
        want[handle] = reference(
            req.prompt, min(req.params.max_new_tokens, lim.capacity_tokens - len(prompt)), True
        )
        for _ in range(rng.randint(0, 5)):
            node.step()
    node.run()
    assert node.outputs == want
    assert set(node.finished.values()) == {FinishReason.LENGTH}
    assert node.sched.ledger().held == 0


def serve(node: Node, handle: int, prompt: list[int], priority: int | None = None) -> None:
    node.sched.add(
        dataclasses.replace(request(handle, prompt, 1, ignore_eos=True), priority=priority)
    )
    node.run()


@pytest.mark.parametrize("low_values_first", [False, True])
def test_prefixes_of_important_requests_stay(low_values_first: bool) -> None:
    """Ten pages: four for an important prompt, the rest for a stream of unimportant and unstated ones."""
    rule = PriorityRule(low_values_first=low_values_first)
    node = Node(
        Limits(10, PAGE, 2, 100, 64, radix_eviction_policy="priority", priority=rule), depth=1
    )
    important = [1] * 16
    serve(node, 0, important, priority=-5 if low_values_first else 5)
    for handle in range(1, 12):
        serve(
            node,
            handle,
            [2, *([handle % VOCAB, handle // VOCAB] * 8)][:16],
            None if handle % 2 else 0,
        )
    assert cached(node, important) == 16


def test_prefix_that_many_requests_reuse_outlives_newer_ones_with_lfu() -> None:
    kept = {}
    for policy in ("lru", "lfu"):
        node = Node(Limits(10, PAGE, 2, 100, 64, radix_eviction_policy=policy), depth=1)
        system = [1] * 16
        for handle in range(4):
            serve(node, handle, [*system, handle % VOCAB])
        for handle in range(4, 16):
            serve(node, handle, [2, *([handle % VOCAB, handle // VOCAB] * 8)][:16])
        kept[policy] = cached(node, system)
    assert kept == {"lru": 0, "lfu": 16}


def test_finding_ones_own_pages_after_a_retraction_is_no_reuse() -> None:
    """Retracted again and again, a request must not make its prompt look popular."""
    node = Node(
        Limits(8, 1, 4, 100, 8, radix_eviction_policy="lfu", schedule_conservativeness=0.01),
        depth=1,
    )
    for handle in range(3):
        node.sched.add(request(handle, [handle + 1, 3], 5, ignore_eos=True, is_length_known=False))
    node.run()
    assert node.sched.report.counters()["retractions_total"] > 0
    nodes = [child for _, child in RadixCacheProbe(node.probe.memory.cache).edges()]
    while nodes:
        at = nodes.pop()
        assert at.reuses == 0
        nodes += at.children.values()
