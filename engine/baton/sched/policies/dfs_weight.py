r"""dfs-weight: walk the radix tree depth first, heaviest subtree first, and take requests as the
walk passes them.

The weight of a tree node is the number of waiting requests with cached prefixes that end in its
subtree. Children come before the requests that end at their parent; of equal weights the older node
comes first, and requests that end at the same node go by arrival, as under every policy.

    queue: r1→C r2→F r3→D r4→C r5→A r6→G      (rX→N: the prefix of rX ends at node N)

        root
       /    \              weights: A 4 (C 2, D 1, itself 1), B 2 (F 1, G 1)
      A      B              order: r1 r4 (C), r3 (D), r5 (A itself), r2 (F), r6 (G)
     / \    / \
    C   D  F   G

    Source: SGLang 0.5.7's _calc_weight / _get_dfs_priority, without its recursion.

Only the nodes on the queue's own prefixes are known here, not the whole tree, and only they are
walked through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from baton.cache.radix import PrefixProbe, RadixCache, RadixNode
from baton.sched.policies.base import Policy, PolicyContext, batches, refresh_probe
from baton.sched.types.sequence import Seq

ROOT = -1

Path = Sequence[int]
"""Numbers of tree nodes from the root's child down to the end of a cached prefix; () ends at the
root, the last.
"""


class BranchWeights:
    """How many of the requests end at or below each node."""

    def __init__(self) -> None:
        self._weight: dict[int, int] = {}
        self._children: dict[int, list[int]] = {ROOT: []}

    def add_path(self, path: Path, count: int = 1) -> None:
        """Count so many requests that end there."""
        weight = self._weight
        children = self._children
        parent = ROOT
        for node in path:
            if node in weight:
                weight[node] += count
            else:
                weight[node] = count
                children[node] = []
                children[parent].append(node)
            parent = node

    def walk_places(self) -> dict[int, int]:
        """Node → its place in the walk, children before their parent.

        O(n log n) in the number of nodes.
        """
        # Backwards, a walk in which a parent comes before its children is a matter of one stack.
        weight = self._weight
        stack = [ROOT]
        backwards = []
        while stack:
            node = stack.pop()
            backwards.append(node)
            stack.extend(sorted(self._children[node], key=lambda child: (-weight[child], child)))
        return {node: place for place, node in enumerate(reversed(backwards))}


class DfsWeight(Policy):
    name = "dfs-weight"
    keys_are_independent = False

    def sort_keys(
        self, queue: Sequence[Seq], view: PolicyContext, cache_key: Any
    ) -> Sequence[float]:
        ends = _PrefixEnds()
        ends.add_requests(queue, view.index)
        ends.walk_tree(view.index)
        return [ends.place_of(seq) for seq in queue]

    def keys_in_parts(
        self, queue: Sequence[Seq], part: int, view: Callable[[], PolicyContext], cache_key: Any
    ) -> Iterator[Iterable[tuple[Seq, float]]]:
        ends = _PrefixEnds()
        for seqs in batches(queue, part):
            ends.add_requests(seqs, view().index)
            yield ()
        ends.walk_tree(view().index)
        yield ()
        for seqs in batches(queue, part):
            yield [(seq, ends.place_of(seq)) for seq in seqs]


class _PrefixEnds:
    """Where the cached prefixes of requests end in the tree, and the places of these nodes in the
    walk.
    """

    def __init__(self) -> None:
        self._probe_of: dict[int, PrefixProbe] = {}
        self._ending: dict[RadixNode, tuple[PrefixProbe, int]] = {}
        """A probe that ended there, and how many did."""
        self._places: dict[RadixNode, int] = {}

    def add_requests(self, queue: Sequence[Seq], index: RadixCache) -> None:
        for i in index.find_outdated([seq.probe for seq in queue]):
            refresh_probe(queue[i], index)
        for seq in queue:
            assert seq.probe is not None, "find_outdated names those without"
            probe = self._probe_of[seq.handle] = seq.probe
            _, count = self._ending.get(probe.node, (probe, 0))
            self._ending[probe.node] = probe, count + 1

    def walk_tree(self, index: RadixCache) -> None:
        """O(nodes on the way to these ends)."""
        weights = BranchWeights()
        last: dict[RadixNode, int] = {}
        for node, (probe, count) in self._ending.items():
            path = index.path_of(probe)
            weights.add_path(path, count)
            last[node] = path[-1] if path else ROOT
        places = weights.walk_places()
        self._places = {node: places[number] for node, number in last.items()}

    def place_of(self, seq: Seq) -> int:
        return self._places[self._probe_of[seq.handle].node]
