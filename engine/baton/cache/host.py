"""A second tier for KV pages: host memory that takes the pages evicted from the device and finds
them again by their tokens.

Life of a host page:
 1. The radix tree evicts a leaf; `demote` keys each of its pages by the tokens that lead to it (a
    chain of hashes, so a page is worth something even when the pages before it are gone) and asks
    for a copy to a slot of the host pool.
 2. `find` follows the prompt of a request beyond the tree; `copy_in` asks for copies into device
    pages.
 3. The slot keeps the content of a page that went back to the device, but such slots are the first
    to be reused; if the page is evicted again before that, nothing needs to be copied.
 4. Without free or duplicate slots the eviction policy decides between the kept pages and the new
    one. A page that was never reused and continues no reused page is not taken.
 5. `pin` keeps pages of a preempted request until it runs again or ends, up to `PIN_SHARE` of the
    pool.

Copies are only *asked for*: they are taken with `take_copies` and carried out in order before the
rows of the next step, therefore after all rows planned earlier and before any row that reuses the
page. A page or slot may be given a new purpose as soon as the copy that saves its content is in the
list.

 6. `quarantine` forgets every page behind a damaged one; a pinned one keeps its slot until it is
    unpinned.

Where the model has further page groups (group_pages.py), a host page is what one of the groups has
for a page of tokens: a slot for group 0, a slot for each page of a block. A block is found by the
key of group 0's page beside it, and is worth something by itself: the tree may have lost only the
block. What its only prompt has left behind takes free slots alone, and is the first to go: most of
it no prompt asks for again, and it would be most of what moves.

Invariants: free + cached + pinned = slots; a slot belongs to one key; a key's content is the KV of
exactly its tokens, because a page's key is forgotten when the tree releases the page.
Deliberately unknown here: requests, tensors, time.

Sources: hash chains as in vLLM's prefix cache, demotion on eviction as in SGLang's hierarchical
cache; both address device pages by their content, and so does this tier.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from baton.cache.eviction import Key, eviction_policy
from baton.cache.group_pages import NO_PAGE, GroupPages
from baton.cache.int_array import IntArray
from baton.cache.ledger import HostLedger
from baton.cache.pages import PageAllocator
from baton.cache.radix import TOKEN_BYTES, RadixNode

DIGEST_BYTES = 16
"""Two different prefixes with one key would need about 2^64 pages."""
PIN_SHARE = 0.75
"""Share of the pool for pinned pages: the others stay a cache, however many requests are suspended.
"""
DEAD_ENTRIES = 64


@dataclass(frozen=True, slots=True)
class CopyRun:
    """Whole pages between device and host, in order; no target occurs twice."""

    to_host: bool
    pages: IntArray
    """On the device."""
    slots: IntArray
    """Slots of the host pool, one for each page."""


@dataclass(slots=True, eq=False)
class HostPage:
    """What one page group has for a page of tokens of some prefix, on the host. A handle for
    `copy_in` and `pin`; its fields belong to the tier.

    `stamp`, `created`, `reuses` and `priority` are what the tree's node remembered
    (cache.eviction.PageMemory).
    """

    key: bytes
    first_key: bytes
    """Key of the prompt's first page."""
    index: int
    """Place among the pages of tokens."""
    slots: array[int]
    """One for each page of the pool that it takes."""
    stamp: int = 0
    created: int = 0
    reuses: int = 0
    priority: int = 0
    pins: int = 0
    on_device: bool = False
    """The tree got its content back: its slots are the first to be reused."""
    is_passed: bool = False
    """A block that its only prompt had left behind: likewise."""
    queued: Key | None = None


class _DeviceBlock(NamedTuple):
    """What one page group has at a place of a node."""

    group: int
    key: bytes
    offset: int
    """Place among the node's pages of tokens."""
    pages: array[int]
    is_passed: bool = False
    """Its only prompt has left it behind (GroupPages.is_passed)."""


