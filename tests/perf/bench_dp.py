"""DP-aware routing or not: conversations of three turns behind shared system prompts, P and D with eight ranks each.

    python -m tests.perf.bench_dp [--rounds 2] [--concurrency 1,2,4,8,16,32,64,128]

Arms are interleaved; each sweeps the rows with its own router from empty caches, which fill from row to row as on a
live server. Prompts per turn: a system prompt (one of 30), the turns and answers so far, a question. Times in simulated
milliseconds. The loop is closed: who waits less for first tokens decodes in larger batches, which TPOT shows and the
change of the rate (conversations per second) puts in its place.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import aiohttp

from baton.config import simulated
from baton.config.simulated import scale_tokens
from baton_ops.bench.words import make_words
from tests.perf.processes.closed import Seen, Turn, run
from tests.perf.processes.fleet import Arm, Fleet, clients, installed, machine

ARMS = (
    Arm("cost", ("--policy", "cost")),
    Arm("cost --dp-aware", ("--policy", "cost", "--dp-aware")),
    Arm("smg --dp-aware", ("--policy", "cache_aware", "--dp-aware"), "smg"),
)
GROUPS, TURNS = 30, 3
SYSTEM, QUESTION, ANSWER = 2048, 2048, 64
"""Tokens. An answer of the turn before is part of the next prompt, and not in P's cache."""
CONVERSATIONS = 24
"""At least so many per row."""


def conversation(number: int, scale: int) -> list[Turn]:
    answer = scale_tokens(ANSWER, scale)
    text = make_words(f"system {number % GROUPS}", SYSTEM // scale)
    turns = []
    for turn in range(TURNS):
        text += make_words(f"question {number} {turn}", QUESTION // scale)
        turns.append(Turn(text, answer))
        text += make_words(f"answer {number} {turn}", answer)
    return turns


async def sweep(
    fleet: Fleet, arm: Arm, session: aiohttp.ClientSession, rows: list[int], scale: int
) -> list[Seen]:
    await fleet.flush(session)
    numbers = iter(range(10**6))

    def some(count: int) -> Iterator[list[Turn]]:
        return (conversation(next(numbers) * 7919 % 10**6, scale) for _ in range(count))

    found = []
    async with fleet.router(arm, session) as (url, _):
        for concurrency in rows:
            seen = await run(session, url, some(max(CONVERSATIONS, 2 * concurrency)), concurrency)
            print(
                f"  {arm.name}, {concurrency} at once: {seen.seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            found.append(seen)
    return found


async def measure(options: argparse.Namespace, log_dir: Path) -> str:
    device = simulated.parse_device(options.device)
    rows = [int(text) for text in options.concurrency.split(",")]
    flags = ["--simulate", options.device, "--dp-size", "8"]
    roles = {
        "prefill": [*flags, "--schedule-policy", options.order],
        "decode": [*flags, "--stream-interval", "16"],
    }
    arms = installed(ARMS)
    results: dict[str, list[list[Seen]]] = {arm.name: [] for arm in arms}
    async with (
        clients(600) as session,
        Fleet.start(log_dir, {"prefill": 1, "decode": 1}, roles) as fleet,
    ):
        for _ in range(options.rounds):
            for arm in arms:
                results[arm.name].append(
                    await sweep(fleet, arm, session, rows, device.length_scale)
                )
    print(f"{options.rounds} rounds, {options.device}, {options.order}; {machine()}")
    lines = [
        "| at once | "
        + " | ".join(f"{a.name}: TTFT p95, TPOT p95 [ms], hits" for a in arms)
        + " | change |"
    ]
    lines.append("|---|" + "---|" * (len(arms) + 1))
    per_token = device.speed / device.length_scale

    def cell(name: str, row: int) -> tuple[list[float], list[float], float]:
        seen = [sweep[row] for sweep in results[name]]
        ttft = [s.ms("ttft", 0.95) * device.speed for s in seen]
        return (
            ttft,
            [s.ms("tpot", 0.95) * per_token for s in seen],
            statistics.mean(s.hit_rate for s in seen),
        )

    for row, concurrency in enumerate(rows):
        cells = {arm.name: cell(arm.name, row) for arm in arms}
        shown = [
            f"{statistics.median(ttft):.0f}, {statistics.median(tpot):.1f}, {hits:.2f}"
            for ttft, tpot, hits in cells.values()
        ]
        off, on = (cells[arm.name][:2] for arm in ARMS[:2])
        plain, aware = ([sweep[row].seconds for sweep in results[arm.name]] for arm in ARMS[:2])
        changes = [
            f"{name} "
            + " / ".join(f"{(b / a - 1) * 100:+.0f} %" for a, b in zip(off[i], on[i], strict=True))
            for i, name in enumerate(("TTFT", "TPOT"))
        ]
        changes.append(
            "rate "
            + " / ".join(f"{(a / b - 1) * 100:+.0f} %" for a, b in zip(plain, aware, strict=True))
        )
        lines.append(f"| {concurrency} | " + " | ".join([*shown, ", ".join(changes)]) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--concurrency", default="1,2,4,8,16,32,64,128")
    parser.add_argument("--order", default="fcfs", help="--schedule-policy of the prefill node")
    parser.add_argument("--device", default="reference,speed=2,length_scale=8")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        print(asyncio.run(measure(options, Path(folder))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
