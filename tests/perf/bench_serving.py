"""The same load against several servers, interleaved, and the ratios between them.

Without --url it starts two clusters itself: one engine that does both phases, and a prefill/decode
pair; only one of them works at a time. A ratio is taken within each round, so that what the machine
does meanwhile hits both arms; its spread over the rounds is shown. One warm-up round per arm is
thrown away.

In a round `concurrency` clients each send their next request when the last is answered. Prompts are
random token ids of a fixed length (the first `shared_tokens` equal in all of them), answers have a
fixed length, so that servers get the same work. Clock: monotonic, in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import aiohttp

from baton.config.flags import flag_name, opt
from baton.errors import ConfigError
from baton_ops.bench.measured_request import RequestTiming, send_request
from baton_ops.launch import cluster_plan, local_cluster
from baton_ops.launch.smoke_test import served_model
from baton_ops.launch.supervisor import ChildFailed
from baton_ops.sim.report import fit_table, percentile

FIRST_ID = 3
LAST_ID = 1000
"""Ids every tokenizer has and that are not special in common models."""


@dataclass(frozen=True, slots=True)
class LoadShape:
    """Requests of one round, as flags say."""

    requests: int = opt(16, "requests per round")
    concurrency: int = opt(4, "requests at once")
    prompt_tokens: int = opt(512, "prompt length [tokens]")
    output_tokens: int = opt(32, "answer length [tokens]")
    shared_tokens: int = opt(0, "equal start of all prompts [tokens]")


@dataclass(frozen=True, slots=True)
class LoadRound:
    """All timings of one round against one server."""

    seconds: float
    timings: tuple[RequestTiming, ...]
    failures: tuple[str, ...]

    @property
    def tokens_per_second(self) -> float:
        return sum(t.tokens for t in self.timings) / self.seconds


def make_prompts(work: LoadShape, seed: int) -> list[list[int]]:
    """The round's prompts; the shared part depends on nothing, the rest on `seed`."""
    shared = random.Random(0)
    random_part = random.Random(seed)
    start = [
        shared.randrange(FIRST_ID, LAST_ID)
        for _ in range(min(work.shared_tokens, work.prompt_tokens))
    ]
    remaining_tokens = work.prompt_tokens - len(start)
    return [
        start + [random_part.randrange(FIRST_ID, LAST_ID) for _ in range(remaining_tokens)]
        for _ in range(work.requests)
    ]


async def run_round(
    session: aiohttp.ClientSession, url: str, model: str, work: LoadShape, seed: int
) -> LoadRound:
    """Send one round to `url`; never raises for a failed request: its reason is in `failures`."""
    queue = make_prompts(work, seed)
    timings: list[RequestTiming] = []
    failures: list[str] = []

    async def run_client() -> None:
        while queue:
            prompt = queue.pop()
            try:
                timings.append(await send_request(session, url, model, prompt, work.output_tokens))
            except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as err:
                failures.append(f"{type(err).__name__}: {err}")

    began = time.perf_counter()
    await asyncio.gather(*(run_client() for _ in range(work.concurrency)))
    return LoadRound(time.perf_counter() - began, tuple(timings), tuple(failures))


BUILT_IN = (("one engine", ("--workers", "1")), ("P + D", ("--prefill", "1", "--decode", "1")))


@dataclass
class BenchArm:
    name: str
    url: str
    model: str
    rounds: list[LoadRound] = field(default_factory=list)


COLUMNS: tuple[tuple[str, Callable[[LoadRound], float]], ...] = (
    ("tokens/s", lambda r: r.tokens_per_second),
    ("TTFT p50 ms", lambda r: percentile(sorted(t.ttft for t in r.timings), 0.5) * 1e3),
    ("TTFT p95 ms", lambda r: percentile(sorted(t.ttft for t in r.timings), 0.95) * 1e3),
    ("TPOT p50 ms", lambda r: percentile(sorted(t.tpot for t in r.timings), 0.5) * 1e3),
    ("TPOT p95 ms", lambda r: percentile(sorted(t.tpot for t in r.timings), 0.95) * 1e3),
    ("E2E p95 ms", lambda r: percentile(sorted(t.e2e for t in r.timings), 0.95) * 1e3),
)


def compare_to_first(
    arms: Sequence[BenchArm], arm: BenchArm, value: Callable[[LoadRound], float]
) -> list[float | None]:
    """Value of an arm over that of the first one, per round.

    None: the first one's value is 0. TPOT is, of answers that arrive in one event.
    """
    rounds = zip(arm.rounds, arms[0].rounds, strict=True)
    return [value(mine) / value(base) if value(base) else None for mine, base in rounds]


def format_ratios(per_round: Sequence[float | None]) -> str:
    """Median with the range over rounds; "-" if a round has no ratio."""
    known = [ratio for ratio in per_round if ratio is not None]
    if len(known) < len(per_round):
        return "-"
    return f"{statistics.median(known):.2f} [{min(known):.2f}, {max(known):.2f}]"


