"""`baton top`: nodes, pairs and slow requests of a fleet in the terminal, once a second.

The numbers are those of the router's `GET /ui/feed`, one snapshot for all that listen. A router that does not serve it
is asked for `/workers` and `/engine_metrics` instead, which know no pairs and no requests.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TextIO, TypeVar

from baton.cli.doctor.client import HttpClient, MetricSample, StreamEnded, parse_metrics, total
from baton.cli.doctor.main import (
    API_KEY_ENV,
    CONTROL_KEY_ENV,
    DEFAULT_ROUTER,
    make_client,
    wrong_urls,
)
from baton.config.flags import FlagParser, add_flags, markdown, opt, refuse

PROG = "baton top"
PERIOD_SECS = 1.0
SLOWEST = 8
NO_FEED = (404, 405, 503)
"""Statuses of a router that serves no feed, or has no place for one more listener."""
CLEAR, HIDE_CURSOR, SHOW_CURSOR, BOLD, PLAIN = (
    "\x1b[H\x1b[J",
    "\x1b[?25l",
    "\x1b[?25h",
    "\x1b[1m",
    "\x1b[0m",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopConfig:
    """Flags of the command."""

    router: str = opt(DEFAULT_ROUTER, "router to watch")
    once: bool = opt(False, "show one snapshot and end; exit code 2 if the router does not answer")
    json: bool = opt(False, "print one JSON object per snapshot instead of a table")
    key: str | None = opt(
        None, "key of the router's control plane (default: --api-key)", env=CONTROL_KEY_ENV
    )
    api_key: str | None = opt(None, "key of the router", env=API_KEY_ENV)
    ca_cert: str | None = opt(
        None, "PEM file of an authority to trust besides the system's, for https addresses"
    )


@dataclass(frozen=True, slots=True)
class NodeRow:
    """None: not reported."""

    url: str
    role: str
    state: str
    reason: str | None
    load: int
    queued_tokens: int | None
    kv_usage: float | None
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class PairRow:
    """Traffic of a pair since the router started; `bytes_per_s` while pages were pulled."""

    prefill: str
    decode: str
    requests: int
    transport: str | None
    bytes_per_s: float | None
    failures: int
    last_failure: str | None


@dataclass(frozen=True, slots=True)
class RequestRow:
    id: str
    ms: float
    route: str
    outcome: str
    worker: str
    attempts: int


Row = TypeVar("Row", PairRow, RequestRow)


@dataclass(frozen=True, slots=True)
class TopSnapshot:
    source: str
    """feed or poll."""
    queued_requests: int
    nodes: list[NodeRow] = field(default_factory=list)
    pairs: list[PairRow] = field(default_factory=list)
    slowest: list[RequestRow] = field(default_factory=list)
    """Slowest of the youngest requests, those that run included."""


def parse(argv: Sequence[str]) -> TopConfig:
    """Flags; prints mistakes and exits with 2."""
    parser = FlagParser(
        PROG,
        "Show nodes, pairs and slow requests of a running fleet, once a second; Ctrl-C ends it.",
    )
    add_flags(parser, TopConfig)
    config, _, bad = parser.read_config(TopConfig, argv)
    bad += wrong_urls([config.router])
    if bad:
        refuse(PROG, bad)
    return config


# ---- sources ---------------------------------------------------------------------------------------------------


class SourceFailed(Exception):
    """A router that does not answer, and why."""


def snapshots(router: str, key: str | None, client: HttpClient) -> Iterator[TopSnapshot]:
    """Snapshots without end, one a second. Raises SourceFailed when the router is away."""
    try:
        for line in client.lines(f"{router}/ui/feed", key):
            if line.startswith("data: {"):
                yield read_feed(json.loads(line.removeprefix("data: ")))
    except StreamEnded as err:
        if err.status not in NO_FEED:
            raise SourceFailed(f"{router} sends no state of the fleet: {err}") from err
    while True:
        listed = client.get(f"{router}/workers", key)
        if not listed.is_ok:
            raise SourceFailed(f"{router} does not list its workers: {listed.problem}")
        metrics = client.get(f"{router}/engine_metrics", key)
        own = client.get(f"{router}/metrics")
        samples = parse_metrics(metrics.text if metrics.is_ok else "")
        yield read_poll(
            listed.object.get("workers", []), samples, parse_metrics(own.text if own.is_ok else "")
        )
        time.sleep(PERIOD_SECS)


def read_feed(event: dict[str, Any]) -> TopSnapshot:
    """A snapshot of the router's feed."""
    nodes = event.get("nodes", [])
    urls = {node["id"]: node["url"] for node in nodes}
    pairs = [
        _row(
            PairRow,
            pair,
            prefill=urls.get(pair["prefill"], "?"),
            decode=urls.get(pair["decode"], "?"),
        )
        for pair in event.get("pairs", [])
    ]
    youngest = [
        _row(
            RequestRow,
            request,
            outcome=request["outcome"] or "running",
            worker=request["worker"] or "-",
        )
        for request in event.get("requests", [])
    ]
    slowest = sorted(youngest, key=lambda request: -request.ms)[:SLOWEST]
    return TopSnapshot(
        "feed",
        event.get("queued_requests", 0),
        [_node_of_feed(node) for node in nodes],
        pairs,
        slowest,
    )


