"""`baton top`: nodes, pairs and slow requests of a fleet in the terminal, once a second.

The numbers are those of the router's `GET /ui/feed`, one snapshot for all that listen. A router
that does not serve it is asked for `/workers` and `/engine_metrics` instead, which know no pairs
and no requests.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TextIO, TypeVar

from baton.config.flags import FlagParser, add_flags, exit_with_mistakes, flags_table, opt
from baton.errors import counted
from baton_ops.clients.flags import (
    API_KEY_ENV,
    CONTROL_KEY_ENV,
    DEFAULT_ROUTER,
    make_client,
    wrong_urls,
)
from baton_ops.clients.http_client import (
    HttpClient,
    StreamEnded,
    connection_remedy,
)
from baton_ops.clients.local_keys import known_control_key
from baton_ops.clients.metrics import MetricSample, parse_metrics, select_samples, sum_samples

PROG = "baton top"
PERIOD_SECS = 1.0
SLOWEST = 8
NO_FEED = (404, 405, 503)
"""Statuses of a router that serves no feed, or has no place for one more listener."""
CLEAR = "\x1b[H\x1b[J"
HIDE_CURSOR = "\x1b[?25l"
SHOW_CURSOR = "\x1b[?25h"
BOLD = "\x1b[1m"
YELLOW = "\x1b[33m"
RED = "\x1b[31m"
PLAIN = "\x1b[0m"
UNKNOWN = "-"
STATE_COLORS = {"ready": "", "draining": YELLOW, "starting": YELLOW}
"""Other states are red."""


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
    kv_further_usage: float | None
    """Share of the KV pages that windows, chunks and states take."""
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    drafts_accepted: float | None
    """Share of the drafted tokens that were drawn, mean of the ranks that drafted."""


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
    incarnation: str | None = None
    """Incarnation of the router; None: an older router, or one that serves no feed."""


def make_parser() -> FlagParser:
    parser = FlagParser(
        PROG,
        "Show nodes, pairs and slow requests of a running fleet, once a second; Ctrl-C ends it.",
    )
    parser.usage = f"{PROG} [ROUTER] [flags]"
    text = f"URL of the router, the same as --router (default: {DEFAULT_ROUTER})"
    parser.add_argument("url", nargs="?", metavar="ROUTER", help=text)
    add_flags(parser, TopConfig)
    return parser


def parse_flags(argv: Sequence[str]) -> TopConfig:
    """Flags; prints mistakes and exits with 2."""
    config, others, bad = make_parser().read_config(TopConfig, argv)
    url: str | None = others["url"]
    if url is None:
        bad += wrong_urls([config.router], "--router ")
    else:
        bad += wrong_urls([url], "")
    if url is not None and config.router != DEFAULT_ROUTER:
        bad.append(f"{url} and --router {config.router}: give one router")
    if bad:
        exit_with_mistakes(PROG, bad)
    return config if url is None else replace(config, router=url)


# ---- sources -------------------------------------------------------------------------------------


class SourceFailed(Exception):
    """A router that does not answer, and why."""

    def __init__(self, message: str, problem: str) -> None:
        super().__init__(f"{message}: {problem}")
        self.problem = problem


NO_ROUTER = "this is no Baton router"


def poll_snapshots(router: str, key: str | None, client: HttpClient) -> Iterator[TopSnapshot]:
    """Snapshots without end, one a second. Raises SourceFailed when the router is away."""
    try:
        for line in client.lines(f"{router}/ui/feed", key):
            if line.startswith("data: {"):
                yield _read_event(router, line.removeprefix("data: "))
    except StreamEnded as err:
        if err.status not in NO_FEED:
            raise SourceFailed(f"{router} sends no state of the fleet", str(err)) from err
    while True:
        listed = client.get(f"{router}/workers", key)
        if not listed.is_ok:
            raise SourceFailed(f"{router} does not list its workers", listed.problem)
        workers = listed.object.get("workers")
        if not isinstance(workers, list):
            raise SourceFailed(f"{router} does not list its workers", NO_ROUTER)
        metrics = client.get(f"{router}/engine_metrics", key)
        router_metrics = client.get(f"{router}/metrics")
        samples = parse_metrics(metrics.text if metrics.is_ok else "")
        yield read_poll(
            workers,
            samples,
            parse_metrics(router_metrics.text if router_metrics.is_ok else ""),
        )
        time.sleep(PERIOD_SECS)


def _read_event(router: str, data: str) -> TopSnapshot:
    try:
        return read_feed(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise SourceFailed(f"{router} sends another feed than the fleet's", NO_ROUTER) from err


def read_feed(event: dict[str, Any]) -> TopSnapshot:
    """A snapshot of the router's feed."""
    nodes = event.get("nodes", [])
    urls = {node["id"]: node["url"] for node in nodes}
    pairs = [
        _make_row(
            PairRow,
            pair,
            prefill=urls.get(pair["prefill"], "?"),
            decode=urls.get(pair["decode"], "?"),
        )
        for pair in event.get("pairs", [])
    ]
    youngest = [
        _make_row(
            RequestRow,
            request,
            outcome=request["outcome"] or _describe_progress(request),
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
        event.get("incarnation"),
    )


def _describe_progress(request: dict[str, Any]) -> str:
    """State of a request without an outcome; routers of older versions do not report it."""
    state = str(request.get("state", "running"))
    role = request.get("waits_for")
    return f"{state} for {role}" if role else state


def _make_row(kind: type[Row], values: dict[str, Any], **overrides: Any) -> Row:
    """A row of the values that the feed has under the names of its fields, but for `own`."""
    return kind(**{f.name: values[f.name] for f in fields(kind)} | overrides)


def _node_of_feed(node: dict[str, Any]) -> NodeRow:
    reports = [rank["report"] for rank in node["ranks"] if rank.get("report")]
    pages = _sum_field(reports, "kv_pages")
    used = _sum_field(reports, "kv_pages_used")
    further = _sum_field(reports, "kv_further_pages")
    shares = (rank.get("drafts_accepted") for rank in node["ranks"])
    accepted = [share for share in shares if share is not None]
    return NodeRow(
        url=node["url"],
        role=node["role"],
        state=node["state"],
        reason=node["reason"],
        load=node["load"],
        queued_tokens=_sum_field(reports, "queued_tokens"),
        kv_usage=used / pages if pages and used is not None else None,
        kv_further_usage=further / pages if pages and further is not None else None,
        prefill_tokens_per_s=_sum_field(node["ranks"], "prefill_tokens_per_s"),
        decode_tokens_per_s=_sum_field(node["ranks"], "decode_tokens_per_s"),
        drafts_accepted=sum(accepted) / len(accepted) if accepted else None,
    )


def _sum_field(entries: Sequence[dict[str, Any]], name: str) -> Any:
    """Sum over the entries that have it; None when none has."""
    values = [entry[name] for entry in entries if entry.get(name) is not None]
    return sum(values) if values else None


def read_poll(
    workers: Sequence[dict[str, Any]],
    engines: Sequence[MetricSample],
    router: Sequence[MetricSample],
) -> TopSnapshot:
    """Snapshot from /workers, all workers' metrics with the label `worker`, and the router's."""
    nodes = [_node_of_poll(worker, engines) for worker in workers]
    return TopSnapshot("poll", int(sum_samples(router, "baton_router_queued_requests")), nodes)


def _node_of_poll(worker: dict[str, Any], engines: Sequence[MetricSample]) -> NodeRow:
    url = str(worker["url"]).rstrip("/")
    node_samples = [
        sample for sample in engines if sample.labels.get("worker", "").rstrip("/") == url
    ]
    pages = sum_samples(node_samples, "baton_kv_pages")
    free = sum_samples(node_samples, "baton_kv_pages", state="free")
    free += sum_samples(node_samples, "baton_kv_pages", state="cached")
    rates = select_samples(node_samples, "baton_generated_tokens_per_second")
    rate = sum(sample.value for sample in rates) if rates else None
    return NodeRow(
        url=url,
        role=str(worker.get("worker_type")),
        state=str(worker.get("state")),
        reason=worker.get("reason"),
        load=int(worker.get("load", 0)),
        queued_tokens=None,
        kv_usage=1 - free / pages if pages else None,
        kv_further_usage=None,
        prefill_tokens_per_s=None,
        decode_tokens_per_s=rate,
        drafts_accepted=None,
    )


# ---- the table -----------------------------------------------------------------------------------


def format_number(value: float | None, unit: str = "") -> str:
    """Four characters at most, and the unit; a dash for unknown values."""
    if value is None:
        return UNKNOWN
    for suffix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}{unit}"
    return f"{value:.3g}{unit}"