class HostTier:
    """See the module."""

    def __init__(
        self,
        num_slots: int,
        page_size: int,
        eviction: str = "lru",
        groups: Sequence[GroupPages] = (),
    ) -> None:
        """`groups`: the tree's further page groups."""
        self.num_slots = num_slots
        self._groups = groups
        self._page_bytes = page_size * TOKEN_BYTES
        self._slots = PageAllocator(num_slots)
        self._policy = eviction_policy(eviction)
        self._pages: dict[bytes, HostPage] = {}
        self._duplicates: dict[bytes, HostPage] = {}
        """Unpinned, and the device got the content back, or their only prompt had left them behind;
        oldest first.
        """
        self._duplicate_slots = 0
        self._heap: list[tuple[Key, int, int, HostPage]] = []
        self._serial = 0
        self._pinned = 0
        """Slots of pinned pages."""
        self._condemned = 0
        """Slots of pinned pages that were quarantined: no longer in `_pages`, never used again."""
        self._found = 0
        """Slots of all pages in `_pages`."""
        self._keys: dict[int, bytes] = {}
        """Key of a device page that the tree holds, once it was needed."""
        self._runs: list[CopyRun] = []
        self._targets: set[int] = set()
        """Device pages that the last run writes."""

    # ------------------------------------------------------------------ eviction from the device

    def on_remove(self, node: RadixNode, for_good: bool) -> None:
        """The tree is about to free a leaf's pages (RadixCache.on_remove)."""
        if not for_good:
            self.demote(node)
        for page in node.pages:
            self._keys.pop(page, None)

    def on_pop(self, node: RadixNode, offset: int, group: int) -> None:
        """The tree is about to free a block of a further group (RadixCache.on_pop)."""
        page = node.pages[offset]
        if page not in self._keys:
            self._keys_of(node)
        blocks = self._blocks_at(node, offset, self._keys[page])
        self._keep_blocks(node, [block for block in blocks if block.group == group])

    def demote(self, node: RadixNode) -> None:
        """Keep what a leaf holds, as far as there is room; the pages closest to the root first.

        In a full pool only what was reused, or continues what was, takes the place of something:
        most pages are never asked for again, and copying them costs every step that evicts
        (docs/scheduling/preemption.md has figures).
        """
        keys = enumerate(self._keys_of(node))
        blocks = [b for offset, key in keys for b in self._blocks_at(node, offset, key)]
        self._keep_blocks(node, blocks)

    def _keep_blocks(self, node: RadixNode, blocks: Sequence[_DeviceBlock]) -> None:
        path = node.path()
        node_index = sum(len(part.pages) for part in path) - len(node.pages)
        first_key = self._keys[path[0].pages[0]]  # hashed on the way to those of the node
        # In this order, so that none of the room made for the others goes to those left behind.
        self._keep_wanted(node, node_index, first_key, [b for b in blocks if not b.is_passed])
        for block in blocks:
            if block.is_passed:
                self._keep_passed(block, node_index, first_key)

    def _keep_passed(self, block: _DeviceBlock, node_index: int, first_key: bytes) -> None:
        """Keep a block that its only prompt has left behind, if there are free slots."""
        host_page = self._pages.get(block.key)
        if host_page is None:
            slots = self._slots.alloc(len(block.pages))
            # In a full pool it takes the place of nothing.
            if slots is None:
                return
            host_page = self._add_page(block, node_index, first_key, slots)
        host_page.is_passed = True
        host_page.on_device = False
        self._place_page(host_page)

    def _add_page(
        self, block: _DeviceBlock, node_index: int, first_key: bytes, slots: array[int]
    ) -> HostPage:
        """Ask for a block to be copied to free slots."""
        host_page = HostPage(block.key, first_key, node_index + block.offset, slots)
        self._pages[block.key] = host_page
        self._found += len(slots)
        self._request_copies(True, block.pages, slots)
        return host_page

    def _keep_wanted(
        self, node: RadixNode, node_index: int, first_key: bytes, blocks: Sequence[_DeviceBlock]
    ) -> None:
        """Keep blocks as far as there is room, or others are worth less."""
        room = -1
        for place, block in enumerate(blocks):
            index = node_index + block.offset
            host_page = self._pages.get(block.key)
            if host_page is None:
                if room < 0:
                    wanted = sum(len(b.pages) for b in blocks[place:] if b.key not in self._pages)
                    if not _may_come_back(node):
                        wanted = min(wanted, self._slots.free_count + self._duplicate_slots)
                    room = self._make_room(wanted, (self._policy.key(node), -index))
                if room < len(block.pages):
                    continue
                room -= len(block.pages)
                slots = self._slots.alloc(len(block.pages))
                assert slots is not None, "room was made before"
                host_page = self._add_page(block, node_index, first_key, slots)
            host_page.is_passed = False
            host_page.stamp = node.stamp
            host_page.created = node.created
            host_page.reuses = node.reuses
            host_page.priority = node.priority
            host_page.on_device = False
            self._place_page(host_page)

    def _blocks_at(self, node: RadixNode, offset: int, key: bytes) -> Iterator[_DeviceBlock]:
        """What the groups have at a place of a node, group 0's page first."""
        yield _DeviceBlock(0, key, offset, node.pages[offset : offset + 1])
        for number, group in enumerate(self._groups, start=1):
            pages = node.further[number - 1][offset * group.width : (offset + 1) * group.width]
            if pages[0] != NO_PAGE:
                is_passed = group.is_passed(pages[0])
                yield _DeviceBlock(number, _block_key(key, number), offset, pages, is_passed)

    def clear(self) -> int:
        """Forget every page that is not pinned; returns how many."""
        return self._drop_all([page for page in self._pages.values() if not page.pins])

    def quarantine(self, tokens: bytes, namespace: bytes) -> int:
        """Forget every page of the prompts that begin as this one: one of its pages is damaged.
        Returns how many.

        Cost: O(pages of the tier).
        """
        first_key = _next_key(_root_key(namespace), tokens[: self._page_bytes])
        return self._drop_all(
            [page for page in self._pages.values() if page.first_key == first_key]
        )

    # ------------------------------------------------------------------ back to the device

    def find(
        self, node: RadixNode, tokens: bytes, namespace: bytes, first: int, last: int
    ) -> list[HostPage]:
        """Pages [first, …) of these tokens that the host has without a gap, at most up to `last`.

        Args:
            node: where the tree's own match of `first` pages ends.
        Cost: one hash per page found, plus, the first time, one per page of the tree's match.
        """
        if not self._pages or first >= last:
            return []
        key = self._keys_of(node)[-1] if node.parent is not None else _root_key(namespace)
        pages: list[HostPage] = []
        for index in range(first, last):
            key = _next_key(key, tokens[index * self._page_bytes : (index + 1) * self._page_bytes])
            page = self._pages.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    @property
    def is_empty(self) -> bool:
        return not self._pages

    def find_block(self, key: bytes, group: int) -> HostPage | None:
        """The block of a further group beside group 0's page of this key."""
        return self._pages.get(_block_key(key, group))

    def copy_in(self, host_pages: Sequence[HostPage], pages: array[int]) -> None:
        """Ask for these to be copied to device pages of group 0, which the tree then takes."""
        for host_page, page in zip(host_pages, pages, strict=True):
            self._keys[page] = host_page.key
            self.copy_block_in(host_page, array("i", (page,)))

    def copy_block_in(self, host_page: HostPage, pages: array[int]) -> None:
        """Ask for a host page to be copied to as many device pages as it has slots."""
        self._request_copies(False, pages, host_page.slots)
        host_page.on_device = True
        self._place_page(host_page)

    # ------------------------------------------------------------------ pins

    def reserve(self, wanted: int) -> bool:
        """Have so many slots free for pages that will be pinned, whatever they cost.

        False: too many are pinned.
        """
        if self._pinned + wanted > self.num_slots * PIN_SHARE:
            return False
        self._make_room(wanted, None)
        return True

    def pin(self, pages: Iterable[HostPage]) -> None:
        """Keep pages until as many `unpin`s."""
        for page in pages:
            if page.pins == 0:
                self._pinned += len(page.slots)
            page.pins += 1
            self._place_page(page)

    def unpin(self, pages: Iterable[HostPage]) -> None:
        for page in pages:
            page.pins -= 1
            if page.pins == 0:
                self._pinned -= len(page.slots)
            self._place_page(page)

    def path_keys(self, node: RadixNode) -> list[bytes]:
        """Keys of every page from the root to the end of a node."""
        return [key for part in node.path() for key in self._keys_of(part)]

    def branch_keys(self, nodes: Iterable[RadixNode]) -> tuple[list[bytes], int]:
        """Keys of what a sequence that ends with these nodes may need again, and how many slots
        that takes.
        """
        blocks = [
            block
            for node in nodes
            for offset, key in enumerate(self._keys_of(node))
            for block in self._blocks_at(node, offset, key)
            if not block.is_passed
        ]
        return [block.key for block in blocks], sum(len(block.pages) for block in blocks)

    def only_here(self, keys: Iterable[bytes]) -> list[HostPage]:
        """The pages of these keys that the host has and the device has not."""
        pages = (self._pages.get(key) for key in keys)
        return [page for page in pages if page is not None and not page.on_device]

    # ------------------------------------------------------------------ copies and books

    @property
    def has_copies(self) -> bool:
        return bool(self._runs)

    def take_copies(self) -> tuple[CopyRun, ...]:
        """Copies requested since the last call, to be carried out in this order before the next
        step's rows.
        """
        runs = tuple(self._runs)
        self._runs = []
        self._targets = set()
        return runs

    def ledger(self) -> HostLedger:
        """Where every slot is. Raises LedgerError if the books do not balance."""
        cached = self._found - (self._pinned - self._condemned)
        ledger = HostLedger(self._slots.free_count, cached, self._pinned)
        ledger.check(self.num_slots)
        return ledger

    def _request_copies(self, to_host: bool, pages: array[int], slots: array[int]) -> None:
        for page, slot in zip(pages, slots, strict=True):
            self._request_copy(to_host, page, slot)

    def _request_copy(self, to_host: bool, page: int, slot: int) -> None:
        target = slot if to_host else page
        if not self._runs or self._runs[-1].to_host != to_host or target in self._targets:
            self._runs.append(CopyRun(to_host, array("i"), array("i")))
            self._targets = set()
        self._runs[-1].pages.append(page)
        self._runs[-1].slots.append(slot)
        self._targets.add(target)

    # ------------------------------------------------------------------ slots

    def _make_room(self, wanted: int, worth: tuple[Key, int] | None) -> int:
        """Have up to `wanted` slots free, at the cost of duplicates and of what the policy values
        less than `worth`.

        `worth` is a policy's key and, smaller for deeper pages, the index: of equals the one
        closest to the root stays; None is worth everything.
        """
        while self._slots.free_count < wanted:
            if self._duplicates:
                oldest = next(iter(self._duplicates.values()))
                self._drop_page(oldest)
                continue
            victim = self._next_victim()
            if victim is None:
                break
            if worth is not None and (self._policy.key(victim), -victim.index) >= worth:
                break
            self._drop_page(victim)
        return min(wanted, self._slots.free_count)

    def _next_victim(self) -> HostPage | None:
        """The cached page that the policy values least; among equals the deepest."""
        while self._heap:
            key, _, _, page = self._heap[0]
            if page.queued == key:
                return page
            heapq.heappop(self._heap)
        return None

    def _place_page(self, page: HostPage) -> None:
        """Put a page where its state belongs: pinned ones nowhere, duplicates in their line, others
        in the heap.
        """
        if self._pages.get(page.key) is not page:
            if not page.pins:
                self._condemned -= len(page.slots)
                self._slots.free(page.slots)
            return
        self._forget_duplicate(page)
        page.queued = None
        if page.pins:
            return
        if page.on_device or page.is_passed:
            self._duplicates[page.key] = page
            self._duplicate_slots += len(page.slots)
            return
        key = page.queued = self._policy.key(page)
        self._serial += 1
        heapq.heappush(self._heap, (key, -page.index, self._serial, page))
        if len(self._heap) > 2 * len(self._pages) + DEAD_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[3].queued == entry[0]]
            heapq.heapify(self._heap)

    def _drop_page(self, page: HostPage) -> None:
        page.queued = None
        self._forget_duplicate(page)
        del self._pages[page.key]
        self._found -= len(page.slots)
        if page.pins:
            self._condemned += len(page.slots)
        else:
            self._slots.free(page.slots)

    def _forget_duplicate(self, page: HostPage) -> None:
        if self._duplicates.pop(page.key, None) is not None:
            self._duplicate_slots -= len(page.slots)

    def _drop_all(self, pages: Sequence[HostPage]) -> int:
        for page in pages:
            self._drop_page(page)
        return len(pages)

    # ------------------------------------------------------------------ keys

    def _keys_of(self, node: RadixNode) -> list[bytes]:
        """Keys of a node's pages.

        Hashed once while the tree holds them: all pages of a node have one, or none.
        """
        path = []
        ancestor = node
        while ancestor.parent is not None and ancestor.pages[-1] not in self._keys:
            path.append(ancestor)
            ancestor = ancestor.parent
        key = _root_key(ancestor.key) if ancestor.parent is None else self._keys[ancestor.pages[-1]]
        width = self._page_bytes
        for part in reversed(path):
            for i, page in enumerate(part.pages):
                key = self._keys[page] = _next_key(key, part.key[i * width : (i + 1) * width])
        return [self._keys[page] for page in node.pages]


def _may_come_back(node: RadixNode) -> bool:
    """True if a request started with these pages, or with those right before them.

    A conversation's next turn does the latter.
    """
    if node.reuses > 0:
        return True
    return node.parent is not None and node.parent.reuses > 0


def _root_key(namespace: bytes) -> bytes:
    return blake2b(namespace, digest_size=DIGEST_BYTES, person=b"baton kv root").digest()


def _next_key(key: bytes, tokens: bytes) -> bytes:
    """Key of the page that holds `tokens`, behind the prefix that `key` stands for."""
    return blake2b(key + tokens, digest_size=DIGEST_BYTES).digest()


def _block_key(key: bytes, group: int) -> bytes:
    """Key of what further group `group` (1 is the first one) has beside group 0's page of `key`."""
    return key + bytes((group,))
