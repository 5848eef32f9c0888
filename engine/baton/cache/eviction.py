"""Eviction order of the unlocked leaves of the radix tree: a policy turns the use counts of a node
into a key, smallest first.

| policy | evicted first | good for | bad for |
|---|---|---|---|
| lru | longest unused | most traffic: used lately, used again soon | a popular prefix in a lull between bursts |
| lfu | fewest reuses, then longest unused | few hot prefixes among many one-off prompts | new ones, until reused |
| fifo | published first | a bound on the age of cached pages | long-lived system prompts |
| mru | used last | cyclic scans over more prompts than fit | conversations: the turn that just ended |
| filo | published last | a fixed set of prompts, warmed up first | everything that comes after the warm-up |
| priority | lowest priority, then longest unused | prefixes of important requests | unimportant ones |

Use counts belong to pages, not to nodes: both halves of a split node inherit them, so that the
choice does not depend on the cuts of the tree. Keys of two leaves never tie: `stamp` differs
between leaves, and nodes with equal `created` lie on one path.

Names and meaning match SGLang 0.5.7, with three differences: a split does not make the upper half
"new" (there it is created at that moment); reuses are counted here (there only the hierarchical
cache counts them, so that lfu is lru); and eviction takes a leaf's last pages only, as many as are
needed, instead of whole leaves.
"""  # noqa: W505 - a table does not wrap

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

LOWEST_PRIORITY = -(2**31)
"""Priority of pages whose requests stated none."""


class PageMemory(Protocol):
    """Memory of a tree node about the use of its pages.

    Counters of the tree's own clock, no times.
    """

    stamp: int
    """Last use."""
    created: int
    """Publication."""
    reuses: int
    """Requests that started with these pages instead of computing them."""
    priority: int
    """Highest priority among the requests that published or reused them; larger is more important.
    """


Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    key: Callable[[PageMemory], Key]
    falls_with_use: bool = False
    """Using a node makes its key smaller.

    All other keys only grow, so that a queued key may be checked lazily.
    """


EVICTION_POLICIES = {
    "lru": EvictionPolicy(lambda node: (node.stamp, 0)),
    "lfu": EvictionPolicy(lambda node: (node.reuses, node.stamp)),
    "fifo": EvictionPolicy(lambda node: (node.created, 0)),
    "mru": EvictionPolicy(lambda node: (-node.stamp, 0), falls_with_use=True),
    "filo": EvictionPolicy(lambda node: (-node.created, 0)),
    "priority": EvictionPolicy(lambda node: (node.priority, node.stamp)),
}


def eviction_policy(name: str) -> EvictionPolicy:
    """Raises ValueError for a name that is none of them."""
    if name not in EVICTION_POLICIES:
        names = ", ".join(EVICTION_POLICIES)
        raise ValueError(f"eviction policy {name!r}: there is none of this name; there are {names}")
    return EVICTION_POLICIES[name]
