"""`baton bench`: the same load against several servers, interleaved round by round, and the ratios between them.

Without --url it starts two clusters itself: one engine that does both phases, and a prefill/decode pair; only one of
them works at a time. A ratio is taken within each round, so that what the machine does meanwhile hits both arms; its
spread over the rounds is shown. One warm-up round per arm is thrown away.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from baton.bench.load import Round, Work, run_round
from baton.server import up
from baton.server.smoke import served_model
from baton.server.supervise import ChildFailed

BUILT_IN = (("one engine", ("--workers", "1")), ("P + D", ("--prefill", "1", "--decode", "1")))


@dataclass
class Arm:
    name: str
    url: str
    model: str
    rounds: list[Round] = field(default_factory=list)


def percentile(values: Sequence[float], q: float) -> float:
    """Linear between the nearest ranks."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * q
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


COLUMNS: tuple[tuple[str, Callable[[Round], float]], ...] = (
    ("tokens/s", lambda r: r.tokens_per_second),
    ("TTFT p50 ms", lambda r: percentile([t.ttft for t in r.timings], 0.5) * 1e3),
    ("TTFT p95 ms", lambda r: percentile([t.ttft for t in r.timings], 0.95) * 1e3),
    ("TPOT p50 ms", lambda r: percentile([t.tpot for t in r.timings], 0.5) * 1e3),
    ("TPOT p95 ms", lambda r: percentile([t.tpot for t in r.timings], 0.95) * 1e3),
    ("E2E p95 ms", lambda r: percentile([t.e2e for t in r.timings], 0.95) * 1e3),
)


def table(arms: Sequence[Arm]) -> str:
    """Per arm the median over rounds; per further arm its ratio to the first with the range over rounds."""
    head = f"{'':<21}" + "".join(f"{name:>20}" for name, _ in COLUMNS)
    lines = [head]
    for arm in arms:
        cells = [statistics.median(value(r) for r in arm.rounds) for _, value in COLUMNS]
        lines.append(f"{arm.name[:21]:<21}" + "".join(f"{cell:>20.2f}" for cell in cells))
    for arm in arms[1:]:
        line = f"{arm.name[:13]:<13} / first"
        for _, value in COLUMNS:
            ratios = [value(mine) / value(base) for mine, base in zip(arm.rounds, arms[0].rounds, strict=True)]
            line += f"{f'{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]':>20}"
        lines.append(line)
    return "\n".join(lines)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="baton bench", description="Same load, several servers, interleaved; ratios.", allow_abbrev=False
    )
    parser.add_argument(
        "--url", action="append", default=[], help="server to measure; repeat to compare (default: start two)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds per server (default: 5)")
    parser.add_argument("--requests", type=int, default=16, help="requests per round (default: 16)")
    parser.add_argument("--concurrency", type=int, default=4, help="requests at once (default: 4)")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="prompt length [tokens] (default: 512)")
    parser.add_argument("--output-tokens", type=int, default=32, help="answer length [tokens] (default: 32)")
    parser.add_argument("--shared-tokens", type=int, default=0, help="equal start of all prompts [tokens] (default: 0)")
    parser.add_argument("--model-path", default="demo", help="for the servers started here (default: demo)")
    options = parser.parse_args(argv)
    for name in ("rounds", "requests", "concurrency", "prompt_tokens", "output_tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 1")
    return options


async def _start_built_in(stack: AsyncExitStack, model_path: str) -> list[tuple[str, str]]:
    started = []
    for name, flags in BUILT_IN:
        plan = up.parse([*flags, "--model-path", model_path, "--port", "0", "--log-level", "warning"])
        log_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
        cluster = up.Cluster(plan, log_dir, lambda text: print(f"  {text}", flush=True))
        stack.push_async_callback(cluster.stop)
        print(f"starting {name}", flush=True)
        await cluster.start()
        started.append((name, cluster.url))
    return started


async def _bench(options: argparse.Namespace) -> int:
    work = Work(
        options.requests, options.concurrency, options.prompt_tokens, options.output_tokens, options.shared_tokens
    )
    async with AsyncExitStack() as stack:
        named = [(url, url) for url in options.url] or await _start_built_in(stack, options.model_path)
        arms = [Arm(name, url.rstrip("/"), await served_model(url)) for name, url in named]
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=600))
        )
        for number in range(-1, options.rounds):
            for arm in arms if number % 2 else reversed(arms):
                done = await run_round(session, arm.url, arm.model, work, seed=number)
                if done.failures:
                    print(
                        f"{arm.name}: {len(done.failures)} requests failed, first: {done.failures[0]}", file=sys.stderr
                    )
                    return 1
                if number >= 0:
                    arm.rounds.append(done)
        print(
            f"{options.rounds} rounds x {work.requests} requests, {work.concurrency} at once, "
            f"prompt {work.prompt_tokens} ({work.shared_tokens} shared) + answer {work.output_tokens} tokens; "
            f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, Python {platform.python_version()}"
        )
        print(table(arms))
        return 0


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    try:
        return asyncio.run(_bench(options))
    except (ChildFailed, aiohttp.ClientError) as err:
        print(f"baton bench: {err}", file=sys.stderr)
        return 1
