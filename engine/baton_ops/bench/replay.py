"""A recorded trace against a server: requests leave when it says so, whether or not earlier ones
were answered.

1. `timed_requests` makes the requests of a trace: when each leaves, a prompt whose text is equal to
   others' exactly where their block ids are, how long an answer, and which earlier request it
   continues;
2. `replay` sends them; with `hold_turns` a request waits for the answer to the one that it
   continues, because a client cannot ask on before that (traces that are replayed faster than
   recorded would otherwise do so);
3. `ReplayRound` is what the clients saw. What the workers saw, their own metrics tell:
   `worker_counts`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp

from baton.config.simulated import BLOCK_TOKENS, scale_tokens
from baton.errors import counted
from baton_ops.bench.measured_request import RequestTiming, send_request
from baton_ops.bench.words import CHARS, make_words
from baton_ops.clients.local_keys import known_control_key
from baton_ops.clients.metrics import parse_metrics, sum_samples
from baton_ops.sim.report import SummaryStat
from baton_ops.sim.trace import TraceRequest, arrival_times

PROBE_SECS = 5.0


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """Request to send. `at`: seconds from the start."""

    at: float
    request: TraceRequest
    continues: int | None
    """Index of the request whose answer this one's client had to read first."""


def timed_requests(trace: Sequence[TraceRequest], factor: float) -> list[TimedRequest]:
    """Arrivals `factor` times as far apart as recorded."""
    timed = zip(arrival_times(trace), trace, find_parents(trace), strict=True)
    return [TimedRequest(arrival * factor, request, parent) for arrival, request, parent in timed]


