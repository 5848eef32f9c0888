"""A collector of OTLP traces for tests: a real HTTP server, and spans read off protobuf without a protobuf library.

with Collector.start() as collector:
    ...                                     # --enable-trace --otlp-traces-endpoint collector.endpoint
    spans = collector.until(lambda spans: len(spans) > 3)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.processes.cluster import eventually
from tests.support.processes.http_server import QuietHandler, serve_requests, url_of


def fields(message: bytes) -> list[tuple[int, Any]]:
    """Field numbers with their values: numbers (varint and 64 bits), or bytes."""
    found: list[tuple[int, Any]] = []
    at = 0

    def varint() -> int:
        nonlocal at
        number = shift = 0
        while True:
            byte = message[at]
            at += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number

    while at < len(message):
        key = varint()
        kind = key & 7
        if kind == 0:
            found.append((key >> 3, varint()))
            continue
        assert kind in (1, 2), f"wire type {kind}"
        length = 8 if kind == 1 else varint()
        value = message[at : at + length]
        assert len(value) == length
        at += length
        found.append((key >> 3, int.from_bytes(value, "little") if kind == 1 else value))
    return found


def each(message: bytes, number: int) -> list[Any]:
    return [value for field_number, value in fields(message) if field_number == number]


def one(message: bytes, number: int, default: Any = b"") -> Any:
    return next(iter(each(message, number)), default)


def attributes(message: bytes, number: int) -> dict[str, str | int]:
    found: dict[str, str | int] = {}
    for pair in each(message, number):
        ((kind, value),) = fields(one(pair, 2))
        assert kind in (1, 3), "a string or an integer"
        found[one(pair, 1).decode()] = value.decode() if kind == 1 else value
    return found


@dataclass(frozen=True)
class GotSpan:
    service: dict[str, str | int]
    trace: str
    id: str
    parent: str
    """Empty for the root."""
    name: str
    kind: int
    start: int
    end: int
    attributes: dict[str, str | int]
    events: list[tuple[int, str, dict[str, str | int]]]
    error: str | None

    @property
    def by(self) -> str:
        return str(self.service["service.name"])


def read_spans(request: bytes) -> list[GotSpan]:
    """Spans of an ExportTraceServiceRequest (field numbers of opentelemetry-proto 1.x)."""
    found = []
    for resource_spans in each(request, 1):
        service = attributes(one(resource_spans, 1), 1)
        for span in (span for scope in each(resource_spans, 2) for span in each(scope, 2)):
            status = one(span, 15)
            got = GotSpan(
                service=service,
                trace=one(span, 1).hex(),
                id=one(span, 2).hex(),
                parent=one(span, 4).hex(),
                name=one(span, 5).decode(),
                kind=one(span, 6, 0),
                start=one(span, 7),
                end=one(span, 8),
                attributes=attributes(span, 9),
                events=[(one(e, 1), one(e, 2).decode(), attributes(e, 3)) for e in each(span, 11)],
                error=one(status, 2).decode() if one(status, 3, 0) == 2 else None,
            )
            found.append(got)
    return found


@dataclass
class Collector:
    endpoint: str
    spans: list[GotSpan] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    @classmethod
    @contextlib.contextmanager
    def start(cls) -> Iterator[Collector]:
        class Handler(QuietHandler):
            def do_POST(self) -> None:  # the name that http.server calls
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces"
                assert self.headers["content-type"] == "application/x-protobuf"
                collector.bodies.append(body)
                collector.spans += read_spans(body)
                self.answer(b"")

        with serve_requests(Handler) as server:
            collector = cls(url_of(server))
            yield collector

    def until(self, what: str, is_there: Callable[[list[GotSpan]], bool]) -> list[GotSpan]:
        """The spans that came, as soon as they are as wanted."""

        def look() -> list[GotSpan]:
            spans = list(self.spans)
            return spans if is_there(spans) else []

        return eventually(what, look, secs=20)
