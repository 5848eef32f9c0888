"""dfs-weight: walk the radix tree depth first, heaviest subtree first, and take requests as the walk passes them.

The weight of a tree node is the number of waiting requests whose cached prefix ends in its subtree. Children come
before the requests that end at their parent; equal weights keep the order in which requests arrived at them.

        root                queue: r1→C r2→F r3→D r4→C r5→A r6→G      (rX→N: the prefix of rX ends at node N)
       /    \\              weights: A 4 (C 2, D 1, itself 1), B 2 (F 1, G 1)
      A      B              order: r1 r4 (C), r3 (D), r5 (A itself), r2 (F), r6 (G)
     / \\    / \\
    C   D  F   G            Source: SGLang 0.5.7's _calc_weight / _get_dfs_priority, without its recursion.

Only the nodes on the queue's own prefixes are looked at, so the cost is O(sum of path lengths), not the whole tree.
"""

from __future__ import annotations

from collections.abc import Sequence

ROOT = -1


def dfs_weight_keys(paths: Sequence[Sequence[int]]) -> list[float]:
    """Position of every request in the walk.

    Args:
        paths: per request the node numbers from the root's child down to the end of its cached prefix; () is a request
            without a cached prefix, which ends at the root and therefore comes last.
    """
    weight: dict[int, int] = {}
    children: dict[int, dict[int, None]] = {ROOT: {}}
    ends: dict[int, list[int]] = {}
    for i, path in enumerate(paths):
        parent = ROOT
        for node in path:
            weight[node] = weight.get(node, 0) + 1
            children.setdefault(parent, {})[node] = None
            children.setdefault(node, {})
            parent = node
        ends.setdefault(parent, []).append(i)
    keys = [0.0] * len(paths)
    position = 0
    stack: list[tuple[int, bool]] = [(ROOT, False)]
    while stack:
        node, children_done = stack.pop()
        if children_done:
            for i in ends.get(node, ()):
                keys[i] = float(position)
                position += 1
            continue
        stack.append((node, True))
        heaviest_first = sorted(children[node], key=lambda child: -weight[child])
        stack.extend((child, False) for child in reversed(heaviest_first))
    return keys
