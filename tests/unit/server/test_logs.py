"""Log lines of engines: times in UTC, one shape for Python and Rust, and the router's shape in JSON."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from baton.server import logs

RFC3339 = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z"
SCRIPT = """
import logging, sys, warnings
from baton.server import logs
logs.start_logs("info", sys.argv[1], "rank0")
log = logging.getLogger("baton.load")
log.debug("not shown")
log.warning("%d of %d", 3, 9, extra=logs.fields(room=7, peer=None))
warnings.warn("old thing")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("a\\nb")
from baton._native import BootstrapServer
first = BootstrapServer("127.0.0.1", 0)
import socket
with socket.create_connection(("127.0.0.1", first.port)) as stranger:
    stranger.sendall(b"no HTTP\\r\\n\\r\\n")
    stranger.recv(1000)
first.stop()
raise SystemError("last")
"""


def run_script(log_format: str) -> list[str]:
    env = {**os.environ, "TZ": "Asia/Tokyo", "BATON_TRANSFER_LOG": "debug"}
    command = [sys.executable, "-c", SCRIPT, log_format]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_text_lines_of_python_and_rust_have_one_clock_and_one_layout() -> None:
    lines = run_script("text")
    shape = re.compile(rf"({RFC3339}) ( INFO| WARN|DEBUG|ERROR) (?:rank0: )?[\w.:]+: .*")
    stamped = [line for line in lines if line[:2] == "20"]
    assert all(shape.fullmatch(line) for line in stamped), stamped
    times = [line.split()[0] for line in stamped]
    assert times == sorted(times), "nine hours apart in Tokyo, if one of them wrote local time"
    assert f"{times[0]}  WARN rank0: baton.load: 3 of 9 room=7" in lines
    assert any(" WARN rank0: py.warnings: " in line and "old thing" in line for line in stamped)
    assert any("rank0: kv_transfer::" in line or "rank0: hyper" in line for line in stamped), lines
    assert any(line.startswith("ZeroDivisionError") for line in lines)


def test_every_json_line_is_an_object_of_the_routers_shape(tmp_path: Path) -> None:
    events = [json.loads(line) for line in run_script("json")]
    for event in events:
        assert re.fullmatch(RFC3339, event["timestamp"])
        assert event["level"] in ("INFO", "WARN", "DEBUG", "ERROR", "TRACE")
        assert event["process"] == "rank0"
        assert isinstance(event["message"], str)
        assert isinstance(event["target"], str)
    assert list(map(str, events[0])) == [
        "timestamp", "level", "message", "room", "process", "target",
    ]  # fmt: skip
    assert (events[0]["message"], events[0]["room"]) == ("3 of 9", 7)
    failed = next(event for event in events if event["message"] == "a\nb")
    assert failed["exception"].splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert events[-1]["exception"].endswith("SystemError: last")
    router = first_router_event(tmp_path)
    assert set(events[0]) - {"room", "process"} <= set(router), (
        "names of the members are the router's"
    )
    assert "fields" not in router, "fields of an event are members of the object"
    assert re.fullmatch(RFC3339, str(router["timestamp"]))


def first_router_event(tmp_path: Path) -> dict[str, object]:
    """First line that a router logs."""
    workers = tmp_path / "workers.json"
    workers.write_text("[]")
    command = [
        sys.executable,
        "-m",
        "baton_ops.cli",
        "router",
        "--log-format",
        "json",
        "--port",
        "0",
    ]
    command += ["--discovery-file", str(workers)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as router:
        assert router.stderr is not None
        line = router.stderr.readline()
        router.terminate()
    event: dict[str, object] = json.loads(line)
    return event


@pytest.mark.parametrize("log_format", logs.FORMATS)
def test_ready_line_is_read_in_both_formats(
    log_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"url": "http://127.0.0.1:1", "pid": 2, "bootstrap_port": None}
    logs.announce_ready(log_format, facts)
    printed = capsys.readouterr().out
    ready = logs.read_ready(printed)
    assert ready is not None
    assert {name: ready[name] for name in facts} == facts
    assert logs.read_ready("hello") is None
    assert logs.read_ready('{"level":"INFO","timestamp":"t","message":"m"}') is None
    assert logs.read_ready('{"cut') is None


def test_json_line_becomes_text_with_its_fields_and_traceback() -> None:
    event = {
        "timestamp": "2026-11-22T15:58:28.753000Z",
        "level": "WARN",
        "message": "link lost",
        "rooms": 2,
        "exception": "Traceback\nx",
        "process": "rank0",
        "target": "kv_transfer::node",
    }
    assert logs.to_text(json.dumps(event)) == (
        "2026-11-22T15:58:28.753000Z  WARN rank0: kv_transfer::node: link lost rooms=2\nTraceback\nx"
    )
    assert logs.to_text("plain {text}") == "plain {text}"


def test_reason_of_a_failed_start_is_a_json_line_too(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.report_failure("json", "no such model")
    assert [record.getMessage() for record in caplog.records] == ["no such model"]
    assert capsys.readouterr().err == ""
    logs.report_failure("text", "no such model")
    assert capsys.readouterr().err == "baton engine: no such model\n"
