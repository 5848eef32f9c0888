"""`baton bench`: the same load against several servers, interleaved, and the ratios between them.

Without --url it starts two clusters itself: one engine that does both phases, and a prefill/decode
pair; only one of them works at a time. A ratio is taken within each round, so that what the machine
does meanwhile hits both arms; its spread over the rounds is shown. One warm-up round per arm is
thrown away.

With --trace it replays a recorded trace instead, against one server after the other (replay.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import aiohttp

from baton.config.flags import flag_name
from baton.config.simulated import BLOCK_TOKENS
from baton.errors import ConfigError
from baton_ops.bench import replay
from baton_ops.bench.load import LoadRound, LoadShape, run_round
from baton_ops.launch import cluster_plan, local_cluster
from baton_ops.launch.smoke_test import served_model
from baton_ops.launch.supervisor import ChildFailed
from baton_ops.sim import trace as traces
from baton_ops.sim.report import fit_table, percentile

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
TRACE: dict[str, tuple[Any, str]] = {
    "speed": (1.0, "let requests arrive this many times faster than recorded"),
    "rate": (
        0.0,
        "instead of --speed: rescale arrivals to this mean rate; 0: as recorded [requests/s]",
    ),
    "limit": (0, "use only the first so many requests of the trace; 0: all"),
    "length_scale": (1, "let one token stand for this many of the trace (a divisor of 512)"),
    "timeout_secs": (600.0, "give up on a request after this long [s]"),
}
"""Flag → default and help, of the two things this command does."""


def make_parser() -> argparse.ArgumentParser:
    about = (
        "Same load, several servers, interleaved; ratios. With --trace: a recorded day, replayed."
    )
    parser = argparse.ArgumentParser(prog="baton bench", description=about, allow_abbrev=False)
    parser.add_argument(
        "--url",
        action="append",
        default=[],
        help="server to measure; repeat to compare (default: start two)",
    )
    parser.add_argument(
        "--model-path", default="demo", help="for the servers started here (default: demo)"
    )
    _add_flags(parser.add_argument_group("rounds of equal requests"), ROUNDS)
    group = parser.add_argument_group("a trace, against --url")
    group.add_argument(
        "--trace", help=f"trace file (.jsonl or .jsonl.gz), or {traces.SHIPPED_HELP}"
    )
    _add_flags(group, TRACE)
    group.add_argument(
        "--hold-turns",
        action="store_true",
        help="a request that continues another waits until that one is answered",
    )
    group.add_argument("--chat", action="store_true", help="send chat messages, not completions")
    parser.add_argument("--json", metavar="FILE", help="write the results to this file too")
    return parser


def parse_flags(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    options = parser.parse_args(argv)
    unused, condition = (ROUNDS, "with") if options.trace else (TRACE, "without")
    for name in unused:
        if hasattr(options, name):
            parser.error(f"{flag_name(name)} means nothing {condition} --trace; leave it out")
    for name, (default, _) in {**ROUNDS, **TRACE}.items():
        setattr(options, name, getattr(options, name, default))
    for name in (
        "rounds",
        "requests",
        "concurrency",
        "prompt_tokens",
        "output_tokens",
        "length_scale",
    ):
        if getattr(options, name) < 1:
            parser.error(f"{flag_name(name)} {getattr(options, name)}: must be at least 1")
    for name in ("speed", "timeout_secs"):
        if not 0 < getattr(options, name) < math.inf:
            parser.error(f"{flag_name(name)} {getattr(options, name)}: must be above 0")
    for name in ("rate", "limit"):
        if not 0 <= getattr(options, name) < math.inf:
            parser.error(f"{flag_name(name)} {getattr(options, name)}: must not be negative")
    if not options.trace and (options.hold_turns or options.chat):
        parser.error("--hold-turns and --chat mean nothing without --trace; leave them out")
    if options.trace and not options.url:
        parser.error("--trace needs the server to measure: --url http://host:port")
    if options.speed != 1 and options.rate:
        parser.error("--speed and --rate both rescale arrivals; give one")
    if BLOCK_TOKENS % options.length_scale:
        parser.error(f"--length-scale {options.length_scale}: use a divisor of {BLOCK_TOKENS}")
    return options


def _add_flags(group: Any, flags: dict[str, tuple[Any, str]]) -> None:
    for name, (default, text) in flags.items():
        group.add_argument(
            flag_name(name),
            type=type(default),
            default=argparse.SUPPRESS,
            help=f"{text} (default: {default})",
            metavar=name.upper().rpartition("_")[2],
        )


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


def _make_session(timeout_secs: float) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=timeout_secs)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def _run_rounds(options: argparse.Namespace) -> int:
    work = LoadShape(**{f.name: getattr(options, f.name) for f in fields(LoadShape)})
    async with AsyncExitStack() as stack:
        named = [(url, url) for url in options.url] or await _start_built_in(
            stack, options.model_path
        )
        arms = [BenchArm(name, url.rstrip("/"), await served_model(url)) for name, url in named]
        session = await stack.enter_async_context(_make_session(600))
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
            _write_json(options, rounds_as_json(arms))
        return 0


def _write_json(options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    document = {"options": vars(options), "results": results}
    Path(options.json).write_text(json.dumps(document, indent=1) + "\n")


async def _run_replay(options: argparse.Namespace) -> int:
    trace = traces.read_trace(traces.locate_trace(options.trace), options.limit or None)
    recorded = traces.arrival_times(trace)[-1]
    factor = (
        len(trace) / options.rate / recorded if options.rate and recorded else 1 / options.speed
    )
    work = replay.timed_requests(trace, factor)
    turns_note = "; turns wait for the answer before" if options.hold_turns else ""
    print(f"{options.trace}: {len(work)} requests in {work[-1].at:.1f} s{turns_note}", flush=True)
    results = []
    async with _make_session(options.timeout_secs) as session:
        for url in (url.rstrip("/") for url in options.url):
            workers = await replay.worker_urls(session, url) or [url]
            before = await replay.worker_counts(session, workers)
            outcome = await replay.replay_trace(
                session,
                url,
                await served_model(url),
                work,
                scale=options.length_scale,
                chat=options.chat,
                hold_turns=options.hold_turns,
            )
            after = await replay.worker_counts(session, workers)
            split = {worker: after[worker] - before[worker] for worker in before if worker in after}
            print(f"\n{url}\n{replay.format_report(outcome, split)}", flush=True)
            results.append({"url": url, **replay.as_json(outcome, split)})
    if options.json:
        _write_json(options, results)
    return 1 if any(result["failures"] for result in results) else 0


def main(argv: Sequence[str]) -> int:
    options = parse_flags(argv)
    try:
        return asyncio.run(_run_replay(options) if options.trace else _run_rounds(options))
    except (ChildFailed, ConfigError, aiohttp.ClientError) as err:
        print(f"baton bench: {err}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
