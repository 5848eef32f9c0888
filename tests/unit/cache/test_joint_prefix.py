"""The longest prefix of device and host together, against a naive model per kind of group."""

from __future__ import annotations

import random
from array import array
from collections import defaultdict

import pytest

from baton.cache.group_pages import NO_PAGE, GroupRule
from baton.cache.host import DIGEST_BYTES
from baton.cache.joint_prefix import find_joint_prefix
from baton.sched.setup.limits import Limits
from tests.support.probes import RadixCacheProbe
from tests.support.sched.sched_sim import Node, chain, request

RULES = {
    "window": (GroupRule("window", 5, 2),),
    "narrow": (GroupRule("window", 1, 1),),
    "chunk": (GroupRule("chunk", 4, 1),),
    "both": (GroupRule("window", 3, 1), GroupRule("chunk", 6, 2)),
}
PAGE = 2

Contents = dict[int, set[int]]
"""By group: the states at the end of the pages that it has, each of which stands for a prefix."""


def visible_places(rule: GroupRule, length: int) -> set[int]:
    """Pages of tokens that a token behind `length` pages sees, by the definition of the kind."""
    position = length * PAGE
    if rule.kind == "window":
        seen = [q for q in range(position) if position - q < rule.size]
    else:
        seen = [q for q in range(position) if q // rule.size == position // rule.size]
    return {q // PAGE for q in seen}


def on_device(node: Node) -> Contents:
    cache = node.probe.memory.cache
    found: Contents = defaultdict(set)
    stack = list(RadixCacheProbe(cache).roots.values())
    while stack:
        edge = stack.pop()
        stack += edge.children.values()
        groups = [edge.pages, *edge.further] if edge.parent is not None else []
        for group, pages in enumerate(groups):
            found[group].update(node.device.memory[page][-1] for page in pages if page != NO_PAGE)
    return found


def on_host(node: Node) -> Contents:
    host = node.probe.memory.host
    assert host is not None
    found: Contents = defaultdict(set)
    for key, page in host._pages.items():
        group = key[DIGEST_BYTES] if len(key) > DIGEST_BYTES else 0
        states = {node.device.host[slot][-1] for slot in page.slots}
        assert len(states) == 1, "the pages of a block are of the same tokens"
        found[group] |= states
    return found


def page_states(prompt: list[int]) -> list[int]:
    state = 1
    states = []
    for i, token in enumerate(prompt, start=1):
        state = chain(state, token)
        if i % PAGE == 0:
            states.append(state)
    return states


def naive_length(prompt: list[int], rules: tuple[GroupRule, ...], *tiers: Contents) -> int:
    """Most pages of tokens of which every group has, on either side, what the next token sees."""
    states = page_states(prompt)

    def has(group: int, place: int) -> bool:
        return any(states[place] in tier[group] for tier in tiers)

    lengths = [
        length
        for length in range(len(states) + 1)
        if all(has(0, place) for place in range(length))
        and all(
            has(group, place)
            for group, rule in enumerate(rules, start=1)
            for place in visible_places(rule, length)
        )
    ]
    return max(lengths)


def check_prompt(node: Node, prompt: list[int]) -> int:
    """Returns how many pages of tokens the host adds to the prefix."""
    memory = node.probe.memory
    rules = node.limits.page_groups
    host = memory.host
    assert host is not None
    key = array("i", prompt).tobytes()
    valid = memory.cache.match(key, b"", len(prompt)).num_tokens // PAGE
    device, kept = on_device(node), on_host(node)
    assert valid == naive_length(prompt, rules, device)
    path = memory.cache.match_full_group(key, b"", len(prompt))
    groups = memory.cache.groups
    limit = len(prompt) // PAGE
    joint = find_joint_prefix(host, groups, path, (key, b""), valid=valid, limit=limit)
    assert joint.length == naive_length(prompt, rules, device, kept)
    states = page_states(prompt)
    slots = [slot for page in joint.host_pages for slot in page.slots]
    assert len(slots) == len(joint.places)
    for slot, place in zip(slots, joint.places, strict=True):
        assert node.device.host[slot][-1] == states[place]
    for block in joint.blocks:
        assert states[block.place] not in device[block.group + 1]
    return joint.length - valid


@pytest.mark.parametrize("rules", RULES)
def test_joint_prefix_is_the_longest_that_every_group_has_on_either_side(rules: str) -> None:
    groups = RULES[rules]
    per_block = 1 + sum(rule.width for rule in groups)
    gained = 0
    for seed in range(6):
        rng = random.Random(seed)
        limits = Limits(
            14 * per_block, PAGE, 3, 1000, 8, preemption_mode="offload",
            host_pages=rng.choice([6, 12, 40]) * per_block, page_groups=groups,
        )  # fmt: skip
        node = Node(limits, depth=1)
        stems = [[rng.randrange(2) for _ in range(16)] for _ in range(2)]
        for handle in range(14):
            stem = rng.choice(stems)[: rng.randrange(17)]
            prompt = stem + [rng.randrange(2) for _ in range(rng.randint(1, 6))]
            node.sched.add(request(handle, prompt, rng.randint(1, 6), ignore_eos=True))
            for _ in range(rng.randrange(4)):
                node.step()
            node.sched.suspend([rng.randrange(handle + 1)])
            node.run()
            if rng.random() < 0.3:
                node.probe.memory.cache.evict(rng.randint(1, 4 * per_block))
                node.run()
            for _ in range(3):
                gained += check_prompt(node, rng.choice(stems) + [rng.randrange(2)] * 4)
            node.sched.resume([rng.randrange(handle + 1) for _ in range(2)])
        node.sched.resume(list(range(14)))
        node.run()
        assert len(node.finished) == 14
    assert gained > 0, "the host was meant to lengthen some prefix"
