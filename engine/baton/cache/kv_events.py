"""Contents of the radix tree as a log: others (routers) keep a copy of it by replaying the events.

Life of a block (one page of tokens, named by a hash of its whole prefix):
 1. A page is published to the tree when its computation is *scheduled*; `on_stored` keeps it
    pending.
 2. When its step has committed, `on_settled` announces it: Stored.
 3. It is evicted: Removed. One that was never announced leaves without a word.
 4. `take_batch` puts the events since the last call into a batch with the next sequence number; the
    last `keep` batches can be replayed. A reader that has missed more asks for a `snapshot` and
    resumes at its number.

The hash of a block is the first 8 bytes, big-endian, of SHA-256(hash of its parent, 8 bytes
big-endian | its tokens, little-endian int32); a first block's parent is 0, or for a namespace the
first 8 bytes of SHA-256(namespace). It can be computed from the tokens alone.

Invariants: replaying all batches gives exactly the settled pages of the tree; a Stored comes after
its parent's; pending + announced pages = pages in the tree; memory is bounded by the pool's pages
and `keep`. Format and meaning of the events follow vLLM's KV events; the server transports them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

DEVICE = "GPU"
"""Medium of pages in the KV pool, in vLLM's words; consumers know the word, whatever the device is.
"""
HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks of one path, first one first."""

    hashes: tuple[int, ...]
    parent: int | None
    tokens: bytes
    """Little-endian int32, page_size per block."""
    namespace: bytes
    medium: str = DEVICE


@dataclass(frozen=True, slots=True)
class Removed:
    hashes: tuple[int, ...]
    medium: str = DEVICE


@dataclass(frozen=True, slots=True)
class Cleared:
    """There are no blocks: the first word of a log."""


KvEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    seq: int
    ts: float
    events: tuple[KvEvent, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """Pages that follow each other in the tree, as `RadixCache.edges` lists them."""

    namespace: bytes
    parent_page: int
    """The page before the first one; -1 at a root."""
    pages: array[int]
    tokens: bytes


@dataclass(slots=True)
class _Pending:
    edge: Edge
    created: int
    kept: int
    """Pages not evicted since: eviction takes the last ones first."""


def first_parent(namespace: bytes) -> int:
    """Stand-in for the parent's hash of a first block."""
    return (
        int.from_bytes(hashlib.sha256(namespace).digest()[:HASH_BYTES], "big") if namespace else 0
    )


def chain(parent: int, tokens: bytes) -> int:
    """Hash of the block with these tokens behind the block `parent`."""
    digest = hashlib.sha256(parent.to_bytes(HASH_BYTES, "big") + tokens).digest()
    return int.from_bytes(digest[:HASH_BYTES], "big")


class KvEventLog:
    """See the module.

    `page_bytes`: token bytes of a page; `keep`: batches kept for replay, at least 1.
    """

    def __init__(self, page_bytes: int, keep: int) -> None:
        self.next_seq = 0
        self._page_bytes = page_bytes
        self._open: list[KvEvent] = [Cleared()]
        self._batches: deque[EventBatch] = deque(maxlen=keep)
        self._hashes: dict[int, int] = {}
        """Announced pages."""
        self._queue: deque[_Pending] = deque()
        self._pending: dict[int, _Pending] = {}
        """Published, but not announced, by page."""

    # ------------------------------------------------------------------ from the tree

    def on_stored(self, edge: Edge, created: int) -> None:
        """The tree took over these pages at this moment of its clock."""
        entry = _Pending(edge, created, len(edge.pages))
        self._queue.append(entry)
        self._pending.update(dict.fromkeys(edge.pages, entry))

    def on_settled(self, clock: int) -> None:
        """Announce what was published up to this moment. O(pages announced)."""
        while self._queue and self._queue[0].created <= clock:
            entry = self._queue.popleft()
            if entry.kept:
                self._announce_blocks(entry.edge, entry.kept)

    def _announce_blocks(self, edge: Edge, count: int) -> None:
        parent = self._hashes[edge.parent_page] if edge.parent_page >= 0 else None
        block_hash = first_parent(edge.namespace) if parent is None else parent
        width = self._page_bytes
        hashes = []
        for i, page in enumerate(edge.pages[:count]):
            block_hash = chain(block_hash, edge.tokens[i * width : (i + 1) * width])
            del self._pending[page]
            self._hashes[page] = block_hash
            hashes.append(block_hash)
        self._open.append(
            Stored(tuple(hashes), parent, edge.tokens[: count * width], edge.namespace)
        )

    def on_removed(self, pages: array[int]) -> None:
        """The tree gave these pages back: the last ones of a leaf, all announced or none."""
        hashes = []
        for page in reversed(pages):
            block_hash = self._hashes.pop(page, None)
            if block_hash is not None:
                hashes.append(block_hash)
            else:
                entry = self._pending.pop(page)
                entry.kept -= 1
                assert entry.edge.pages[entry.kept] == page, "a leaf loses its last pages first"
        if hashes:
            self._open.append(Removed(tuple(hashes)))

    # ------------------------------------------------------------------ to the server

    def take_batch(self, ts: float) -> EventBatch | None:
        """Events since the last call, numbered and kept for replay; None: nothing."""
        if not self._open:
            return None
        batch = EventBatch(self.next_seq, ts, tuple(self._open))
        self.next_seq += 1
        self._open = []
        self._batches.append(batch)
        return batch

    def batches_since(self, seq: int) -> Iterator[EventBatch]:
        """Batches from this number on, as far back as they are kept: the first may have a larger
        number.
        """
        return (batch for batch in self._batches if batch.seq >= seq)

    def snapshot(self, edges: Iterable[Edge]) -> list[Stored]:
        """Every announced block of the tree with these edges, parents first: what replaying the
        whole log gives.

        It stands for the batches before `next_seq`, once `take_batch` has closed what happened.
        """
        blocks = []
        for edge in edges:
            if edge.pages[0] not in self._hashes:
                continue  # an edge is announced as a whole
            parent = self._hashes[edge.parent_page] if edge.parent_page >= 0 else None
            hashes = tuple(self._hashes[page] for page in edge.pages)
            blocks.append(Stored(hashes, parent, edge.tokens, edge.namespace))
        return blocks
