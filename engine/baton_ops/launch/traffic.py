"""Traffic of a running cluster in one line, for the terminal of `baton up`.

1. `TrafficMonitor.run` reads the router's feed (requests, tokens per second, KV in use) and, with
   each snapshot, the histogram of first tokens in its /metrics;
2. `line` is the newest state; a router that is away, or wants another key, leaves out what is
   unknown.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from baton_ops.clients.metrics import parse_metrics, select_samples

RECENT_SECS = 60
"""Percentiles are of requests whose first token came within this."""
PAUSE_SECS = 1.0
ANSWER_SECS = 5.0
"""A feed has a snapshot each second."""

BucketCounts = dict[float, float]
"""Upper bound of each bucket of a histogram [s] → observations up to it."""


def read_buckets(metrics: str) -> BucketCounts:
    """First tokens of all routes."""
    counts: BucketCounts = {}
    for sample in select_samples(parse_metrics(metrics), "baton_router_ttft_seconds_bucket"):
        bound_secs = float(sample.labels["le"])
        counts[bound_secs] = counts.get(bound_secs, 0.0) + sample.value
    return counts


def percentile_ms(counts: BucketCounts, share: float) -> float | None:
    """Linear within the bucket, as Prometheus' histogram_quantile; None without observations."""
    bounds = sorted(counts)
    if not bounds or counts[bounds[-1]] <= 0:
        return None
    rank = share * counts[bounds[-1]]
    lower_secs = 0.0
    below = 0.0
    for bound in bounds:
        if counts[bound] >= rank:
            break
        lower_secs = bound
        below = counts[bound]
    if math.isinf(bound):
        return lower_secs * 1e3
    within = counts[bound] - below
    part = (rank - below) / within if within else 1.0
    return (lower_secs + (bound - lower_secs) * part) * 1e3


@dataclass(frozen=True, slots=True)
class TrafficSnapshot:
    """State of the cluster. None: unknown."""

    running: int
    queued: int
    tokens_per_s: float | None = None
    kv_usage: tuple[tuple[str, float], ...] = ()
    """Role and share of its KV pages in use."""
    out_of_service: tuple[str, ...] = ()
    """Nodes that are not ready, with their states."""


def read_snapshot(event: dict[str, Any]) -> TrafficSnapshot:
    """State that an event of the router's feed has."""
    nodes = event.get("nodes", [])
    serving = [node for node in nodes if node["role"] != "prefill"]
    rates = [
        rank["decode_tokens_per_s"]
        for node in serving
        for rank in node["ranks"]
        if rank.get("decode_tokens_per_s") is not None
    ]
    usage = []
    for role in dict.fromkeys(node["role"] for node in nodes):
        ranks = [rank for node in nodes if node["role"] == role for rank in node["ranks"]]
        reports = [rank["report"] for rank in ranks if rank.get("report")]
        pages = sum(report.get("kv_pages") or 0 for report in reports)
        used = sum(report.get("kv_pages_used") or 0 for report in reports)
        if pages:
            usage.append((role, used / pages))
    out_of_service = [
        f"{node['role']} {node['url'].removeprefix('http://')} {node['state']}"
        for node in nodes
        if node["state"] != "ready"
    ]
    return TrafficSnapshot(
        running=sum(node["load"] for node in serving),
        queued=event.get("queued_requests", 0),
        tokens_per_s=sum(rates) if rates else None,
        kv_usage=tuple(usage),
        out_of_service=tuple(out_of_service),
    )


def status_line(snapshot: TrafficSnapshot, first_tokens: BucketCounts) -> str:
    """Requests, rate, first tokens and KV.

    The most important come first, because a narrow terminal cuts the end.
    """
    parts = [f"{snapshot.running} running, {snapshot.queued} queued", *snapshot.out_of_service]
    if snapshot.tokens_per_s is not None:
        parts.append(f"{snapshot.tokens_per_s:.0f} tokens/s")
    median, high = (percentile_ms(first_tokens, share) for share in (0.5, 0.95))
    if median is not None and high is not None:
        parts.append(f"TTFT p50 {median:.0f} ms, p95 {high:.0f} ms")
    if snapshot.kv_usage:
        usage = ", ".join(f"{role} {share:.0%}" for role, share in snapshot.kv_usage)
        parts.append(f"KV {usage}")
    return "  |  ".join(parts)


class TrafficMonitor:
    """Newest state of the cluster whose router is at `url`, as one line; empty before the first."""

    def __init__(
        self, url: str, api_key: str | None, incarnation: Callable[[], str | None]
    ) -> None:
        """`incarnation`: that of the router; the state that another process sends is not shown."""
        self.line = ""
        self._incarnation = incarnation
        self._url = url
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._history: deque[BucketCounts] = deque(maxlen=RECENT_SECS)
        """Buckets at each snapshot, the newest last."""

    async def run(self) -> None:
        """Keep `line` current until cancelled; a router that is away is asked again."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_SECS, sock_read=ANSWER_SECS)
        async with aiohttp.ClientSession(timeout=timeout, headers=self._headers) as session:
            while True:
                try:
                    await self._read_feed(session)
                except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, KeyError) as err:
                    self.line = f"no state from the router: {err or type(err).__name__}"
                await asyncio.sleep(PAUSE_SECS)

    async def _read_feed(self, session: aiohttp.ClientSession) -> None:
        async with session.get(f"{self._url}/ui/feed", raise_for_status=True) as feed:
            async for line in feed.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if event.get("incarnation") != self._incarnation():
                    raise ValueError(f"another process answers at {self._url}")
                snapshot = read_snapshot(event)
                await self._read_first_tokens(session)
                self.line = status_line(snapshot, self._recent_first_tokens())

    async def _read_first_tokens(self, session: aiohttp.ClientSession) -> None:
        async with session.get(f"{self._url}/metrics", raise_for_status=True) as answer:
            self._history.append(read_buckets(await answer.text()))

    def _recent_first_tokens(self) -> BucketCounts:
        """Differences over the history; a restarted router begins at 0."""
        oldest = self._history[0]
        newest = self._history[-1]
        if any(newest.get(bound, 0.0) < count for bound, count in oldest.items()):
            self._history.clear()
            self._history.append(newest)
            return {}
        return {bound: count - oldest.get(bound, 0.0) for bound, count in newest.items()}
