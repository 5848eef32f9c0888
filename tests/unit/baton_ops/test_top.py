"""`baton top`: the router's feed and its older routes become one snapshot, shown as a table or as JSON."""

from __future__ import annotations

import copy
import io
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from baton_ops import top
from baton_ops.clients.http_client import HttpClient
from baton_ops.clients.metrics import parse_metrics
from baton_ops.top import TopConfig, TopSnapshot
from tests.support.processes.http_server import QuietHandler, serve_requests, url_of

P, D = "http://p:30000", "http://d:30000"
REPORT = {
    "age_ms": 10,
    "queued_tokens": 1500,
    "queued_requests": 2,
    "kv_pages": 200,
    "kv_pages_used": 50,
}
EVENT: dict[str, Any] = {
    "version": "1.0", "queued_requests": 3, "is_draining": False,
    "nodes": [
        {
            "id": "1", "url": P, "role": "prefill", "state": "ready", "reason": None, "load": 4,
            "ranks": [
                {"rank": 0, "load": 2, "report": REPORT, "prefill_tokens_per_s": 1000.0, "decode_tokens_per_s": 0.0},
                {"rank": 1, "load": 2, "report": REPORT, "prefill_tokens_per_s": 500.0, "decode_tokens_per_s": 0.0},
            ],
        },
        {"id": "2", "url": D, "role": "decode", "state": "unhealthy", "reason": "status 503", "load": 0,
         "ranks": [{"rank": None}]},
    ],
    "pairs": [
        {"prefill": "1", "decode": "2", "requests": 7, "transport": "shm", "bytes_per_s": 2.5e9,
         "failures": 1, "last_failure": "x"}
    ],
    "requests": [
        {"id": "quick", "ms": 5.0, "route": "/generate", "outcome": "ok", "worker": D, "attempts": 1},
        {"id": "slow", "ms": 900.0, "route": "/generate", "outcome": "timeout", "worker": None, "attempts": 2},
        {"id": "new", "ms": 100.0, "route": "/generate", "outcome": None, "worker": D, "attempts": 1},
    ],
}  # fmt: skip
WORKERS = [{"url": f"{D}/", "worker_type": "decode", "state": "ready", "reason": None, "load": 2}]
METRICS = f"""
baton_kv_pages{{state="free",worker="{D}"}} 20
baton_kv_pages{{state="cached",worker="{D}"}} 40
baton_kv_pages{{state="held",worker="{D}"}} 40
baton_generated_tokens_per_second{{worker="{D}"}} 12.5
baton_kv_pages{{state="held",worker="{P}"}} 9
"""


def test_feed_adds_up_ranks_and_sorts_requests() -> None:
    snapshot = top.read_feed(EVENT)
    prefill, decode = snapshot.nodes
    assert (prefill.queued_tokens, prefill.kv_usage, prefill.prefill_tokens_per_s) == (
        3000,
        0.25,
        1500.0,
    )
    assert (decode.queued_tokens, decode.kv_usage, decode.decode_tokens_per_s) == (None, None, None)
    assert (snapshot.pairs[0].prefill, snapshot.pairs[0].decode, snapshot.pairs[0].transport) == (
        P,
        D,
        "shm",
    )
    shown = [(request.id, request.worker, request.outcome) for request in snapshot.slowest]
    assert shown == [("slow", "-", "timeout"), ("new", D, "running"), ("quick", D, "ok")]
    assert snapshot.queued_requests == 3


def test_router_without_feed_is_read_from_its_other_routes() -> None:
    snapshot = top.read_poll(
        WORKERS, parse_metrics(METRICS), parse_metrics("baton_router_queued_requests 4\n")
    )
    node = snapshot.nodes[0]
    assert (node.url, node.load, node.kv_usage, node.decode_tokens_per_s) == (D, 2, 0.4, 12.5)
    assert (snapshot.queued_requests, snapshot.source) == (4, "poll")
    silent = top.read_poll(WORKERS, [], []).nodes[0]
    assert (silent.kv_usage, silent.decode_tokens_per_s) == (None, None)


def test_table_shows_all_and_fits_the_terminal() -> None:
    text = top.render_screen("http://r", top.read_feed(EVENT), is_colored=False, columns=1000)
    assert "1 of 2 nodes ready, 3 requests queued" in text
    assert "  d:30000: status 503" in text
    assert "2.5GB/s" in text
    row = next(line for line in text.splitlines() if line.startswith("prefill"))
    assert row.split() == ["prefill", "p:30000", "ready", "4", "3k", "25%", "1.5k", "0"]
    assert text.index("slow ") < text.index("quick ")
    narrow = top.render_screen("http://r", top.read_feed(EVENT), is_colored=False, columns=40)
    assert max(map(len, narrow.splitlines())) == 40
    colored = top.render_screen("http://r", top.read_feed(EVENT), is_colored=True, columns=100)
    assert "\x1b[1mNODE" in colored
    assert "\x1b[31mdecode d:30000" in colored, "unhealthy is red"
    assert "\nprefill p:30000" in colored, "ready has no color"
    assert "serves no /ui/feed" in top.render_screen(
        "http://r", TopSnapshot("poll", 0), is_colored=False, columns=100
    )


