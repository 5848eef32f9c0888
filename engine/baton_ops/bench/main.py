"""`baton bench`: a recorded trace, replayed against one server after the other (replay.py).

Load of other shapes is the work of load generators, which `LOAD_GENERATORS` names with their
commands.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from baton.config.flags import flag_name
from baton.config.simulated import BLOCK_TOKENS
from baton.errors import ConfigError
from baton_ops.bench import replay
from baton_ops.launch.smoke_test import served_model
from baton_ops.sim import trace as traces

LOAD_GENERATORS = {
    "aiperf": (
        "aiperf profile --model demo --url http://127.0.0.1:8000 --endpoint-type chat --streaming "
        "--tokenizer ORG/NAME --concurrency 4 --request-count 24 --extra-inputs ignore_eos:true"
    ),
    "guidellm": (
        "guidellm run --backend kind=openai_http,target=http://127.0.0.1:8000,model=demo "
        "--tokenizer kind=huggingface_auto,model=DIR "
        "--data kind=synthetic_text,prompt_tokens=64,output_tokens=200 "
        "--profile kind=concurrent,streams=4 --constraint kind=max_requests,count=24"
    ),
    "vllm bench serve": (
        "vllm bench serve --backend openai-chat --base-url http://127.0.0.1:8000 "
        "--endpoint /v1/chat/completions --model demo --tokenizer DIR --dataset-name random "
        "--ignore-eos"
    ),
}
"""Program → its command for a server at port 8000, as docs/guide/clients.md has it."""

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
"""Flag → default and help."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton bench",
        description="Replay a recorded trace against servers, one after the other.",
        epilog=format_load_generators(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--url",
        action="append",
        default=[],
        help="server to measure; repeat to compare",
    )
    parser.add_argument(
        "--trace", help=f"trace file (.jsonl or .jsonl.gz), or {traces.SHIPPED_HELP}"
    )
    for name, (default, text) in TRACE.items():
        parser.add_argument(
            flag_name(name),
            type=type(default),
            default=default,
            help=f"{text} (default: {default})",
            metavar=name.upper().rpartition("_")[2],
        )
    parser.add_argument(
        "--hold-turns",
        action="store_true",
        help="a request that continues another waits until that one is answered",
    )
    parser.add_argument("--chat", action="store_true", help="send chat messages, not completions")
    parser.add_argument("--json", metavar="FILE", help="write the results to this file too")
    return parser


def format_load_generators() -> str:
    """Commands for load of other shapes, each on lines that fit a terminal."""
    lines = ["Load of other shapes (a fixed rate or concurrency, synthetic prompts):"]
    for command in LOAD_GENERATORS.values():
        # A flag and its value stay on one line.
        joined = re.sub(r"( --[\w-]+) (?!-)", r"\1\0", command)
        wrapped = textwrap.wrap(joined, 76, break_long_words=False, break_on_hyphens=False)
        lines += ["", "  " + " \\\n    ".join(wrapped).replace("\0", " ")]
    lines += ["", "DIR is the directory of the model, ORG/NAME its tokenizer on Hugging Face."]
    return "\n".join(lines)


def parse_flags(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    options = parser.parse_args(argv)
    if not options.trace:
        generators = ", ".join(LOAD_GENERATORS)
        parser.error(f"--trace FILE is needed; for load without a trace see {generators} in --help")
    if not options.url:
        parser.error("--trace needs the server to measure: --url http://host:port")
    if options.length_scale < 1:
        parser.error(f"--length-scale {options.length_scale}: must be at least 1")
    for name in ("speed", "timeout_secs"):
        if not 0 < getattr(options, name) < math.inf:
            parser.error(f"{flag_name(name)} {getattr(options, name)}: must be above 0")
    for name in ("rate", "limit"):
        if not 0 <= getattr(options, name) < math.inf:
            parser.error(f"{flag_name(name)} {getattr(options, name)}: must not be negative")
    if options.speed != 1 and options.rate:
        parser.error("--speed and --rate both rescale arrivals; give one")
    if BLOCK_TOKENS % options.length_scale:
        parser.error(f"--length-scale {options.length_scale}: use a divisor of {BLOCK_TOKENS}")
    return options


def _make_session(timeout_secs: float) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=timeout_secs)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


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
        document = {"options": vars(options), "results": results}
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")
    return 1 if any(result["failures"] for result in results) else 0


def main(argv: Sequence[str]) -> int:
    options = parse_flags(argv)
    try:
        return asyncio.run(_run_replay(options))
    except (ConfigError, aiohttp.ClientError) as err:
        print(f"baton bench: {err}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
