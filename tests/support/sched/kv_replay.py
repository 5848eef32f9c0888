"""A consumer of KV events as a router would write it: a dictionary of blocks, and nothing that the engine knows."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.cache.kv_events import Cleared, KvEvent, Removed, Stored, chain, first_parent
from baton.cache.radix import RadixCache
from tests.support.probes import RadixCacheProbe

Prefix = tuple[bytes, bytes]
"""(namespace, token bytes from the start)."""


@dataclass
class Consumer:
    page_bytes: int
    blocks: dict[int, Prefix] = field(default_factory=dict)
    """Hash → the prefix that ends with this block."""

    def apply(self, event: KvEvent) -> None:
        if isinstance(event, Cleared):
            self.blocks.clear()
        elif isinstance(event, Removed):
            for block in event.hashes:
                del self.blocks[block]
        else:
            self._store(event)

    def _store(self, event: Stored) -> None:
        namespace, so_far = event.namespace, b""
        at = first_parent(namespace)
        if event.parent is not None:
            at = event.parent
            namespace, so_far = self.blocks[at]
            assert namespace == event.namespace
        assert len(event.tokens) == len(event.hashes) * self.page_bytes
        for i, block in enumerate(event.hashes):
            tokens = event.tokens[i * self.page_bytes : (i + 1) * self.page_bytes]
            at = chain(at, tokens)
            assert block == at, "the hash is not what its tokens say"
            assert block not in self.blocks, "a block was announced twice"
            so_far += tokens
            self.blocks[block] = (namespace, so_far)

    @property
    def prefixes(self) -> set[Prefix]:
        assert len(set(self.blocks.values())) == len(self.blocks), "two names for one block"
        return set(self.blocks.values())


def settled_prefixes(cache: RadixCache) -> set[Prefix]:
    """Every whole-page prefix that the tree holds and that has been computed, read from the tree's nodes."""
    found = set()
    width = cache.page_size * 4
    stack = [(name, b"", node) for name, node in RadixCacheProbe(cache).edges()]
    while stack:
        name, before, node = stack.pop()
        if node.created <= cache.settled:
            found |= {
                (name, before + node.key[: end * width]) for end in range(1, len(node.pages) + 1)
            }
        stack += [(name, before + node.key, child) for child in node.children.values()]
    return found
