"""One hot system prompt: 400 requests before 4 engines. How even are they spread, at which rate, with how many hits?

    python -m tests.perf.bench_hot [--rounds 3] [--concurrency 16,48,128]

Arms are interleaved within a round, each with a fresh router and empty caches. Rates are ratios to round_robin's in the
same round; a wrong choice costs little where the engines wait for their clients, and much where they do not.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from pathlib import Path

import aiohttp

from baton_ops.bench import replay
from baton_ops.bench.words import make_words
from tests.perf.processes.closed import Seen, Turn, run
from tests.perf.processes.fleet import Arm, Fleet, clients, installed, machine

ARMS = (
    Arm("round_robin", ("--policy", "round_robin")),
    Arm("cost", ("--policy", "cost")),
    Arm("cache_aware", ("--policy", "cache_aware")),
    Arm("sglang-router 0.3.2, cache_aware", ("--policy", "cache_aware"), "sglang-router"),
    Arm("smg 1.13.0, cache_aware", ("--policy", "cache_aware"), "smg"),
)
WORKERS, REQUESTS = 4, 400
SYSTEM, QUESTION, ANSWER = 1225, 50, 24
"""Tokens of four characters: the system prompt has 4900 characters."""


async def one(
    fleet: Fleet, arm: Arm, session: aiohttp.ClientSession, concurrency: int
) -> tuple[Seen, list[int]]:
    await fleet.flush(session)
    before = await replay.worker_counts(session, fleet.urls("worker"))
    system = make_words("system", SYSTEM)
    async with fleet.router(arm, session) as (url, _):
        asks = (
            [Turn(system + make_words(f"question {i}", QUESTION), ANSWER)] for i in range(REQUESTS)
        )
        seen = await run(session, url, asks, concurrency)
    after = await replay.worker_counts(session, fleet.urls("worker"))
    return seen, [after[url] - before[url] for url in before]


async def measure(options: argparse.Namespace, log_dir: Path) -> str:
    rows = [int(text) for text in options.concurrency.split(",")]
    arms = installed(ARMS)
    found: dict[tuple[int, str], list[tuple[Seen, list[int]]]] = {}
    flags = {"worker": ["--simulate", options.device, "--stream-interval", "8"]}
    async with (
        clients(600) as session,
        Fleet.start(log_dir, {"worker": WORKERS}, flags) as fleet,
    ):
        for number in range(options.rounds):
            for concurrency in rows:
                for arm in arms if number % 2 == 0 else reversed(arms):
                    result = await one(fleet, arm, session, concurrency)
                    found.setdefault((concurrency, arm.name), []).append(result)
                    print(f"  {concurrency} {arm.name}: {result[1]}", file=sys.stderr, flush=True)
    print(
        f"{options.rounds} rounds of {REQUESTS} requests, {WORKERS} workers, {options.device}; {machine()}"
    )
    lines = [
        "| at once | router | requests per worker, last round | max / mean | rate / round_robin | hit rate |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for (concurrency, name), results in sorted(found.items(), key=lambda item: item[0][0]):
        spreads = [max(split) * len(split) / sum(split) for _, split in results]
        base = found[concurrency, ARMS[0].name]
        rates = [
            mine.rate / theirs.rate for (mine, _), (theirs, _) in zip(results, base, strict=True)
        ]
        hits = statistics.mean(seen.hit_rate for seen, _ in results)
        split = "/".join(map(str, results[-1][1]))
        lines.append(
            f"| {concurrency} | {name} | {split} | {_range(spreads)} | {_range(rates)} | {hits:.3f} |"
        )
    return "\n".join(lines)


def _range(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", default="16,48,128")
    parser.add_argument("--device", default="reference,speed=0.15")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        print(asyncio.run(measure(options, Path(folder))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
