"""How sizes are divided among tensor-parallel ranks. No torch here.

    divided by              heads          qkv (its output rows), o (its input columns), the KV pool
                            inner size     gate_up (rows), down (columns), of an MLP and of every expert
                            experts        instead of their inner size, with --ep-size
                            vocabulary     embedding and output head (rows)
    whole on every rank     norms, positions, routers, the residual stream
    on the first rank only  biases of o and down: partial results are added up, so a bias may come
    once

Each rank has whole groups of query heads with their KV head. With more ranks than KV heads, several
hold the same one.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_SIZE = 64


@dataclass(frozen=True, slots=True)
class Shard:
    """Share `rank` of `size`."""

    rank: int = 0
    size: int = 1
    divides_experts: bool = False
    """Each rank has whole experts (--ep-size); else each rank has a part of every expert."""

    def slice_of(self, n: int) -> slice:
        """This share of 0 … n; shares differ by one at most."""
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def kv_heads(self, n: int) -> slice:
        """The KV heads that this share's query heads read: at least one."""
        share = self.slice_of(n)
        return slice(share.start, max(share.stop, share.start + 1))


WHOLE = Shard()


def slice_length(cut: slice) -> int:
    """Entries that a slice with a start and a stop takes."""
    return len(range(cut.start, cut.stop, cut.step or 1))
