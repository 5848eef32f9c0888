"""Prefix tree from token ids to the KV pages that hold them, so that equal prompt prefixes are
computed once.

Life of a cached page:
 1. A request computes (or receives) pages and `insert`s them: the tree owns them from then on.
    Publishing a page while the step that fills it is computed is fine: in every layer KV is written
    before this or a later step reads it.
 2. `match` finds the longest cached prefix of another request; `lock` keeps its path from eviction
    while it is used.
 3. `reuse` remembers, for the eviction policy, that a request did start with them. `settle` tells
    which pages have been computed since: the others are only scheduled.
 4. `unlock` makes the path evictable again; `evict` frees tails of leaves through the allocator, in
    the order of the eviction policy (eviction.py; least recently used first by default).

Keys are page-aligned `bytes` of little-endian int32 token ids: edges compare as bytes (memcmp), a
mismatch is found by bisection. 4096 tokens match in under 10 us where a loop over Python ints takes
140 us.

    root ──[p0 p1 p2]──▶ node ──[p3]──▶ leaf      an edge holds one or more pages;
                          └────[p7 p8]──▶ leaf    children differ in their first page

All this is about the pages of group 0, which hold every token. Where a model has further page
groups, whose pages a sequence leaves behind as it goes on, an edge holds what it has of those
beside its own pages (group_pages.py): `match` finds the longest prefix that is valid in every
group, and eviction may take a further group's pages out of the middle of an edge.

Invariants: sibling edges differ in their first page; a locked node's ancestors are locked;
evictable_pages + locked_pages = pages in the tree, of all groups; every evictable leaf has exactly
one live heap entry (`queued`) with a key of at most its own (so the smallest up-to-date entry is
the next victim), and dead entries are never more than live ones + a few. `quarantine` moves a
branch with a damaged page, or one that holds NaN, under a root that no prompt matches; its users
keep it until they end.

Deliberately unknown here: requests, tensors, time (stamps are counts of a clock that ticks with
each use).
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.cache.eviction import LOWEST_PRIORITY, Key, PageMemory, eviction_policy
from baton.cache.group_pages import NO_PAGE, GroupPages, GroupRule
from baton.cache.kv_events import Edge, KvEventLog
from baton.cache.pages import PageAllocator

TOKEN_BYTES = 4
DEAD_ENTRIES = 64
"""Superseded heap entries that are tolerated beside one per live entry."""


@dataclass(slots=True, eq=False, repr=False)
class RadixNode:
    """Edge and its subtree; a root (parent None) has its namespace as key and no pages.

    A handle for lock/unlock; its fields belong to the tree.
    """

    parent: RadixNode | None
    key: bytes
    pages: array[int]
    serial: int
    stamp: int = 0
    created: int = 0
    reuses: int = 0
    priority: int = LOWEST_PRIORITY
    locks: int = 0
    children: dict[bytes, RadixNode] = field(default_factory=dict)
    queued: Key | None = None
    is_evicted: bool = False
    further: list[array[int]] = field(default_factory=list)
    """Pages of the further groups, by group: `width` per page of tokens, NO_PAGE where there are
    none.
    """

    def path(self) -> list[RadixNode]:
        """Nodes from the root's child on down to this one."""
        node = self
        nodes = []
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix. Valid until the next `evict`, unless `node` is locked before."""

    node: RadixNode
    pages: array[int]
    num_tokens: int
    further: tuple[array[int], ...] = ()
    """Pages of the further groups, by group: as many places as `pages` has, times the group's
    width; NO_PAGE in front of what a row behind the prefix reads.
    """


class PrefixProbe(NamedTuple):
    """Where a prefix ended in the tree, so that asking again costs a look-up instead of comparing
    the prompt.
    """

    node: RadixNode
    node_bytes: int
    """Length of the node's key then: a split shortens it."""
    num_tokens: int
    limit: int
    """Pages that it could have had."""
    beyond: bytes
    """The prompt's next page: as a child of the node it would lengthen the prefix; b"": nothing
    below would.
    """


