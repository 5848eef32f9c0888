"""Routing policies compared on a recorded trace, through the real router process and a fleet of simulated engines.

    python -m tests.perf.bench_routing [--trace NAME] [--load 0.85] [--arms cost,sglang,smg] [--rounds 1] [--hold-turns]

Every arm serves the whole trace with a fresh router and empty caches; rounds interleave the arms. A load of 1 is the
work that the nodes could do if they shared one cache of their whole size. Times are in simulated seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from baton.config import simulated
from baton.config.simulated import StepModel
from baton_ops.bench import replay
from baton_ops.sim import trace as traces
from tests.perf.processes.fleet import Arm, Fleet, clients, installed, machine

ARMS = {
    "cost": Arm("cost", ("--policy", "cost")),
    "cache_aware": Arm("cache_aware, smallest tree", ("--policy", "cache_aware")),
    "cache_aware_load": Arm(
        "cache_aware, least load", ("--policy", "cache_aware", "--cache-miss", "least_load")
    ),
    "power_of_two": Arm("power_of_two", ("--policy", "power_of_two")),
    "round_robin": Arm("round_robin", ("--policy", "round_robin")),
    "random": Arm("random", ("--policy", "random")),
    "sglang": Arm("sglang-router 0.3.2, cache_aware", ("--policy", "cache_aware"), "sglang-router"),
    "smg": Arm("smg 1.13.0, cache_aware", ("--policy", "cache_aware"), "smg"),
}


def work_per_node(
    options: argparse.Namespace, trace: list[traces.TraceRequest], model: StepModel
) -> float:
    """Seconds that the trace asks of each node that prefills, behind one cache of all nodes' size.

    On engines that do both phases answers count, too: their rows run in the steps of prompts.
    """
    nodes = options.workers or options.prefill
    cached = traces.cached_in_arrival_order(trace, options.pool_tokens * nodes)
    work = sum(
        model.prefill_seconds(r.input_length - c, c) for r, c in zip(trace, cached, strict=True)
    )
    if options.workers:
        context = [r.input_length + r.output_length / 2 for r in trace]
        per_token = [model.token_us * 1e-6 + c * model.kv_read_ns * 1e-9 for c in context]
        work += sum(r.output_length * secs for r, secs in zip(trace, per_token, strict=True))
    return work / nodes


async def measure(options: argparse.Namespace, log_dir: Path) -> list[dict[str, Any]]:
    device = simulated.parse_device(options.device)
    scale, speed = device.length_scale, device.speed
    trace = traces.read_trace(traces.locate_trace(options.trace), options.limit or None)
    span = work_per_node(options, trace, device.model) / options.load
    work = replay.timed_requests(trace, span / traces.arrival_times(trace)[-1] / speed)
    shape = (
        f"{options.workers} engines"
        if options.workers
        else f"{options.prefill} P and {options.decode} D nodes"
    )
    print(
        f"{options.trace}: {len(trace)} requests in {span:.0f} simulated s ({work[-1].at:.0f} s), load {options.load}, "
        f"{shape} ({options.order}), {options.device}{', turns held' if options.hold_turns else ''}; "
        f"{machine()}",
        flush=True,
    )
    common = ["--simulate", options.device, "--max-queued-requests", "100000"]
    common += [
        "--max-total-tokens",
        str(options.pool_tokens // scale),
        "--request-timeout-secs",
        "3600",
    ]
    flags = {
        "prefill": [*common, "--schedule-policy", options.order],
        "worker": [*common, "--schedule-policy", options.order, "--stream-interval", "16"],
        "decode": [*common, "--stream-interval", "16", "--kv-transfer-timeout-secs", "3600"],
    }
    roles = {"prefill": options.prefill, "decode": options.decode}
    if options.workers:
        roles = {"worker": options.workers}
    arms = installed([ARMS[name] for name in options.arms.split(",")])
    results = []
    async with (
        clients(3600) as session,
        Fleet.start(log_dir, roles, flags) as fleet,
    ):
        for number in range(options.rounds):
            for arm in arms:
                results.append(await one(arm, number, fleet, session, work, scale, speed, options))
                if options.json:
                    Path(options.json).write_text(json.dumps(results) + "\n")
    return results


async def one(
    arm: Arm, number: int, fleet: Fleet, session: aiohttp.ClientSession, work: list[replay.TimedRequest], scale: int,
    speed: float, options: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    await fleet.flush(session)
    before = await replay.worker_counts(session, fleet.urls("worker") or fleet.urls("prefill"))
    began = time.monotonic()
    async with fleet.router(arm, session) as (url, _):
        outcome = await replay.replay_trace(
            session,
            url,
            "demo",
            work,
            scale=scale,
            chat=options.chat,
            hold_turns=options.hold_turns,
        )
    after = await replay.worker_counts(session, fleet.urls("worker") or fleet.urls("prefill"))
    split = [after[url] - before[url] for url in before]
    times = replay.summary_rows(outcome)["TTFT ms"]
    result: dict[str, Any] = {
        "arm": arm.name,
        "round": number,
        "failed": len(outcome.failures),
        "ttft": {name: value / 1e3 * speed for name, value in times.items()},
        "hits": outcome.hit_rate,
        "spread": max(split) * len(split) / max(sum(split), 1),
        "late": outcome.late_secs,
    }
    seconds = time.monotonic() - began
    print(
        f"  {arm.name}: TTFT mean {result['ttft']['mean']:.2f} s, {seconds:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    if outcome.failures:
        print(
            f"  {len(outcome.failures)} failed, first: {outcome.failures[0]}",
            file=sys.stderr,
            flush=True,
        )
    return result


def table(results: list[dict[str, Any]]) -> str:
    """Medians over rounds; ratios to the first arm within each round, with their range when there are several."""
    names = list(dict.fromkeys(r["arm"] for r in results))
    rounds = {name: [r for r in results if r["arm"] == name] for name in names}
    base = rounds[names[0]]
    lines = [
        "| router | mean [s] | p50 | p95 | p99 | mean ratio | p95 ratio | hit rate | max / mean | failed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]

    def ratio(mine: list[dict[str, Any]], column: str) -> str:
        values = [m["ttft"][column] / b["ttft"][column] for m, b in zip(mine, base, strict=False)]
        spread = f" [{min(values):.2f}, {max(values):.2f}]" if len(values) > 1 else ""
        return f"{statistics.median(values):.2f}{spread}"

    for name, mine in rounds.items():
        ttft = [
            f"{statistics.median(r['ttft'][c] for r in mine):.2f}"
            for c in ("mean", "p50", "p95", "p99")
        ]
        hits, spread = (statistics.median(r[c] for r in mine) for c in ("hits", "spread"))
        cells = [
            name,
            *ttft,
            ratio(mine, "mean"),
            ratio(mine, "p95"),
            f"{hits:.3f}",
            f"{spread:.2f}",
        ]
        lines.append("| " + " | ".join([*cells, str(sum(r["failed"] for r in mine))]) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", default="mooncake_conversation_first30min")
    parser.add_argument("--load", type=float, default=0.85)
    parser.add_argument("--arms", default=",".join(ARMS), help=f"of {', '.join(ARMS)}")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--limit", type=int, default=0, help="only the first so many requests")
    parser.add_argument("--prefill", type=int, default=8)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument(
        "--workers", type=int, default=0, help="engines that do both phases, instead of these"
    )
    parser.add_argument(
        "--pool-tokens", type=int, default=1 << 20, help="cache of each node [real tokens]"
    )
    parser.add_argument("--order", default="fcfs", help="--schedule-policy of the prefill nodes")
    parser.add_argument("--device", default="reference,speed=8,length_scale=8")
    parser.add_argument("--chat", action="store_true", help="send chat messages, not completions")
    parser.add_argument("--hold-turns", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    if unknown := set(options.arms.split(",")) - set(ARMS):
        parser.error(
            f"--arms: there is no {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}"
        )
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        results = asyncio.run(measure(options, Path(folder)))
    print(table(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
