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

Invariants: free + cached + pinned = slots; a slot belongs to one key; a key's content is the KV of
exactly its tokens, because a page's key is forgotten when the tree releases the page.
Deliberately unknown here: requests, tensors, time.

Sources: hash chains as in vLLM's prefix cache, demotion on eviction as in SGLang's hierarchical
cache; both address device pages by their content, and so does this tier.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from baton.cache.eviction import Key, eviction_policy
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
    """Page of some prefix on the host. A handle for `copy_in` and `pin`; its fields belong to the
    tier.

    `stamp`, `created`, `reuses` and `priority` are what the tree's node remembered
    (cache.eviction.PageMemory).
    """

    key: bytes
    first_key: bytes
    """Key of the prompt's first page."""
    index: int
    slot: int
    stamp: int = 0
    created: int = 0
    reuses: int = 0
    priority: int = 0
    pins: int = 0
    on_device: bool = False
    """The tree got its content back: reused first."""
    queued: Key | None = None


class HostTier:
    """See the module."""

    def __init__(self, num_slots: int, page_size: int, eviction: str = "lru") -> None:
        self.num_slots = num_slots
        self._page_bytes = page_size * TOKEN_BYTES
        self._slots = PageAllocator(num_slots)
        self._policy = eviction_policy(eviction)
        self._pages: dict[bytes, HostPage] = {}
        self._duplicates: dict[bytes, HostPage] = {}
        """Unpinned, content also on the device; oldest first."""
        self._heap: list[tuple[Key, int, int, HostPage]] = []
        self._serial = 0
        self._pinned = 0
        self._condemned = 0
        """Pinned pages that were quarantined: no longer in `_pages`, never used again."""
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

    def demote(self, node: RadixNode) -> None:
        """Keep what a leaf holds, as far as there is room; the pages closest to the root first.

        In a full pool only what was reused, or continues what was, takes the place of something:
        most pages are never asked for again, and copying them costs every step that evicts
        (docs/scheduling/preemption.md has figures).
        """
        keys = self._keys_of(node)
        path = node.path()
        index = sum(len(part.pages) for part in path) - len(keys)
        first_key = self._keys[path[0].pages[0]]  # hashed on the way to those of the leaf
        room = -1
        for offset, (key, page) in enumerate(zip(keys, node.pages, strict=True)):
            host_page = self._pages.get(key)
            if host_page is None:
                if room < 0:
                    wanted = sum(k not in self._pages for k in keys[offset:])
                    if not _may_come_back(node):
                        wanted = min(wanted, self._slots.free_count + len(self._duplicates))
                    room = self._make_room(wanted, (self._policy.key(node), -index - offset))
                if room == 0:
                    continue
                room -= 1
                slots = self._slots.alloc(1)
                assert slots is not None, "room was made before"
                host_page = self._pages[key] = HostPage(key, first_key, index + offset, slots[0])
                self._request_copy(True, page, slots[0])
            host_page.stamp = node.stamp
            host_page.created = node.created
            host_page.reuses = node.reuses
            host_page.priority = node.priority
            host_page.on_device = False
            self._place_page(host_page)

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

    def copy_in(self, host_pages: Sequence[HostPage], pages: array[int]) -> None:
        """Ask for these to be copied to device pages, which the tree then takes."""
        for host_page, page in zip(host_pages, pages, strict=True):
            self._request_copy(False, page, host_page.slot)
            self._keys[page] = host_page.key
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
            self._pinned += page.pins == 0
            page.pins += 1
            self._place_page(page)

    def unpin(self, pages: Iterable[HostPage]) -> None:
        for page in pages:
            page.pins -= 1
            self._pinned -= page.pins == 0
            self._place_page(page)

    def path_keys(self, node: RadixNode) -> list[bytes]:
        """Keys of every page from the root to the end of a node."""
        return [key for part in node.path() for key in self._keys_of(part)]

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
        cached = len(self._pages) - (self._pinned - self._condemned)
        ledger = HostLedger(self._slots.free_count, cached, self._pinned)
        ledger.check(self.num_slots)
        return ledger

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
                self._condemned -= 1
                self._slots.free((page.slot,))
            return
        self._duplicates.pop(page.key, None)
        page.queued = None
        if page.pins:
            return
        if page.on_device:
            self._duplicates[page.key] = page
            return
        key = page.queued = self._policy.key(page)
        self._serial += 1
        heapq.heappush(self._heap, (key, -page.index, self._serial, page))
        if len(self._heap) > 2 * len(self._pages) + DEAD_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[3].queued == entry[0]]
            heapq.heapify(self._heap)

    def _drop_page(self, page: HostPage) -> None:
        page.queued = None
        self._duplicates.pop(page.key, None)
        del self._pages[page.key]
        if page.pins:
            self._condemned += 1
        else:
            self._slots.free((page.slot,))

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