class ProbeWatch:
    """Which of many probes the tree's changes have made out of date, at the cost of a look-up per
    change.

    Probes are filed by where they ended: by node, or by namespace where nothing matched (roots come
    and go), and there by the page that would lengthen them.
    """

    def __init__(self) -> None:
        self.stale: dict[int, None] = {}
        """Owners whose probes may give another answer now, in order of the changes."""
        self._owners: dict[RadixNode | bytes, dict[bytes, dict[int, None]]] = {}
        self._filed: dict[int, tuple[RadixNode | bytes, bytes, PrefixProbe]] = {}

    def watch(self, owner: int, probe: PrefixProbe, namespace: bytes) -> None:
        """From now on this is the owner's probe."""
        filed = self._filed.get(owner)
        if filed is None or filed[2] is not probe:
            if filed is not None:
                self.forget(owner)
            node = probe.node
            beyond = probe.beyond
            place = node if node.parent is not None else namespace
            self._owners.setdefault(place, {}).setdefault(beyond, {})[owner] = None
            self._filed[owner] = place, beyond, probe
        if self.stale:
            self.stale.pop(owner, None)

    def forget(self, owner: int) -> None:
        self.stale.pop(owner, None)
        filed = self._filed.pop(owner, None)
        if filed is None:
            return
        place, beyond, _ = filed
        by_page = self._owners[place]
        del by_page[beyond][owner]
        if not by_page[beyond]:
            del by_page[beyond]
            if not by_page:
                del self._owners[place]

    def on_child(self, parent: RadixNode, page: bytes) -> None:
        """A child that begins with `page` was attached."""
        place = parent if parent.parent is not None else parent.key
        self.stale.update(self._owners.get(place, {}).get(page, {}))

    def on_changed(self, node: RadixNode) -> None:
        """The node was cut, or left the tree."""
        for owners in self._owners.get(node, {}).values():
            self.stale.update(owners)


@dataclass(frozen=True, slots=True)
class InsertResult:
    """Outcome of `insert` for the caller's pages [from_page, …)."""

    node: RadixNode
    """The end of the inserted path: lock it to keep the pages."""
    existing_pages: array[int]
    """The tree's own pages for the first part of the range: use these instead of the caller's.

    Of the caller's the tree took none for this part: what are not its own anyway, the caller still
    owns and frees.
    """