def format_table(arms: Sequence[BenchArm], columns: int | None = None) -> str:
    """Median over rounds of each arm.

    Arms after the first have their ratio to it, too, with the range over rounds.
    """
    names = [arm.name.removeprefix("http://") for arm in arms]
    rows = [("", *(name for name, _ in COLUMNS))]
    for name, arm in zip(names, arms, strict=True):
        medians = (statistics.median(map(value, arm.rounds)) for _, value in COLUMNS)
        rows.append((name, *(f"{median:.2f}" for median in medians)))
    for name, arm in zip(names[1:], arms[1:], strict=True):
        cells = (format_ratios(compare_to_first(arms, arm, value)) for _, value in COLUMNS)
        rows.append((f"{name} / first", *cells))
    return "\n".join(fit_table(rows, columns))


def rounds_as_json(arms: Sequence[BenchArm]) -> list[dict[str, Any]]:
    """Per arm its values in each round, their medians, and the ratios to the first arm."""
    return [
        {
            "name": arm.name,
            "url": arm.url,
            "model": arm.model,
            "rounds": [{name: value(outcome) for name, value in COLUMNS} for outcome in arm.rounds],
            "medians": {name: statistics.median(map(value, arm.rounds)) for name, value in COLUMNS},
            "ratios_to_first": {
                name: compare_to_first(arms, arm, value) for name, value in COLUMNS
            },
        }
        for arm in arms
    ]


ROUNDS: dict[str, tuple[Any, str]] = {
    "rounds": (5, "rounds per server"),
    **{f.name: (f.default, f.metadata["help"]) for f in fields(LoadShape)},
}
"""Flag → default and help."""


def parse_flags(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.perf.bench_serving", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--url",
        action="append",
        default=[],
        help="server to measure; repeat to compare (default: start two)",
    )
    parser.add_argument(
        "--model-path", default="demo", help="for the servers started here (default: demo)"
    )
    for name, (default, text) in ROUNDS.items():
        parser.add_argument(
            flag_name(name),
            type=int,
            default=default,
            help=f"{text} (default: {default})",
            metavar=name.upper().rpartition("_")[2],
        )
    parser.add_argument("--json", metavar="FILE", help="write the results to this file too")
    options = parser.parse_args(argv)
    for name in ("rounds", "requests", "concurrency", "prompt_tokens", "output_tokens"):
        if getattr(options, name) < 1:
            parser.error(f"{flag_name(name)} {getattr(options, name)}: must be at least 1")
    return options


async def _start_built_in(stack: AsyncExitStack, model_path: str) -> list[tuple[str, str]]:
    started = []
    for name, flags in BUILT_IN:
        plan = cluster_plan.parse_flags(
            [*flags, "--model-path", model_path, "--port", "0", "--log-level", "warning"]
        )
        log_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
        cluster = local_cluster.LocalCluster(
            plan, log_dir, lambda text: print(f"  {text}", flush=True)
        )
        stack.push_async_callback(cluster.stop)
        print(f"starting {name}", flush=True)
        await cluster.start()
        started.append((name, cluster.url))
    return started


def make_session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=600)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def _run_rounds(options: argparse.Namespace) -> int:
    work = LoadShape(**{f.name: getattr(options, f.name) for f in fields(LoadShape)})
    async with AsyncExitStack() as stack:
        named = [(url, url) for url in options.url] or await _start_built_in(
            stack, options.model_path
        )
        arms = [BenchArm(name, url.rstrip("/"), await served_model(url)) for name, url in named]
        session = await stack.enter_async_context(make_session())
        for number in range(-1, options.rounds):
            for arm in arms if number % 2 else reversed(arms):
                done = await run_round(session, arm.url, arm.model, work, seed=number)
                if done.failures:
                    failed = f"{len(done.failures)} requests failed, first: {done.failures[0]}"
                    print(f"{arm.name}: {failed}", file=sys.stderr)
                    return 1
                if number >= 0:
                    arm.rounds.append(done)
        print(
            f"{options.rounds} rounds x {work.requests} requests, {work.concurrency} at once, "
            f"prompt {work.prompt_tokens} ({work.shared_tokens} shared) + answer {work.output_tokens} tokens; "
            f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, Python {platform.python_version()}"
        )
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(format_table(arms, columns))
        if options.json:
            document = {"options": vars(options), "results": rounds_as_json(arms)}
            Path(options.json).write_text(json.dumps(document, indent=1) + "\n")
        return 0


def main() -> int:
    options = parse_flags()
    try:
        return asyncio.run(_run_rounds(options))
    except (ChildFailed, ConfigError, aiohttp.ClientError) as err:
        print(f"bench_serving: {err}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
