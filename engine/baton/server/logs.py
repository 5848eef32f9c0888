"""Log lines of an engine: one clock (RFC 3339, UTC) and one shape for Python's and Rust's lines, on
standard error.

Text is the layout of the router's and the KV transfer's log, JSON the objects of `baton router
--log-format json`:

    2026-11-25T21:34:03.680862Z INFO rank0: baton.load: loading weights: 3 of 9 tensors
    {"timestamp":"2026-11-25T21:34:03.680862Z","level":"INFO","message":"…","process":"rank0","target":"baton.load"}

Lines of rank processes name the process; those of the front do not. Fields of an event, given as
`extra=fields(room=7)`, end a text line and are members of a JSON object; a field that is None is
left out.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Mapping
from datetime import datetime, timezone
from types import TracebackType
from typing import Any

log = logging.getLogger("baton.launch")

FORMATS = ("text", "json")
READY_PREFIX = "READY "
_LEVELS = {"WARNING": "WARN", "CRITICAL": "ERROR"}
"""Python's names of levels that Rust spells otherwise."""


def start_logs(level: str, log_format: str, process: str = "") -> None:
    """Send all lines of this process, native threads included, to standard error.

    Args:
        level: --log-level; the environment variable BATON_TRANSFER_LOG filters Rust's lines
            otherwise.
        log_format: "text" or "json".
        process: name of a rank process.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLine(process) if log_format == "json" else TextLine(process))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    if log_format == "json":
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_in_thread
    try:
        from baton._native import start_logs as start_native_logs
    except ImportError:  # then there are no native threads; what needs the extension reports it
        return
    start_native_logs(level, log_format, process)


def fields(**values: object) -> dict[str, Any]:
    """`extra` of a log call: an event's fields."""
    return {"fields": values}


def report_failure(log_format: str, text: str) -> None:
    """Report why the engine ends: plain text, as of any command, or one JSON object."""
    if log_format == "json":
        log.error(text)
    else:
        print(f"baton engine: {text}", file=sys.stderr)


def announce_ready(log_format: str, facts: Mapping[str, object]) -> None:
    """Print to standard output, for supervisors, that the engine serves."""
    if log_format == "json":
        now = datetime.now(timezone.utc).timestamp()
        line = {"timestamp": _rfc3339(now), "level": "INFO", "message": "READY", **facts}
        print(_compact_json({**line, "target": log.name}), flush=True)
    else:
        print(READY_PREFIX + json.dumps(facts), flush=True)


def read_ready(line: str) -> dict[str, Any] | None:
    """Facts of a line that `announce_ready` printed; None for any other line."""
    if line.startswith(READY_PREFIX):
        return dict(json.loads(line.removeprefix(READY_PREFIX)))
    event = read_json_line(line)
    return event if event is not None and event.get("message") == "READY" else None


def read_json_line(line: str) -> dict[str, Any] | None:
    """The object of a line of --log-format json, of an engine or a router; None for any other
    line.
    """
    if not line.startswith('{"'):
        return None
    try:
        event = json.loads(line)
    except ValueError:  # cut by the end of the file that was read, or not a line of a log
        return None
    return event if "level" in event and "timestamp" in event else None


def to_text(line: str) -> str:
    """A JSON line in the layout of text; other lines as they are."""
    event = read_json_line(line)
    if event is None:
        return line
    exception = event.pop("exception", None)
    when = event.pop("timestamp", "")
    level = event.pop("level", "")
    process = event.pop("process", "")
    target = event.pop("target", "")
    message = event.pop("message", "")
    text = _text_line(when, level, process, target, message, event)
    return text if exception is None else f"{text}\n{exception}"


class TextLine(logging.Formatter):
    """A record as a line of text, followed by its traceback."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def formatMessage(self, record: logging.LogRecord) -> str:
        level = _LEVELS.get(record.levelname, record.levelname)
        when = _rfc3339(record.created)
        values = _fields_of(record)
        return _text_line(when, level, self._process, record.name, record.message, values)


class JsonLine(logging.Formatter):
    """A record as one JSON object on one line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "timestamp": _rfc3339(record.created),
            "level": _LEVELS.get(record.levelname, record.levelname),
            "message": record.getMessage(),
            **_fields_of(record),
        }
        if record.exc_info and record.exc_info[1] is not None:
            event["exception"] = self.formatException(record.exc_info)
        if self._process:
            event["process"] = self._process
        event["target"] = record.name
        return _compact_json(event)


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    given: Mapping[str, object] = getattr(record, "fields", {})
    return {name: value for name, value in given.items() if value is not None}


def _text_line(
    when: str, level: str, process: str, target: str, message: str, values: Mapping[str, object]
) -> str:
    prefix = f"{process}: " if process else ""
    words = [message, *(f"{name}={value}" for name, value in values.items())]
    return f"{when} {level:>5} {prefix}{target}: {' '.join(words)}"


def _rfc3339(unix_secs: float) -> str:
    moment = datetime.fromtimestamp(unix_secs, timezone.utc)
    return moment.isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def _compact_json(event: Mapping[str, object]) -> str:
    return json.dumps(event, ensure_ascii=False, separators=(",", ":"), default=str)


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    log.critical("uncaught exception", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None:
        _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