class RadixCache:
    """See the module. `page_size` in tokens.

    Raises:
        ValueError: page_size < 1, or no eviction policy of this name.
    """

    def __init__(
        self,
        page_size: int,
        allocator: PageAllocator,
        eviction: str = "lru",
        log: KvEventLog | None = None,
        groups: Sequence[GroupRule] = (),
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page size {page_size}: a page holds at least one token")
        self.page_size = page_size
        self.groups = tuple(GroupPages(i, rule, page_size) for i, rule in enumerate(groups))
        """The further page groups."""
        self._evictable_pages = 0
        self._locked_pages = 0
        self.version = 0
        """Grows whenever nodes come, go or are cut: while it is equal, `probe` and `path_of` answer
        the same.
        """
        self.on_remove: Callable[[RadixNode, bool], None] | None = None
        """Called with a leaf whose pages are about to be freed, still in its place in the tree;
        True: by `flush`, for good. The pages' content is intact until another owner has written to
        them.
        """
        self.on_pop: Callable[[RadixNode, int, int], None] | None = None
        """Called before a block is evicted out of the middle of an edge: node, place among its
        pages of tokens, number of the further group (1 is the first one).
        """
        self._watches: list[ProbeWatch] = []
        self._page_bytes = page_size * TOKEN_BYTES
        self._allocator = allocator
        self._log = log
        self._roots: dict[bytes, RadixNode] = {}
        self._nowhere = RadixNode(None, b"", array("i"), 0)
        """Stands for "nothing matched": a root of no namespace, so that misses create no state."""
        self.clock = 0
        """Ticks with every use; what was published later has a larger `created`."""
        self.settled = 0
        """Pages created up to this moment have been computed."""
        self._serial = 0
        self._policy = eviction_policy(eviction)
        self._heap: list[tuple[Key, int, RadixNode]] = []
        self._queued = 0
        """Live heap entries."""
        self._quarantine: set[RadixNode] = set()
        """Roots of branches that no prompt may match any more."""

    @property
    def evictable_pages(self) -> int:
        """Pages of the pool that `evict` can free, of all groups."""
        pages = self._evictable_pages
        for group in self.groups:
            pages += group.evictable_pages
        return pages

    @property
    def locked_pages(self) -> int:
        """Pages of the pool in the tree that are not evictable, of all groups."""
        return self._locked_pages + sum(group.locked_pages for group in self.groups)

    def match(
        self, tokens: bytes, namespace: bytes, max_tokens: int, num_further: int | None = None
    ) -> PrefixMatch:
        """Find the longest cached prefix of at most `max_tokens`, in whole pages, that is valid in
        every group, and mark it recently used.

        Args:
            tokens: little-endian int32 ids; a last partial page is ignored.
            num_further: how many of the further groups count, the first ones; the match has pages
                of these. None: all of them.
        Cost: O(bytes compared + nodes on the path); splits at most one edge.
        """
        limit = min(len(tokens), max_tokens * TOKEN_BYTES) // self._page_bytes
        node, matched, inside = self._walk_edges(tokens, namespace, limit)
        groups = self.groups[:num_further]
        if groups:
            valid = self._valid_pages(node, matched, groups)
            if valid < matched:
                node, matched, inside = self._walk_edges(tokens, namespace, valid)
        if inside:
            node = self._split_edge(node, inside)
        self._touch_path(node)
        return PrefixMatch(
            node,
            self._path_pages(node),
            matched * self.page_size,
            self._visible_pages(node, groups),
        )

    def match_full_group(self, tokens: bytes, namespace: bytes, max_tokens: int) -> PrefixMatch:
        """Find the longest prefix of group 0, whatever the further groups have of it: `further` is
        all that they have along its path.

        Cost: as of `match`. Does not count as a use.
        """
        limit = min(len(tokens), max_tokens * TOKEN_BYTES) // self._page_bytes
        node, matched, inside = self._walk_edges(tokens, namespace, limit)
        if inside:
            node = self._split_edge(node, inside)
        further = tuple(self._pages_along(node, index) for index in range(len(self.groups)))
        return PrefixMatch(node, self._path_pages(node), matched * self.page_size, further)

    def probe(
        self, tokens: bytes, namespace: bytes, max_tokens: int, last: PrefixProbe | None = None
    ) -> PrefixProbe:
        """Find the prefix that `match` would find; changes neither tree nor LRU order (for sorting
        queues).

        Args:
            last: the answer of an earlier call for these tokens or a part of them, None the first
                time.
        Cost: a dictionary look-up if the tree has not changed around the place where `last` ended.
        """
        width = self._page_bytes
        limit = min(len(tokens), max_tokens * TOKEN_BYTES) // width
        if last is not None and last.limit == limit and not self.find_outdated((last,)):
            return last
        node, matched, inside = self._walk_edges(tokens, namespace, limit)
        beyond = b""
        if not inside and matched < limit:
            beyond = tokens[matched * width : (matched + 1) * width]
        return PrefixProbe(node, len(node.key), matched * self.page_size, limit, beyond)

    def valid_tokens(self, probe: PrefixProbe) -> int:
        """Tokens of an up-to-date probe's prefix that `match` would give: with further groups, a
        shorter prefix may be the longest valid one.
        """
        if not self.groups:
            return probe.num_tokens
        matched = probe.num_tokens // self.page_size
        return self._valid_pages(probe.node, matched, self.groups) * self.page_size

    @staticmethod
    def _valid_pages(node: RadixNode, matched: int, groups: Sequence[GroupPages]) -> int:
        """The longest of the first `matched` pages on the path to `node` that is valid in every one
        of these further groups.
        """
        path = node.path()
        length = matched
        before = -1
        # A shorter prefix for one group may end where another group has a hole.
        while length != before:
            before = length
            for group in groups:
                blocks = array("i")
                for part in path:
                    blocks.extend(group.blocks_of(part))
                length = group.longest_valid(blocks, length)
        return length

    def _visible_pages(
        self, node: RadixNode, groups: Sequence[GroupPages]
    ) -> tuple[array[int], ...]:
        """PrefixMatch.further of the path to `node`."""
        found = []
        for index, group in enumerate(groups):
            pages = self._pages_along(node, index)
            length = len(pages) // group.width
            hidden = group.first_block(length * self.page_size) * group.width
            pages[:hidden] = array("i", (NO_PAGE,)) * hidden
            found.append(pages)
        return tuple(found)

    @staticmethod
    def _pages_along(node: RadixNode, index: int) -> array[int]:
        """Pages of a further group from the root to the end of a node."""
        pages = array("i")
        for part in node.path():
            pages.extend(part.further[index])
        return pages

    def find_outdated(self, probes: Iterable[PrefixProbe | None]) -> list[int]:
        """Places of the probes (of unchanged tokens) that would give another answer now, and of
        those not made yet.

        One loop without calls: a queue asks for all its requests whenever the tree has changed.
        """
        roots = self._roots
        return [
            i
            for i, probe in enumerate(probes)
            if probe is None
            or probe.beyond in (node := probe.node).children
            or len(node.key)
            != probe.node_bytes  # a cut moves the prefix's end, or gives its edge to another node
            or node.is_evicted
            or (node.parent is None and roots.get(node.key) is not node)
        ]

    def watch(self) -> ProbeWatch:
        """A new watch of every change from now on, for as long as the tree lives."""
        self._watches.append(ProbeWatch())
        return self._watches[-1]

    def path_of(self, probe: PrefixProbe) -> list[int]:
        """Serial numbers of the nodes along a probe of the present version, from the root's child
        on.

        The last node may be matched in part only (`match` would split it).
        """
        return [node.serial for node in probe.node.path()]

    def insert(
        self,
        tokens: bytes,
        pages: array[int],
        namespace: bytes,
        from_page: int = 0,
        priority: int = LOWEST_PRIORITY,
        like: PageMemory | None = None,
        further: Sequence[array[int]] = (),
    ) -> InsertResult:
        """Publish `pages` as the KV of `tokens` from page index `from_page` on; the tree takes
        those it lacks.

        Args:
            tokens: ids from the start of the sequence, enough to fill all these pages; more is
                ignored.
            priority: of the request that computed them, larger is more important; the whole path
                gets at least it.
            like: what pages that had left the tree and come back now are remembered by; only its
                age and reuses count.
            further: the caller's pages of the further groups for the same range, by group, NO_PAGE
                where it has none. The tree takes those it lacks (`GroupPages.owns` tells), also
                beside pages that it had already.
        Raises:
            ValueError: tokens are too few, or the tree no longer holds the pages before `from_page`
            (the caller must
                have that prefix locked). Nothing has changed then.
        """
        total = from_page + len(pages)
        if len(tokens) // self._page_bytes < total:
            raise ValueError(
                f"{len(tokens) // TOKEN_BYTES} tokens do not fill {total} pages of {self.page_size}"
            )
        node, matched, inside = self._walk_edges(tokens, namespace, total)
        if matched < from_page:
            raise ValueError(
                f"insert from page {from_page}, but only {matched} are cached: "
                "lock the prefix first"
            )
        if inside:
            node = self._split_edge(node, inside)
        existing = self._path_pages(node)[from_page:] if matched > from_page else array("i")
        if existing and self.groups:
            self._fill_holes(node, matched, from_page, further)
        if matched < total:
            if node is self._nowhere:
                node = self._roots[namespace] = RadixNode(None, namespace, array("i"), 0)
            key = tokens[matched * self._page_bytes : total * self._page_bytes]
            parent_page = node.pages[-1] if node.pages else -1
            node = self._attach_leaf(node, key, pages[matched - from_page :], like)
            for group, given in zip(self.groups, further, strict=True):
                node.further.append(given[(matched - from_page) * group.width :])
                for block in group.blocks_of(node):
                    if block != NO_PAGE:
                        group.take(node, block)
            if self._log is not None:
                self._log.on_stored(Edge(namespace, parent_page, node.pages, key), self.clock + 1)
        self._touch_path(node)
        self._raise_priority(node, priority)
        return InsertResult(node, existing)

    def _fill_holes(
        self, node: RadixNode, matched: int, from_page: int, further: Sequence[array[int]]
    ) -> None:
        """Take blocks for places of the first `matched` pages, which end at `node`.

        `further` begins at page `from_page`.
        """
        end = matched
        part = node
        while part.parent is not None and end > from_page:
            first = end - len(part.pages)
            for index, group in enumerate(self.groups):
                width = group.width
                held = part.further[index]
                for page in range(max(first, from_page), end):
                    given = (page - from_page) * width
                    place = (page - first) * width
                    block = further[index][given]
                    if block != NO_PAGE and held[place] == NO_PAGE:
                        held[place : place + width] = further[index][given : given + width]
                        group.take(part, block)
            end = first
            part = part.parent

    def reuse(
        self, node: RadixNode, priority: int = LOWEST_PRIORITY, beyond: RadixNode | None = None
    ) -> int:
        """A request of this priority starts with the pages up to `node` (of a match), those up to
        `beyond` excepted.

        Matching alone does not count: the planner may look many times before it admits. O(depth).

        Returns:
            How many of these pages are not settled: scheduled by a step that has not committed.
        """
        self._raise_priority(node, priority)
        fresh = 0
        ancestor = node
        while ancestor.parent is not None and ancestor is not beyond:
            ancestor.reuses += 1
            if ancestor.created > self.settled:
                fresh += len(ancestor.pages)
            ancestor = ancestor.parent
        return fresh

    def settle(self, clock: int) -> None:
        """Mark what was published up to this moment of `clock` as computed."""
        self.settled = max(self.settled, clock)
        if self._log is not None:
            self._log.on_settled(self.settled)

    def edges(self) -> Iterator[Edge]:
        """Every edge of the tree, parents before their children.

        O(pages); the tree must not change meanwhile.
        """
        for namespace, root in self._roots.items():
            stack = list(root.children.values())
            while stack:
                node = stack.pop()
                assert node.parent is not None, "roots are not pushed"
                parent_page = node.parent.pages[-1] if node.parent.pages else -1
                yield Edge(namespace, parent_page, node.pages, node.key)
                stack.extend(node.children.values())

    def lock(self, node: RadixNode) -> None:
        """Keep `node` and its ancestors from eviction until as many `unlock`s. O(depth)."""
        if node.is_evicted and not self.is_quarantined(node):
            raise ValueError("cannot lock an evicted node: lock a match before evicting")
        ancestor = node
        while ancestor.parent is not None:
            if ancestor.locks == 0:
                self._evictable_pages -= len(ancestor.pages)
                self._locked_pages += len(ancestor.pages)
            ancestor.locks += 1
            ancestor = ancestor.parent

    def unlock(self, node: RadixNode) -> None:
        """Undo one `lock`. O(depth)."""
        if node.parent is not None and node.locks == 0:
            raise ValueError("cannot unlock a node that is not locked")
        ancestor = node
        while ancestor.parent is not None:
            ancestor.locks -= 1
            if ancestor.locks == 0:
                self._evictable_pages += len(ancestor.pages)
                self._locked_pages -= len(ancestor.pages)
                self._push_candidate(ancestor)
            ancestor = ancestor.parent

    def pages_locked_once(self, node: RadixNode) -> int:
        """Pages on the path to a locked `node` without other locks: what its `unlock` makes
        evictable.
        """
        count = 0
        while node.parent is not None and node.locks == 1:
            count += len(node.pages)
            node = node.parent
        return count

    def unlocked_pages(self, probe: PrefixProbe) -> int:
        """Pages of a probe's prefix that nothing locks: locking it would leave so many fewer
        evictable. O(depth), and with further groups O(pages of the prefix).
        """
        if self.groups:
            return self._unlocked_pages_of_all(probe)
        node = probe.node
        while node.parent is not None and not node.locks:
            node = node.parent
        locked_pages = sum(len(ancestor.pages) for ancestor in node.path())
        return max(probe.num_tokens // self.page_size - locked_pages, 0)

    def _unlocked_pages_of_all(self, probe: PrefixProbe) -> int:
        """`unlocked_pages` in all groups: of further ones, what a row behind the prefix reads."""
        length = self.valid_tokens(probe) // self.page_size
        count = 0
        first = 0
        for node in probe.node.path():
            end = min(first + len(node.pages), length)
            if not node.locks:
                count += max(end - first, 0)
            for index, group in enumerate(self.groups):
                visible = max(group.first_block(length * self.page_size), first)
                for place in range(visible, end):
                    block = node.further[index][(place - first) * group.width]
                    if not group.is_locked(block):
                        count += group.width
            first += len(node.pages)
        return count

    def branch_nodes(self, node: RadixNode) -> list[RadixNode]:
        """Nodes whose pages `evict_branch` would free, from `node` on upwards."""
        nodes: list[RadixNode] = []
        while node.parent is not None and not node.locks and len(node.children) == bool(nodes):
            nodes.append(node)
            node = node.parent
        return nodes

    def evict_branch(self, node: RadixNode) -> int:
        """Free `node` and what of its ancestors it alone needed: unlocked and without other
        children. Returns pages.
        """
        freed = 0
        while node.parent is not None and not (node.locks or node.children):
            parent = node.parent
            if node.queued is not None:
                node.queued = None
                self._queued -= 1
            freed += self._remove_leaf(node)
            node = parent
        return freed

    def evict(self, n_pages: int, for_good: bool = False) -> int:
        """Free `n_pages` unlocked pages: those that sequences of further groups left behind, then
        tails of leaves, in the policy's order, then what is left of further groups. O(log nodes)
        per leaf.

        Returns:
            How many pages went back to the allocator: at least n_pages, or all that were evictable.
            It is more than n_pages where a page of tokens takes several.
        """
        freed = self._evict_blocks(n_pages, passed=True, for_good=for_good) if self.groups else 0
        while freed < n_pages and self._heap:
            key, _, node = heapq.heappop(self._heap)
            if node.queued != key:
                continue  # superseded
            node.queued = None
            self._queued -= 1
            if node.locks or node.children:
                continue  # offered again when it becomes an evictable leaf
            if self._policy.key(node) != key:
                self._push_candidate(node)  # used since it was queued
                continue
            kept = self._pages_kept(node, n_pages - freed)
            if kept:
                self._split_edge(node, kept)
            freed += self._remove_leaf(node, for_good)
        # No unlocked page of group 0 is left: the blocks are those of locked paths.
        if self.groups and freed < n_pages:
            freed += self._evict_blocks(n_pages - freed, passed=False, for_good=for_good)
        return freed

    def _pages_kept(self, node: RadixNode, wanted: int) -> int:
        """Pages of a leaf that stay when its last ones go to free `wanted` pages in all groups."""
        if not self.groups:
            return max(len(node.pages) - wanted, 0)
        kept = len(node.pages)
        while kept and wanted > 0:
            kept -= 1
            wanted -= 1
            for index, group in enumerate(self.groups):
                if node.further[index][kept * group.width] != NO_PAGE:
                    wanted -= group.width
        return kept

    def _evict_blocks(self, n_pages: int, *, passed: bool, for_good: bool) -> int:
        freed = 0
        for number, group in enumerate(self.groups, start=1):
            while freed < n_pages and (found := group.next_block(passed=passed)):
                node, offset = found
                assert isinstance(node, RadixNode), "the tree's blocks belong to its nodes"
                # Of a damaged branch nothing may come back.
                is_kept = not (for_good or self.is_quarantined(node))
                if is_kept and self.on_pop is not None:
                    self.on_pop(node, offset, number)
                pages = group.pop_block(node, offset)
                self._allocator.free(pages)
                freed += len(pages)
        return freed

    def flush(self) -> int:
        """Free every unlocked page; locked paths stay. Returns how many were freed."""
        freed = self.evict(self.evictable_pages, for_good=True)
        self._drop_dead_entries()
        return freed

    def quarantine(self, tokens: bytes, namespace: bytes) -> int:
        """Keep every later match from the branch whose pages begin these tokens: one of them is
        damaged or holds NaN.

        Unlocked pages are freed now, locked ones as any others once they are unlocked. Returns how
        many pages it was.
        """
        root = self._roots.get(namespace)
        first_page = tokens[: self._page_bytes]
        if root is None:
            return 0
        branch_top = root.children.pop(first_page, None)
        if branch_top is None:
            return 0
        if not root.children:
            del self._roots[namespace]
        self._serial += 1
        self.version += 1
        hidden_root = branch_top.parent = RadixNode(None, namespace, array("i"), self._serial)
        hidden_root.children[first_page] = branch_top
        self._quarantine.add(hidden_root)
        branch = [branch_top]
        for node in branch:
            branch.extend(node.children.values())
        pages = sum(len(node.pages) for node in branch)
        for node in branch:
            if not node.is_evicted:  # with the last of its children
                self.evict_branch(node)
        for node in branch:
            node.is_evicted = True  # for probes; its users keep it
            self._note_changed(node)
        return pages

    def is_quarantined(self, node: RadixNode) -> bool:
        """O(depth), and O(1) while nothing is."""
        if not self._quarantine:
            return False
        while node.parent is not None:
            node = node.parent
        return node in self._quarantine

    def _walk_edges(
        self, tokens: bytes, namespace: bytes, limit: int
    ) -> tuple[RadixNode, int, int]:
        """Follow `tokens` for at most `limit` pages.

        Returns:
            (node, matched, inside): `matched` pages in all; they end `inside` pages into node's
            edge, 0 = at its end.
        """
        node = self._roots.get(namespace, self._nowhere)
        width = self._page_bytes
        offset = 0
        end = limit * width
        while offset < end:
            child = node.children.get(tokens[offset : offset + width])
            if child is None:
                break
            key = child.key
            if offset + len(key) <= end and tokens.startswith(key, offset):
                offset += len(key)
                node = child
                continue
            num_equal = _common_pages(
                key, tokens, offset, min(len(key), end - offset) // width, width
            )
            return child, offset // width + num_equal, num_equal
        return node, offset // width, 0

    def _split_edge(self, node: RadixNode, at_page: int) -> RadixNode:
        """Cut node's edge after `at_page` pages.

        The new upper part is returned; handles keep meaning the lower end.
        """
        parent = node.parent
        assert parent is not None, "a root has no edge to cut"
        cut = at_page * self._page_bytes
        self._serial += 1
        self.version += 1
        key = node.key[:cut]
        pages = node.pages[:at_page]
        serial = self._serial
        upper = RadixNode(
            parent,
            key,
            pages,
            serial,
            stamp=node.stamp,
            created=node.created,
            reuses=node.reuses,
            priority=node.priority,
            locks=node.locks,
        )
        parent.children[upper.key[: self._page_bytes]] = upper
        for index, group in enumerate(self.groups):
            cut_page = at_page * group.width
            upper.further.append(node.further[index][:cut_page])
            node.further[index] = node.further[index][cut_page:]
            group.move_blocks(upper)
        node.key = node.key[cut:]
        self._note_changed(node)
        node.pages = node.pages[at_page:]
        node.parent = upper
        upper.children[node.key[: self._page_bytes]] = node
        return upper

    def _attach_leaf(
        self, parent: RadixNode, key: bytes, pages: array[int], like: PageMemory | None
    ) -> RadixNode:
        self._serial += 1
        self.version += 1
        now = self.clock + 1
        leaf = RadixNode(parent, key, pages, self._serial, now, now)
        if like is not None:
            leaf.created = like.created
            leaf.reuses = like.reuses
        parent.children[key[: self._page_bytes]] = leaf
        for watch in self._watches:
            watch.on_child(parent, key[: self._page_bytes])
        self._evictable_pages += len(pages)
        self._push_candidate(leaf)
        return leaf

    def _remove_leaf(self, leaf: RadixNode, for_good: bool = False) -> int:
        parent = leaf.parent
        assert parent is not None, "a root is not a leaf"
        if self.on_remove is not None:
            self.on_remove(leaf, for_good or self.is_quarantined(leaf))
        del parent.children[leaf.key[: self._page_bytes]]
        leaf.is_evicted = True
        self._note_changed(leaf)
        self.version += 1
        self._evictable_pages -= len(leaf.pages)
        self._allocator.free(leaf.pages)
        freed = len(leaf.pages)
        for group in self.groups:
            blocks = group.drop_node(leaf)
            self._allocator.free(blocks)
            freed += len(blocks)
        if self._log is not None:
            self._log.on_removed(leaf.pages)
        if parent.parent is not None:
            self._push_candidate(parent)
        elif not parent.children:
            if parent in self._quarantine:
                self._quarantine.remove(parent)
            else:
                del self._roots[parent.key]
        return freed

    def _note_changed(self, node: RadixNode) -> None:
        for watch in self._watches:
            watch.on_changed(node)

    def _push_candidate(self, node: RadixNode) -> None:
        """Queue `node` for eviction if it is an unlocked leaf and not queued yet, or too far
        behind.
        """
        if node.locks or node.children:
            return
        if node.queued is None:
            self._queued += 1
        elif not self._policy.falls_with_use or node.queued == self._policy.key(node):
            return
        key = node.queued = self._policy.key(node)
        heapq.heappush(self._heap, (key, node.serial, node))
        if len(self._heap) > 2 * self._queued + DEAD_ENTRIES:
            self._drop_dead_entries()

    def _drop_dead_entries(self) -> None:
        self._heap = [entry for entry in self._heap if entry[2].queued == entry[0]]
        heapq.heapify(self._heap)

    def _touch_path(self, node: RadixNode) -> None:
        """Mark the path to `node` as used now; a parent's stamp is thereby never older than its
        children's.
        """
        self.clock += 1
        leaf = node
        while node.parent is not None:
            node.stamp = self.clock
            node = node.parent
        if self._policy.falls_with_use and leaf.queued is not None:
            self._push_candidate(leaf)

    @staticmethod
    def _raise_priority(node: RadixNode, priority: int) -> None:
        """Ancestors are at least as important as what hangs below them, so the walk ends at the
        first that is.
        """
        while node.parent is not None and node.priority < priority:
            node.priority = priority
            node = node.parent

    @staticmethod
    def _path_pages(node: RadixNode) -> array[int]:
        pages = array("i")
        for part in node.path():
            pages.extend(part.pages)
        return pages


def _common_pages(key: bytes, tokens: bytes, offset: int, limit: int, width: int) -> int:
    """How many of the first `limit` pages of `key` equal `tokens[at:]`, by bisection; the first is
    known to.
    """
    low = 1
    high = limit
    while low < high:
        middle = (low + high + 1) // 2
        if (
            key[low * width : middle * width]
            == tokens[offset + low * width : offset + middle * width]
        ):
            low = middle
        else:
            high = middle - 1
    return low