def _row(kind: type[Row], found: dict[str, Any], **own: Any) -> Row:
    """A row of the values that the feed has under the names of its fields, but for `own`."""
    return kind(**{f.name: found[f.name] for f in fields(kind)} | own)


def _node_of_feed(node: dict[str, Any]) -> NodeRow:
    reports = [rank["report"] for rank in node["ranks"] if rank.get("report")]
    pages, used = _sum(reports, "kv_pages"), _sum(reports, "kv_pages_used")
    return NodeRow(
        node["url"], node["role"], node["state"], node["reason"], node["load"], _sum(reports, "queued_tokens"),
        used / pages if pages and used is not None else None,
        _sum(node["ranks"], "prefill_tokens_per_s"), _sum(node["ranks"], "decode_tokens_per_s"),
    )  # fmt: skip


def _sum(entries: Sequence[dict[str, Any]], name: str) -> Any:
    """Sum over the entries that have it; None when none has."""
    values = [entry[name] for entry in entries if entry.get(name) is not None]
    return sum(values) if values else None


def read_poll(
    workers: Sequence[dict[str, Any]],
    engines: Sequence[MetricSample],
    router: Sequence[MetricSample],
) -> TopSnapshot:
    """The same from /workers, the metrics of all workers with the label `worker`, and those of the router."""
    nodes = [_node_of_poll(worker, engines) for worker in workers]
    return TopSnapshot("poll", int(total(router, "baton_router_queued_requests")), nodes)


def _node_of_poll(worker: dict[str, Any], engines: Sequence[MetricSample]) -> NodeRow:
    url = str(worker["url"]).rstrip("/")
    own = [sample for sample in engines if sample.labels.get("worker", "").rstrip("/") == url]
    pages = total(own, "baton_kv_pages")
    free = total(own, "baton_kv_pages", state="free") + total(own, "baton_kv_pages", state="cached")
    rates = _values(own, "baton_generated_tokens_per_second") or _values(
        own, "baton_generated_tokens_per_s"
    )
    return NodeRow(
        url, str(worker.get("worker_type")), str(worker.get("state")), worker.get("reason"), int(worker.get("load", 0)),
        None, 1 - free / pages if pages else None, None, sum(rates) if rates else None,
    )  # fmt: skip


def _values(samples: Sequence[MetricSample], name: str) -> list[float]:
    return [sample.value for sample in samples if sample.name == name]


# ---- the table -------------------------------------------------------------------------------------------------


