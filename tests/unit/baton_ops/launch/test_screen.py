"""Terminal of `baton up`: live lines below lines that stay, and the line about traffic."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from aiohttp import web

from baton_ops.launch import traffic
from baton_ops.launch.screen import StatusScreen, is_live
from baton_ops.launch.traffic import TrafficMonitor, percentile_ms, read_buckets, read_snapshot

P, D = "http://p:30000", "http://d:30000"
REPORT = {"kv_pages": 200, "kv_pages_used": 50}
EVENT: dict[str, Any] = {
    "queued_requests": 3,
    "nodes": [
        {"role": "prefill", "url": P, "state": "ready", "load": 4,
         "ranks": [{"report": REPORT, "decode_tokens_per_s": 9.0}]},
        {"role": "decode", "url": D, "state": "unhealthy", "load": 6,
         "ranks": [{"report": {"kv_pages": 100, "kv_pages_used": 80}, "decode_tokens_per_s": 300.0},
                   {"decode_tokens_per_s": None}]},
    ],
}  # fmt: skip
METRICS = """
baton_router_ttft_seconds_bucket{route="/v1/completions",le="0.1"} 5
baton_router_ttft_seconds_bucket{route="/v1/completions",le="0.2"} 9
baton_router_ttft_seconds_bucket{route="/v1/completions",le="+Inf"} 10
baton_router_ttft_seconds_bucket{route="/generate",le="0.1"} 5
baton_router_ttft_seconds_bucket{route="/generate",le="0.2"} 9
baton_router_ttft_seconds_bucket{route="/generate",le="+Inf"} 10
"""


class Terminal(io.StringIO):
    """Screen that understands what StatusScreen sends; `lines` is what a person sees."""

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        rows = [""]
        row = 0
        text = self.getvalue()
        at = 0
        while at < len(text):
            if text.startswith("\x1b[J", at):
                rows[row:] = [""]
                at += 3
            elif text.startswith("\x1b[", at):
                end = text.index("A", at)
                row -= int(text[at + 2 : end])
                at = end + 1
            elif text[at] == "\r":
                rows[row] = rows[row]  # the next sequence erases from here
                at += 1
            elif text[at] == "\n":
                rows.append("")
                row += 1
                at += 1
            else:
                rows[row] += text[at]
                at += 1
        return rows


def test_live_lines_stay_below_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()
    screen = StatusScreen(terminal, is_live=True)
    screen.print_text("starting")
    screen.show_lines(["prefill loads", "decode loads"])
    screen.print_text("prefill is ready")
    assert terminal.lines == ["starting", "prefill is ready", "prefill loads", "decode loads"]
    screen.show_lines(["a line that is longer than the terminal"])
    assert terminal.lines == ["starting", "prefill is ready", "a line that is long"]
    screen.clear()
    screen.print_text("stopped")
    assert terminal.lines == ["starting", "prefill is ready", "stopped", ""]


def test_lines_that_a_narrower_terminal_has_broken_are_erased(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    terminal = Terminal()
    screen = StatusScreen(terminal, is_live=True)
    screen.show_lines(["first", "x" * 50])
    monkeypatch.setenv("COLUMNS", "20")
    screen.clear()
    assert terminal.getvalue().endswith("\x1b[3A\r\x1b[J"), (
        "1 row and 3 rows, the cursor in the last"
    )


def test_plain_output_has_no_live_lines_and_no_escapes() -> None:
    out = io.StringIO()
    screen = StatusScreen(out, is_live=False)
    screen.show_lines(["never"])
    screen.print_text("ready")
    screen.clear()
    assert out.getvalue() == "ready\n"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "dumb"}, False),
        ({}, False),
        ({"TERM": "xterm", "CI": "true"}, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
    ],
)
def test_environment_decides_about_live_lines(environment: dict[str, str], expected: bool) -> None:
    assert is_live(Terminal(), environment) is expected
    assert not is_live(io.StringIO(), environment)


def test_status_line_has_requests_rate_first_tokens_and_kv() -> None:
    line = traffic.status_line(read_snapshot(EVENT), read_buckets(METRICS))
    assert line == (
        "6 running, 3 queued  |  decode d:30000 unhealthy  |  300 tokens/s  |  "
        "TTFT p50 100 ms, p95 200 ms  |  KV prefill 25%, decode 80%"
    )


def test_unknown_values_are_left_out() -> None:
    idle = {"nodes": [{"role": "regular", "url": P, "state": "ready", "load": 0, "ranks": []}]}
    assert traffic.status_line(read_snapshot(idle), {}) == "0 running, 0 queued"


@pytest.mark.parametrize(
    ("share", "expected"), [(0.5, 100.0), (0.25, 50.0), (0.7, 150.0), (0.99, 200.0)]
)
def test_percentiles_of_buckets_are_those_of_histogram_quantile(
    share: float, expected: float
) -> None:
    """Prometheus' rules: linear within a bucket, the last finite bound for the open one."""
    found = percentile_ms(read_buckets(METRICS), share)
    assert found == pytest.approx(expected)
    assert percentile_ms({}, share) is None
    assert percentile_ms({0.1: 0.0}, share) is None


def test_monitor_reads_feed_and_metrics_of_its_router_with_the_key() -> None:
    keys: list[str] = []

    async def feed(request: web.Request) -> web.StreamResponse:
        keys.append(request.headers["authorization"])
        answer = web.StreamResponse()
        await answer.prepare(request)
        event = b'data: {"incarnation": "own", "queued_requests": 1, "nodes": []}\n\n'
        await answer.write(b": keep-alive\n\n" + event + event)
        return answer

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    async def work() -> None:
        app = web.Application()
        app.add_routes([web.get("/ui/feed", feed), web.get("/metrics", metrics)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        foreign = TrafficMonitor(url, "secret", lambda: "another")
        monitor = TrafficMonitor(url, "secret", lambda: "own")
        for each in (foreign, monitor):
            running = asyncio.ensure_future(each.run())
            while not each.line:
                await asyncio.sleep(0)
            running.cancel()
        await runner.cleanup()
        assert foreign.line == f"no state from the router: another process answers at {url}"
        assert monitor.line == "0 running, 1 queued", "no first token since it began to look"
        assert keys == ["Bearer secret"] * 2

    asyncio.run(asyncio.wait_for(work(), 30))