def format_share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0%}"


def short_address(url: str) -> str:
    """URL without http://, which is the rule."""
    return url.removeprefix("http://")


def format_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Columns as wide as their widest cell; the first one aligned to the left."""
    texts = [head, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = []
    for first, *others in texts:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join((first.ljust(widths[0]), *cells)))
    return lines


def render_screen(router: str, snapshot: TopSnapshot, *, is_colored: bool, columns: int) -> str:
    """The whole screen, without line longer than `columns`."""
    ready = sum(node.state == "ready" for node in snapshot.nodes)
    queued = counted(snapshot.queued_requests, "request")
    shown = sorted(snapshot.nodes, key=lambda node: (node.role, node.url))
    head, *rows = _node_table(shown)
    lines = [
        ScreenLine(f"{router}  {ready} of {len(shown)} nodes ready, {queued} queued"),
        ScreenLine(""),
        ScreenLine(head, BOLD),
    ]
    lines += [
        ScreenLine(row, STATE_COLORS.get(node.state, RED))
        for row, node in zip(rows, shown, strict=True)
    ]
    lines += [
        ScreenLine(f"  {short_address(node.url)}: {node.reason}") for node in shown if node.reason
    ]
    for columns_of, cells in (
        (PAIR_COLUMNS, [_pair_cells(pair) for pair in snapshot.pairs]),
        (REQUEST_COLUMNS, [_request_cells(request) for request in snapshot.slowest]),
    ):
        if cells:
            head, *rows = format_table(columns_of, cells)
            lines += [ScreenLine(""), ScreenLine(head, BOLD), *map(ScreenLine, rows)]
    if snapshot.source == "poll":
        unknown = "pairs and requests are unknown: this router serves no /ui/feed"
        lines += [ScreenLine(""), ScreenLine(unknown)]
    return "\n".join(line.shown(columns, is_colored=is_colored) for line in lines)


@dataclass(frozen=True, slots=True)
class ScreenLine:
    """Line of the screen. `style`: an escape sequence, or empty."""

    text: str
    style: str = ""

    def shown(self, columns: int, *, is_colored: bool) -> str:
        cut = self.text[:columns]
        return f"{self.style}{cut}{PLAIN}" if is_colored and self.style else cut


NODE_COLUMNS = (
    "NODE",
    "STATE",
    "LOAD",
    "QUEUED",
    "KV",
    "FURTHER",
    "PREFILL/S",
    "DECODE/S",
    "DRAFTS",
)
"""Behind LOAD: prompt tokens that wait, share of the KV pages in use, share that windows, chunks
and states take, tokens per second, share of drafted tokens that were drawn."""
OPTIONAL_COLUMNS = ("FURTHER", "DRAFTS")
"""Left out where no node has them: a terminal has few columns."""
PAIR_COLUMNS = ("PAIR", "TRANSPORT", "REQUESTS", "SPEED", "FAILURES")
REQUEST_COLUMNS = ("SLOWEST RECENT REQUESTS", "MS", "OUTCOME", "ATTEMPTS", "WORKER")


def _node_cells(node: NodeRow) -> list[object]:
    return [
        f"{node.role} {short_address(node.url)}",
        node.state,
        node.load,
        format_number(node.queued_tokens),
        format_share(node.kv_usage),
        format_share(node.kv_further_usage),
        format_number(node.prefill_tokens_per_s),
        format_number(node.decode_tokens_per_s),
        format_share(node.drafts_accepted),
    ]


def _node_table(nodes: Sequence[NodeRow]) -> list[str]:
    rows = [_node_cells(node) for node in nodes]
    shown = [
        place
        for place, name in enumerate(NODE_COLUMNS)
        if name not in OPTIONAL_COLUMNS or any(row[place] != UNKNOWN for row in rows)
    ]
    head = [NODE_COLUMNS[place] for place in shown]
    return format_table(head, [[row[place] for place in shown] for row in rows])


def _pair_cells(pair: PairRow) -> list[object]:
    return [
        f"{short_address(pair.prefill)} -> {short_address(pair.decode)}",
        pair.transport or "-",
        pair.requests,
        format_number(pair.bytes_per_s, "B/s"),
        pair.failures,
    ]


def _request_cells(request: RequestRow) -> list[object]:
    worker = short_address(request.worker)
    return [request.id, f"{request.ms:.0f}", request.outcome, request.attempts, worker]


def as_json(router: str, snapshot: TopSnapshot) -> str:
    return json.dumps({"router": router, **asdict(snapshot)})


def main(argv: Sequence[str]) -> int:
    config = parse_flags(argv)
    client = make_client(PROG, config.ca_cert)
    try:
        return watch_fleet(config, client, sys.stdout)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # `baton top | head`: nothing reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def watch_fleet(config: TopConfig, client: HttpClient, out: TextIO) -> int:
    """Show snapshots until Ctrl-C; a router that is away is asked again each second."""
    router = config.router.rstrip("/")
    key = config.key or config.api_key or known_control_key(router)
    is_screen = out.isatty() and not config.json and not config.once
    columns = shutil.get_terminal_size().columns if out.isatty() else 1000
    is_colored = is_screen and "NO_COLOR" not in os.environ
    try:
        if is_screen:
            out.write(HIDE_CURSOR)
        was_seen = False
        incarnation = None
        while True:
            try:
                for snapshot in poll_snapshots(router, key, client):
                    if was_seen and snapshot.incarnation != incarnation and not config.json:
                        out.write(f"another router process answers at {router} from here on\n")
                    was_seen = True
                    incarnation = snapshot.incarnation
                    text = render_screen(router, snapshot, is_colored=is_colored, columns=columns)
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
                    remedy = connection_remedy(router, err.problem)
                    advice = remedy or "give the router's URL, and --key if it wants one"
                    print(f"{PROG}: {err}; {advice}", file=sys.stderr)
                    return 2
                out.write(f"{err}\n")
                out.flush()
            time.sleep(PERIOD_SECS)
    finally:
        if is_screen:
            out.write(SHOW_CURSOR)
            out.flush()


if __name__ == "__main__":
    print(flags_table(TopConfig))