def find_parents(trace: Sequence[TraceRequest]) -> list[int | None]:
    """The request that each one continues: the first one to end with the deepest full block that
    both have.

    A block from which its first request continued does not count: it is a beginning that strangers
    share.
    """
    ended: dict[int, int] = {}  # last full block of the request that brought it → that request
    known_blocks: set[int] = set()
    parent_of: list[int | None] = []
    for index, request in enumerate(trace):
        full = request.blocks[: request.input_length // BLOCK_TOKENS]
        shared = next((n for n, block in enumerate(full) if block not in known_blocks), len(full))
        parent_of.append(ended.get(full[shared - 1]) if shared else None)
        if shared < len(full):
            ended[full[-1]] = index
        known_blocks.update(full)
    return parent_of


def prompt_text(request: TraceRequest, scale: int) -> str:
    """A word per token; one of them stands for `scale` real tokens."""
    text = "".join(make_words(f"block {block}", BLOCK_TOKENS // scale) for block in request.blocks)
    return text[: CHARS * scale_tokens(request.input_length, scale)]


@dataclass(frozen=True, slots=True)
class ReplayRound:
    """Outcome of a replay: the timings of all answers, and why the other requests failed."""

    seconds: float
    timings: tuple[RequestTiming, ...]
    failures: tuple[str, ...]
    late_secs: float
    """How much after its time the latest request left, because this process was busy."""

    @property
    def hit_rate(self) -> float:
        """Prompt tokens found in a cache, as the answers say."""
        return sum(t.cached_tokens for t in self.timings) / max(
            sum(t.prompt_tokens for t in self.timings), 1
        )


async def replay_trace(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    work: list[TimedRequest],
    *,
    scale: int,
    chat: bool,
    hold_turns: bool,
) -> ReplayRound:
    """Send everything; returns when the last answer has ended.

    A failed request is counted and raises nothing.
    """
    tasks: list[asyncio.Task[None]] = []
    timings: list[RequestTiming] = []
    failures: list[str] = []
    late = 0.0
    began = time.perf_counter()

    async def send_one(ask: TimedRequest) -> None:
        try:
            if hold_turns and ask.continues is not None:
                await asyncio.wait([tasks[ask.continues]])
            prompt = prompt_text(ask.request, scale)
            answer = scale_tokens(ask.request.output_length, scale)
            timings.append(await send_request(session, url, model, prompt, answer, chat=chat))
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as err:
            failures.append(f"{type(err).__name__}: {err}")

    try:
        for ask in work:
            wait = began + ask.at - time.perf_counter()
            late = max(late, -wait)
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(send_one(ask)))
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return ReplayRound(time.perf_counter() - began, tuple(timings), tuple(failures), late)


async def worker_urls(session: aiohttp.ClientSession, url: str) -> list[str]:
    """The workers that a router at `url` names; empty when it names none."""
    try:
        body = json.loads(await _read_page(session, f"{url}/workers", known_control_key(url)))
    except ValueError:
        return []
    workers = body.get("workers", []) if isinstance(body, dict) else []
    return [
        w["url"].partition("@")[0]
        for w in workers
        if isinstance(w, dict) and isinstance(w.get("url"), str)
    ]


async def worker_counts(session: aiohttp.ClientSession, urls: Sequence[str]) -> dict[str, int]:
    """Requests that each worker has answered, by its own count.

    Those without baton's metrics are left out.
    """
    pages = {url: await _read_page(session, f"{url}/metrics") for url in dict.fromkeys(urls)}
    return {
        url: int(sum_samples(parse_metrics(page), "baton_http_requests_total", code="ok"))
        for url, page in pages.items()
        if "baton_http_requests" in page
    }


async def _read_page(session: aiohttp.ClientSession, url: str, key: str | None = None) -> str:
    """Body of the page, empty when nothing answers."""
    headers = None if key is None else {"authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(total=PROBE_SECS)
    with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
        async with session.get(url, timeout=timeout, headers=headers) as response:
            return await response.text(errors="replace")
    return ""


HEAD = f"{'':<10}{'mean':>10}{'p50':>10}{'p95':>10}{'p99':>10}{'max':>10}"


def format_report(outcome: ReplayRound, split: dict[str, int]) -> str:
    """For people. Times in milliseconds."""
    total = len(outcome.timings) + len(outcome.failures)
    lines = [
        f"{counted(total, 'request')} in {outcome.seconds:.1f} s, {len(outcome.failures)} failed"
    ]
    if outcome.failures:
        lines.append(f"first failure: {outcome.failures[0]}")
    if outcome.late_secs > 0.1:
        lines.append(
            f"this client was up to {outcome.late_secs:.1f} s late: it is the bottleneck; send "
            "slower"
        )
    if outcome.timings:
        lines += ["", HEAD]
        for name, values in summary_rows(outcome).items():
            lines.append(f"{name:<10}" + "".join(f"{value:>10.1f}" for value in values.values()))
        prompt_tokens = sum(t.prompt_tokens for t in outcome.timings)
        lines += ["", f"prompt tokens {prompt_tokens}, of them cached {outcome.hit_rate:.3f}"]
    if split:
        mean = sum(split.values()) / len(split)
        lines.append(
            "requests per worker, the most over the mean "
            f"{max(split.values()) / max(mean, 1e-9):.2f}:"
        )
        lines += [f"  {url}  {count}" for url, count in split.items()]
    return "\n".join(lines)


def summary_rows(outcome: ReplayRound) -> dict[str, dict[str, float]]:
    """Distribution of each time [ms]."""
    times = {
        "TTFT ms": [t.ttft * 1e3 for t in outcome.timings],
        "TPOT ms": [t.tpot * 1e3 for t in outcome.timings if t.tokens > 1],
        "E2E ms": [t.e2e * 1e3 for t in outcome.timings],
    }
    stats = {name: SummaryStat.of(values) for name, values in times.items()}
    return {name: asdict(stat) for name, stat in stats.items() if stat is not None}


def as_json(outcome: ReplayRound, split: dict[str, int]) -> dict[str, Any]:
    return {
        "seconds": outcome.seconds,
        "answered": len(outcome.timings),
        "failures": list(outcome.failures),
        "late_secs": outcome.late_secs,
        "hit_rate": outcome.hit_rate,
        "times": summary_rows(outcome),
        "requests_per_worker": split,
    }
