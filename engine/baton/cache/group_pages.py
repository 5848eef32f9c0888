"""Pages of the groups whose layers see a part of a sequence only: a sliding window, a chunk, or a
state.

Group 0 has a page for every page of tokens, and the prefix tree is made of those. A further group
has pages for what a later row can still read: the pages behind are left behind while the sequence
goes on. All groups take their pages from one pool of equal pages; one page of tokens takes `width`
of them (a block) in a further group.

Life of a block in the tree:
 1. `take`: a sequence publishes it together with group 0's page of the same tokens.
 2. `lock`: a sequence that may read it keeps it, for itself alone: it leaves the block behind
    (`unlock`) long before it leaves its path in group 0.
 3. A block that was left behind, and that a second prompt has never used, is the first to be
    evicted (`passed`); all others that nothing locks wait until no leaf of the tree is left to
    evict (`kept`). A leaf takes its blocks along.
 4. `pop_block` takes an evicted one (`next_block`) out of the middle of an edge, where it leaves a
    hole.

A prefix is valid up to a length if every block is there that a row beginning there reads
(`longest_valid`).

The blocks of states are snapshots: one has the states of all layers at the end of its page of
tokens, and a row that begins there restores it. They are taken at some pages only, where there is
room (`KvManager`), and never needed: without one a prefix is computed again.

Invariants: a block belongs to one node; a locked block's node is locked in group 0; evictable +
locked pages = pages of the group in the tree.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Literal, Protocol

NO_PAGE = -1
"""Stands in page tables for a page that was left behind, or never held."""


@dataclass(frozen=True, slots=True)
class GroupRule:
    """What a sequence holds of a further group."""

    kind: Literal["window", "chunk", "state"]
    """`window`: a token sees itself and the `size - 1` tokens before it. `chunk`: itself and the
    tokens before it in its chunk; chunks begin at multiples of `size`. `state`: a row restores the
    snapshot in front of it; snapshots are taken at multiples of `size`, and at the end of what is
    known of a sequence.
    """
    size: int
    width: int
    """Pages of the pool that one page of tokens takes."""
    rolling: int = 0
    """`state`: where an answer grows beyond a multiple of so many tokens, its snapshot there
    replaces its one before. 0: it has none.
    """

    def rolling_tokens(self, page_size: int) -> int:
        """Tokens from one rolling snapshot of an answer to the next, whole pages; 0: none."""
        return -(-self.rolling // page_size) * page_size

    def first_visible(self, position: int) -> int:
        """First token that a row beginning at `position` reads."""
        if self.kind == "chunk":
            return position - position % self.size
        if self.kind == "state":
            return max(position - 1, 0)
        return max(position - self.size + 1, 0)

    def most_blocks(self, page_size: int, row_tokens: int) -> int:
        """Most blocks that a sequence needs while it computes rows of up to `row_tokens`."""
        if self.kind == "state":
            return 0
        # One more than what the tokens fill, because they may begin inside a page, and one more
        # because a block is left behind when the sequence next needs a page.
        return -(-(self.size - 1 + row_tokens) // page_size) + 2

    def snapshot_places(self, pages: range, page_size: int, tokens: int) -> list[int]:
        """Pages of tokens at whose end a snapshot is taken of a sequence that has `tokens`."""
        # At least the last token is computed again, so a prefix ends in front of it.
        last = (tokens - 1) // page_size - 1
        return [
            place
            for place in pages
            if place == last or (place + 1) * page_size % self.size < page_size
        ]


@dataclass(slots=True)
class GroupUsage:
    """Pages of the pool that further groups of one kind take."""

    held: int = 0
    """Locked in the tree, or private to a sequence; those on their way to or from a peer too."""
    cached: int = 0
    """In the tree, evictable."""


class TreeEdge(Protocol):
    """A node of the tree (cache.radix), as far as further groups go."""

    further: list[array[int]]


class GroupPages:
    """The blocks of further group number `index` (0 is the first one after group 0) in a tree."""

    def __init__(self, index: int, rule: GroupRule, page_size: int) -> None:
        self.rule = rule
        self.width = rule.width
        self.evictable_pages = 0
        self.locked_pages = 0
        self._index = index
        self.page_size = page_size
        # A block is named by its first page.
        self._node_of: dict[int, TreeEdge] = {}
        self._locks: dict[int, int] = {}
        """Of locked blocks."""
        self._passed: dict[int, None] = {}
        self._kept: dict[int, None] = {}
        self._left_behind: set[int] = set()
        self._reused: set[int] = set()
        """Blocks that a prompt has used which did not compute them."""

    def first_block(self, tokens: int) -> int:
        """First block that a row beginning behind `tokens` tokens reads."""
        return self.rule.first_visible(tokens) // self.page_size

    def longest_valid(self, blocks: array[int], length: int) -> int:
        """Longest prefix of at most `length` pages of tokens that a row may begin behind.

        Args:
            blocks: first pages of the blocks along a path, NO_PAGE for holes.
        Cost: O(blocks between the answer and `length`, and those that it needs).
        """
        while length:
            first = self.first_block(length * self.page_size)
            last = length - 1
            while last >= first and blocks[last] != NO_PAGE:
                last -= 1
            if last < first:
                break
            # Every longer prefix down from here would read the hole at `last`.
            length = last
        return length

    # ------------------------------------------------------------------ blocks of nodes

    def blocks_of(self, node: TreeEdge) -> array[int]:
        """First pages of a node's blocks; NO_PAGE for holes."""
        return node.further[self._index][:: self.width]

    def take(self, node: TreeEdge, block: int) -> None:
        """The tree owns a block from now on, at a place of this node."""
        self._node_of[block] = node
        self._kept[block] = None
        self.evictable_pages += self.width

    def owns(self, block: int) -> bool:
        return block in self._node_of

    def move_blocks(self, node: TreeEdge) -> None:
        """A node was cut: what lies on it belongs to it now."""
        for block in self.blocks_of(node):
            if block != NO_PAGE:
                self._node_of[block] = node

    def drop_node(self, node: TreeEdge) -> array[int]:
        """Forget an unlocked node's blocks. Returns their pages."""
        pages = array("i")
        for place, block in enumerate(self.blocks_of(node)):
            if block != NO_PAGE:
                first = place * self.width
                pages.extend(node.further[self._index][first : first + self.width])
                self._forget(block)
        return pages

    def next_block(self, *, passed: bool) -> tuple[TreeEdge, int] | None:
        """The node of the block that is to be evicted next, and its place among the node's pages of
        tokens; None: there is no such block.

        Args:
            passed: one that was left behind and used by one prompt only, or any other.
        """
        queue = self._passed if passed else self._kept
        block = next(iter(queue), None)
        # The caller evicts elsewhere, or has freed all that there is.
        if block is None:
            return None
        node = self._node_of[block]
        return node, node.further[self._index].index(block) // self.width

    def pop_block(self, node: TreeEdge, offset: int) -> array[int]:
        """Take an unlocked block out of its node. Returns its pages."""
        pages = node.further[self._index]
        first = offset * self.width
        popped = pages[first : first + self.width]
        pages[first : first + self.width] = array("i", (NO_PAGE,)) * self.width
        self._forget(popped[0])
        return popped

    def is_passed(self, block: int) -> bool:
        """True if nothing locks the block, and the one prompt that used it has left it behind."""
        return block in self._passed

    def _forget(self, block: int) -> None:
        assert block not in self._locks, "a locked block was taken away"
        self.evictable_pages -= self.width
        del self._node_of[block]
        self._passed.pop(block, None)
        self._kept.pop(block, None)
        self._reused.discard(block)
        self._left_behind.discard(block)

    # ------------------------------------------------------------------ locks

    def lock(self, block: int) -> None:
        """Keep a block until as many `unlock`s."""
        if block not in self._locks:
            self._passed.pop(block, None)
            self._kept.pop(block, None)
            self.evictable_pages -= self.width
            self.locked_pages += self.width
        self._locks[block] = self._locks.get(block, 0) + 1

    def reuse(self, block: int) -> None:
        """A prompt uses a locked block that it has not computed."""
        self._reused.add(block)

    def unlock(self, block: int, *, left_behind: bool) -> None:
        """Undo one `lock`.

        Args:
            left_behind: the sequence goes on without it. Else it has ended, and another may
                continue where it did.
        """
        if left_behind:
            self._left_behind.add(block)
        self._locks[block] -= 1
        # Another sequence may still read it.
        if self._locks[block]:
            return
        del self._locks[block]
        self.locked_pages -= self.width
        self.evictable_pages += self.width
        was_passed = block in self._left_behind and block not in self._reused
        queue = self._passed if was_passed else self._kept
        queue[block] = None

    def is_locked(self, block: int) -> bool:
        return block in self._locks

    def is_locked_once(self, block: int) -> bool:
        return self._locks.get(block) == 1
