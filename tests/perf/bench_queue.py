"""Cost of looking at a long waiting queue: the first look, after a page was published elsewhere, and while blocked.

    python -m tests.perf.bench_queue [--requests 4096] [--tokens 4096]

Prompts share 64 heads of half their length; a sixteenth of them is cached in whole. The arm `from scratch` walks the
tree for every prompt and sorts, as a queue without memory would; the arms take turns, and their orders are compared.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from array import array
from collections.abc import Callable

from baton.cache.pages import PageAllocator
from baton.cache.radix import RadixCache
from baton.sched.fairness.sharing import SharingStrategy
from baton.sched.policies import POLICIES, PolicyContext, PolicyParams
from baton.sched.queue.waiting_queue import WaitingQueue
from baton.sched.types.priority import PriorityRule
from baton.sched.types.request import ValidatedRequest
from baton.sched.types.sequence import Seq
from tests.support.sched.sched_sim import duplicates, ordered

ROUNDS = 7


def elapsed_ms(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def bench(name: str, page_size: int, requests: int, tokens: int) -> None:
    rng = random.Random(5)
    allocator = PageAllocator(requests * tokens // page_size // 8)
    cache = RadixCache(page_size, allocator)
    heads = [array("i", rng.choices(range(32000), k=tokens // 2)) for _ in range(64)]
    step = 0

    def view() -> PolicyContext:
        return PolicyContext(0.0, step, cache, 1e4, step, 0.5)

    params = PolicyParams(lpm_degrade_threshold=0)
    queue = WaitingQueue(POLICIES[name](params), PriorityRule(), view, SharingStrategy())
    seqs = []
    for handle in range(requests):
        prompt = heads[handle % 64] + array("i", rng.choices(range(32000), k=tokens - tokens // 2))
        seqs.append(Seq(ValidatedRequest(handle, "", prompt, arrival=float(handle)), prompt, 16))
        queue.add(seqs[-1])
    for seq in seqs[::16]:
        pages = allocator.alloc(tokens // page_size)
        assert pages is not None
        allocator.free(duplicates(pages, cache.insert(seq.key, pages, b"")))
    first = elapsed_ms(lambda: next(queue.in_order()))
    times: dict[str, list[float]] = {"from scratch": [], "tree changed": [], "blocked": []}
    for _ in range(ROUNDS):
        step += 1
        for seq in seqs:
            queue.on_tokens(seq)  # all have another cached prefix
        times["from scratch"].append(
            elapsed_ms(lambda: ordered(seqs, POLICIES[name](params), PriorityRule(), view()))
        )
        times["tree changed"].append(elapsed_ms(lambda: next(queue.in_order())))
        times["blocked"].append(elapsed_ms(lambda: next(queue.in_order())))
    for _ in range(len(seqs)):  # a long queue is brought up to date over several looks
        next(queue.in_order())
    assert list(queue.in_order()) == ordered(seqs, POLICIES[name](params), PriorityRule(), view())
    shown = ", ".join(f"{arm} {statistics.median(ms):.3f} ms" for arm, ms in times.items())
    print(f"{name:12} page {page_size:3}: first {first:.1f} ms; medians of {ROUNDS}: {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    for page_size in (16, 64):
        for name in ("lpm", "dfs-weight", "short-first", "srpt-aging", "hrrn", "edf"):
            bench(name, page_size, args.requests, args.tokens)


if __name__ == "__main__":
    main()