def test_columns_of_drafts_and_further_pages_appear_where_a_node_has_them() -> None:
    plain = top.render_screen("http://r", top.read_feed(EVENT), is_colored=False, columns=1000)
    assert "FURTHER" not in plain
    assert "DRAFTS" not in plain
    event = copy.deepcopy(EVENT)
    first, second = event["nodes"][0]["ranks"]
    first["report"]["kv_further_pages"] = 30
    first["drafts_accepted"] = 0.5
    second["drafts_accepted"] = 0.0
    text = top.render_screen("http://r", top.read_feed(event), is_colored=False, columns=1000)
    head, row = (
        next(line.split() for line in text.splitlines() if line.startswith(begin))
        for begin in ("NODE", "prefill")
    )
    # The role and the address of a node stand in one column.
    shown = dict(zip(head[1:], row[2:], strict=True))
    assert (shown["KV"], shown["FURTHER"], shown["DRAFTS"]) == ("25%", "15%", "25%")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (12.34, "12.3"), (999.0, "999"), (1500, "1.5k"), (2.5e9, "2.5G")],
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert top.format_number(value) == text


@contextmanager
def router(answers: dict[str, str | int]) -> Iterator[str]:
    """A server that answers GET of these paths with a text, or with an error status."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path, 404)
            if isinstance(found, int):
                self.answer(b"", found)
            else:
                self.answer(found.encode())

    with serve_requests(Handler) as server:
        yield url_of(server)


FEED = f": keep-alive\n\nevent: snapshot\ndata: {json.dumps(EVENT)}\n\n"


def test_one_snapshot_as_json_names_every_node() -> None:
    out = io.StringIO()
    with router({"/ui/feed": FEED}) as url:
        assert top.watch_fleet(TopConfig(router=url, once=True, json=True), HttpClient(), out) == 0
    shown = json.loads(out.getvalue())
    assert [node["url"] for node in shown["nodes"]] == [P, D]
    assert shown["source"] == "feed"


def test_router_without_feed_is_polled() -> None:
    answers: dict[str, str | int] = {
        "/workers": json.dumps({"workers": WORKERS}),
        "/engine_metrics": METRICS,
    }
    for refusal in (404, 503):
        out = io.StringIO()
        with router({**answers, "/ui/feed": refusal}) as url:
            assert top.watch_fleet(TopConfig(router=url, once=True), HttpClient(), out) == 0
        assert "decode d:30000" in out.getvalue()
        assert "40%" in out.getvalue()


@pytest.mark.parametrize(("status", "words"), [(401, "status 401"), (0, "connection refused")])
def test_router_that_refuses_or_is_away_ends_it_with_2(
    status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with router({"/ui/feed": status}) as url:
        asked = url if status else "http://127.0.0.1:1"
        assert top.watch_fleet(TopConfig(router=asked), HttpClient(), io.StringIO()) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "answers",
    [
        {"/ui/feed": "<html>hello</html>"},
        {"/ui/feed": 'data: {"nodes": [{"name": "x"}]}\n\n'},
        {"/ui/feed": 'data: {"nodes": 7}\n\n'},
        {"/ui/feed": 404, "/workers": '{"status": "ok"}'},
        {"/ui/feed": 404, "/workers": "hello"},
    ],
)
def test_server_of_another_program_is_no_fleet(
    answers: dict[str, str | int], capsys: pytest.CaptureFixture[str]
) -> None:
    with router(answers) as url:
        assert top.watch_fleet(TopConfig(router=url), HttpClient(), io.StringIO()) == 2
    assert f"baton top: {url} " in capsys.readouterr().err


def test_another_router_at_the_address_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = [
        [TopSnapshot("feed", 0, incarnation="a")],
        [TopSnapshot("feed", 0, incarnation="b")],
    ]

    def poll(*_: object) -> Iterator[TopSnapshot]:
        if not snapshots:
            raise KeyboardInterrupt
        yield from snapshots.pop(0)
        raise top.SourceFailed("the router", "the stream ended")

    monkeypatch.setattr(top, "poll_snapshots", poll)
    monkeypatch.setattr(top, "PERIOD_SECS", 0.0)
    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        top.watch_fleet(TopConfig(router="http://r"), HttpClient(), out)
    assert out.getvalue().count("another router process answers at http://r") == 1


class Screen(io.StringIO):
    """A terminal on which Ctrl-C is pressed after some snapshots."""

    def __init__(self, snapshots: int) -> None:
        super().__init__()
        self._left = snapshots

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt


def test_screen_is_drawn_again_and_the_cursor_comes_back_after_ctrl_c(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(top, "PERIOD_SECS", 0.0)
    screen = Screen(3)
    with router({"/ui/feed": FEED}) as url, pytest.raises(KeyboardInterrupt):
        top.watch_fleet(TopConfig(router=url), HttpClient(), screen)
    text = screen.getvalue()
    assert text.startswith(top.HIDE_CURSOR)
    assert text.count(top.CLEAR) >= 2, "the stream broke off after one snapshot and began again"
    assert "the stream ended" in text
    assert text.endswith(top.SHOW_CURSOR)


def test_ctrl_c_is_a_clean_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(top, "watch_fleet", interrupted)
    assert top.main([]) == 0


def test_router_can_be_given_without_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert top.parse_flags(["http://a:1"]).router == "http://a:1"
    with pytest.raises(SystemExit):
        top.parse_flags(["http://a:1", "--router", "http://b:1"])
    assert "http://a:1 and --router http://b:1: give one router" in capsys.readouterr().err


def test_tls_alert_is_answered_with_the_right_address(capsys: pytest.CaptureFixture[str]) -> None:
    """A TLS server answers plain HTTP with the bytes of an alert, as RFC 8446 has them."""

    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(bytes.fromhex("15030300020232"))

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        config = TopConfig(router=f"http://{address}")
        assert top.watch_fleet(config, HttpClient(), io.StringIO()) == 2
        thread.join(30)
    said = capsys.readouterr().err
    assert f"its answer is no HTTP; if it wants TLS, give https://{address}" in said


def test_wrong_router_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        top.main(["--router", "localhost:8000"])
    assert stop.value.code == 2
    assert "--router localhost:8000: give http://HOST:PORT" in capsys.readouterr().err
