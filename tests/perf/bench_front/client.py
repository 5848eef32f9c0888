"""Clients of the front's benchmark, in a process of their own: raw sockets and one selector.

    python -m tests.perf.bench_front.client < JOB.json > RESULT.json

A reader counts events by a text that each of them has once and parses nothing, so that it costs a fraction of what it
measures. CPU time of the front is read here, at the edges of what is measured.
"""

from __future__ import annotations

import itertools
import json
import selectors
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RECEIVE_BYTES = 1 << 20
CHUNKED_END = b"\r\n0\r\n\r\n"
SETTLED_EVENTS = 8
"""Events of a stream after which it is counted: its request is over then."""
QUIET_SECS = 0.5
EVENT_END = b"\n\n"


def cpu_secs(pid: int) -> float:
    """On-CPU time of a process's threads."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) * 1e-9


CHAT = "/v1/chat/completions"


def chat_request(content: str, max_tokens: int) -> bytes:
    return stream_request(CHAT, content, max_tokens, {})


def stream_request(path: str, content: str, max_tokens: int, members: dict[str, Any]) -> bytes:
    """Request for a stream of one of the APIs, with `members` of its own."""
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": content}]}
    limit = "max_tokens"
    if path == "/v1/responses":
        prompt = {"input": content}
        limit = "max_output_tokens"
    body = {
        "model": "bench",
        "stream": True,
        "temperature": 0,
        "ignore_eos": True,
        **prompt,
        limit: max_tokens,
        **members,
    }
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


@dataclass(eq=False)
class Connection:
    """Keep-alive connection and its current answer."""

    sock: socket.socket
    marker: bytes = EVENT_END
    """Text that each counted event has once."""
    events: int = 0
    tail: bytes = b""
    received_at: list[float] = field(default_factory=list)

    def receive(self) -> bool:
        """Read what is there. Returns True at the end of the answer."""
        data = self.sock.recv(RECEIVE_BYTES)
        if not data:
            raise ConnectionError("the engine closed a connection; see its log")
        if not self.tail and not data.startswith(b"HTTP/1.1 200"):
            raise ConnectionError(f"the engine answered {data[:300]!r}")
        overlap = self.tail[max(len(self.tail) - len(self.marker) + 1, 0) :]
        self.events += (overlap + data).count(self.marker)
        kept = max(len(CHUNKED_END), len(self.marker))
        self.tail = (self.tail + data)[-kept:]
        return self.tail.endswith(CHUNKED_END)


class Clients:
    """Connections to one engine."""

    def __init__(self, host: str, port: int, count: int) -> None:
        self._address = (host, port)
        self._selector = selectors.EpollSelector()
        self.connections = [self._connect() for _ in range(count)]

    def _connect(self) -> Connection:
        sock = socket.create_connection(self._address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(sock)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        return connection

    def send(self, connection: Connection, request: bytes) -> None:
        connection.tail = b""
        connection.sock.sendall(request)

    def ready(self) -> Iterable[Connection]:
        for key, _ in self._selector.select(60.0) or _raise_silence():
            yield key.data

    def close(self) -> None:
        for connection in self.connections:
            connection.sock.close()
        self._selector.close()


def _raise_silence() -> list[Any]:
    raise TimeoutError("the engine sent nothing for 60 s; see its log")


def measure_tokens(job: dict[str, Any]) -> dict[str, float]:
    """CPU of the front per token, while all streams run and none begins or ends."""
    streams: int = job["streams"]
    tokens: int = job["tokens"]
    pid: int = job["pid"]
    clients = Clients(job["host"], job["port"], streams)
    max_tokens = job["begun_tokens"] + tokens
    for number, connection in enumerate(clients.connections):
        content = f"stream {number} {job['content']}"
        connection.marker = job["marker"].encode()
        clients.send(connection, stream_request(job["path"], content, max_tokens, job["members"]))
    settling = streams
    running = streams
    began: tuple[float, float, int] | None = None
    ended: tuple[float, float, int] | None = None

    def observe() -> tuple[float, float, int]:
        events = sum(connection.events for connection in clients.connections)
        return cpu_secs(pid), time.monotonic(), events

    while running:
        for connection in clients.ready():
            before = connection.events
            is_finished = connection.receive()
            if before < SETTLED_EVENTS <= connection.events:
                settling -= 1
                if settling == 0:
                    began = observe()
            if is_finished:
                running -= 1
                ended = ended or observe()
    clients.close()
    if began is None or ended is None:
        raise ValueError(
            f"the streams were too short to be measured, or have no event with {job['marker']!r}, so that they are of "
            "another kind than what is measured; raise --seconds, or see the engine's log"
        )
    token_events = sum(connection.events for connection in clients.connections)
    tokens_per_event = streams * tokens / token_events
    counted = (ended[2] - began[2]) * tokens_per_event
    seconds = ended[1] - began[1]
    cpu = ended[0] - began[0]
    return {
        "cpu_us": cpu / counted * 1e6,
        "tokens_per_event": tokens_per_event,
        "tokens_per_sec": counted / seconds,
        "busy": cpu / seconds,
    }


def measure_requests(job: dict[str, Any]) -> dict[str, float]:
    """CPU of the front per request whose answer is one token; `streams` requests at a time."""
    requests: int = job["requests"]
    pid: int = job["pid"]
    content: str = job["content"]
    clients = Clients(job["host"], job["port"], job["streams"])
    bodies = iter([chat_request(f"request {i} {content}", 1) for i in range(requests)])
    began = (cpu_secs(pid), time.monotonic())
    running = 0
    for connection, body in zip(clients.connections, bodies, strict=False):
        clients.send(connection, body)
        running += 1
    while running:
        for connection in clients.ready():
            if not connection.receive():
                continue
            body = next(bodies, b"")
            if body:
                clients.send(connection, body)
            else:
                running -= 1
    ended = (cpu_secs(pid), time.monotonic())
    clients.close()
    cpu = ended[0] - began[0]
    seconds = ended[1] - began[1]
    return {
        "cpu_us": cpu / requests * 1e6,
        "requests_per_sec": requests / seconds,
        "busy": cpu / seconds,
    }


def measure_gaps(job: dict[str, Any]) -> dict[str, float]:
    """Longest pause of `streams` streams: on their own, and while large bodies arrive one after the other."""
    clients = Clients(job["host"], job["port"], job["streams"])
    for number, connection in enumerate(clients.connections):
        clients.send(connection, chat_request(f"stream {number}", job["tokens"]))
    body = chat_request(job["word"] * (job["body_bytes"] // len(job["word"])), 1)
    spans: list[tuple[float, float]] = []
    statuses: list[int] = []
    sending = threading.Thread(
        target=_send_bodies, args=(job, body, spans, statuses), name="large bodies"
    )
    sending.start()
    while sending.is_alive():
        for connection in clients.ready():
            if connection.receive():
                raise ValueError("the streams ended before the bodies did; raise their tokens")
            connection.received_at.append(time.monotonic())
    sending.join()
    clients.close()
    if len(statuses) < job["bodies"]:
        raise ConnectionError("a large body got no answer; see the engine's log")
    quiet = [(begin - QUIET_SECS, begin) for begin, _ in spans]
    return {
        "gap_ms": statistics.median(_longest_gaps(clients.connections, spans)),
        "quiet_gap_ms": statistics.median(_longest_gaps(clients.connections, quiet)),
        "answer_ms": statistics.median(end - begin for begin, end in spans) * 1e3,
        "status": statistics.mode(statuses),
    }


def _send_bodies(
    job: dict[str, Any], body: bytes, spans: list[tuple[float, float]], statuses: list[int]
) -> None:
    time.sleep(2 * QUIET_SECS)
    for _ in range(job["bodies"]):
        time.sleep(2 * QUIET_SECS)
        with socket.create_connection((job["host"], job["port"]), timeout=120.0) as sock:
            began = time.monotonic()
            sock.sendall(body)
            head = sock.recv(RECEIVE_BYTES)
            spans.append((began, time.monotonic()))
            statuses.append(int(head.split(b" ", 2)[1]))


def _longest_gaps(
    connections: Iterable[Connection], spans: Iterable[tuple[float, float]]
) -> list[float]:
    """Longest pause in ms of any stream that touches a span, for each span."""
    times = [connection.received_at for connection in connections]
    longest = []
    for begin, end in spans:
        gaps = [
            later - earlier
            for received_at in times
            for earlier, later in itertools.pairwise(received_at)
            if later >= begin and earlier <= end
        ]
        longest.append(max(gaps) * 1e3)
    return longest


MEASURES: dict[str, Callable[[dict[str, Any]], dict[str, float]]] = {
    "tokens": measure_tokens,
    "requests": measure_requests,
    "gaps": measure_gaps,
}


if __name__ == "__main__":
    given = json.load(sys.stdin)
    json.dump(MEASURES[given["measure"]](given), sys.stdout)
