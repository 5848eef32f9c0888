"""Order of the waiting queue. A policy is a function from a sequence to a sort key; ties end with (arrival, handle).

fcfs: first come, first served. lpm: longest cached prefix first, which raises the hit rate and lets requests with cold
prompts wait (its weakness: see docs/architecture.md). Retracted sequences keep their arrival, hence their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from baton.sched.seq import Seq

Key = tuple[float, float, int]
KeyFn = Callable[[Seq], Key]


class PrefixIndex(Protocol):
    """The part of the radix cache that an order may look at: it must not change what is evicted next."""

    def peek(self, tokens: bytes, namespace: bytes, max_tokens: int) -> int:
        """Tokens of the longest cached prefix of `tokens` (little-endian int32)."""
        ...


def fcfs(_index: PrefixIndex) -> KeyFn:
    return lambda seq: (0.0, seq.req.arrival, seq.handle)


def lpm(index: PrefixIndex) -> KeyFn:
    def key(seq: Seq) -> Key:
        cached = index.peek(seq.tokens.tobytes(), seq.req.namespace, len(seq.tokens) - 1)
        return (-float(cached), seq.req.arrival, seq.handle)

    return key


POLICIES: dict[str, Callable[[PrefixIndex], KeyFn]] = {"fcfs": fcfs, "lpm": lpm}


def ordered(queue: Iterable[Seq], key: KeyFn) -> list[Seq]:
    return sorted(queue, key=key)