def number(value: float | None, unit: str = "") -> str:
    """Four characters at most, and the unit; a dash for unknown values."""
    if value is None:
        return "-"
    for suffix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}{unit}"
    return f"{value:.3g}{unit}"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Columns as wide as their widest cell; the first one aligned to the left."""
    texts = [head, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = []
    for first, *others in texts:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join((first.ljust(widths[0]), *cells)))
    return lines


def render(router: str, snapshot: TopSnapshot, *, is_colored: bool, columns: int) -> str:
    """The whole screen, without line longer than `columns`."""
    ready = sum(node.state == "ready" for node in snapshot.nodes)
    summary = f"{router}  {ready} of {len(snapshot.nodes)} nodes ready, {snapshot.queued_requests} requests queued"
    nodes = [
        [
            f"{node.role} {node.url}", node.state, node.load, number(node.queued_tokens),
            "-" if node.kv_usage is None else f"{node.kv_usage:.0%}", number(node.prefill_tokens_per_s),
            number(node.decode_tokens_per_s),
        ]
        for node in sorted(snapshot.nodes, key=lambda node: (node.role, node.url))
    ]  # fmt: skip
    lines = [
        summary,
        "",
        *table(
            ("NODE", "STATE", "LOAD", "QUEUED TOK", "KV", "PREFILL TOK/S", "DECODE TOK/S"), nodes
        ),
    ]
    lines += [f"  {node.url}: {node.reason}" for node in snapshot.nodes if node.reason]
    if snapshot.pairs:
        pairs = [
            [
                f"{p.prefill} -> {p.decode}",
                p.transport or "-",
                p.requests,
                number(p.bytes_per_s, "B/s"),
                p.failures,
            ]
            for p in snapshot.pairs
        ]
        lines += ["", *table(("PAIR", "TRANSPORT", "REQUESTS", "SPEED", "FAILURES"), pairs)]
    if snapshot.slowest:
        rows = [[r.id, f"{r.ms:.0f}", r.outcome, r.attempts, r.worker] for r in snapshot.slowest]
        lines += [
            "",
            *table(
                ("SLOWEST OF THE YOUNGEST REQUESTS", "MS", "OUTCOME", "ATTEMPTS", "WORKER"), rows
            ),
        ]
    if snapshot.source == "poll":
        lines += ["", "pairs and requests are unknown: this router serves no /ui/feed"]
    cut = [line[:columns] for line in lines]
    heads = ("NODE", "PAIR", "SLOWEST")
    return "\n".join(
        f"{BOLD}{line}{PLAIN}" if is_colored and line.startswith(heads) else line for line in cut
    )


def as_json(router: str, snapshot: TopSnapshot) -> str:
    return json.dumps({"router": router, **asdict(snapshot)})


def main(argv: Sequence[str]) -> int:
    config = parse(argv)
    client = make_client(PROG, config.ca_cert)
    try:
        return watch(config, client, sys.stdout)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # `baton top | head`: nothing reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def watch(config: TopConfig, client: HttpClient, out: TextIO) -> int:
    """Show snapshots until Ctrl-C; a router that is away is asked again each second."""
    router, key = config.router.rstrip("/"), config.key or config.api_key
    is_screen = out.isatty() and not config.json and not config.once
    columns = shutil.get_terminal_size().columns if out.isatty() else 1000
    is_colored = is_screen and "NO_COLOR" not in os.environ
    try:
        if is_screen:
            out.write(HIDE_CURSOR)
        was_seen = False
        while True:
            try:
                for snapshot in snapshots(router, key, client):
                    was_seen = True
                    text = render(router, snapshot, is_colored=is_colored, columns=columns)
                    out.write(
                        CLEAR * is_screen
                        + (as_json(router, snapshot) if config.json else text)
                        + "\n"
                    )
                    out.flush()
                    if config.once:
                        return 0
                    if not is_screen and not config.json:
                        out.write("\n")
            except SourceFailed as err:
                if not was_seen:
                    print(f"{PROG}: {err}; give --router and --key", file=sys.stderr)
                    return 2
                out.write(f"{err}\n")
                out.flush()
            time.sleep(PERIOD_SECS)
    finally:
        if is_screen:
            out.write(SHOW_CURSOR)
            out.flush()


if __name__ == "__main__":
    print(markdown(TopConfig))
