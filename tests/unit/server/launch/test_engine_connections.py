"""Connections of an engine: which ones end by time, which for others, and that probes have a port of their own."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.processes.cluster import eventually
from tests.support.processes.front import FakeEngine, fake_engine, model, script_fields

HALF_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
SECS = 60.0
"""Far above what any wait here takes."""


@pytest.fixture(scope="module")
def path() -> str:
    return model()


class Clients:
    """Opens connections, and closes them at the end of a test."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def connect(self, engine: FakeEngine, source: str = "127.0.0.1") -> socket.socket:
        """A connection from this address of the machine."""
        address = httpx.URL(engine.url)
        target = (address.host, address.port or 80)
        return self._stack.enter_context(socket.create_connection(target, SECS, (source, 0)))

    def stream(self, engine: FakeEngine, gate: Path) -> socket.socket:
        """A request whose answer ends when `gate` exists."""
        fields = script_fields(hold=str(gate), reply="a")
        body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 1, **fields}).encode()
        headers = f"host: localhost\r\nconnection: close\r\ncontent-length: {len(body)}"
        connection = self.connect(engine)
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{headers}\r\n\r\n".encode() + body)
        return connection

    @contextlib.contextmanager
    def streams(self, engine: FakeEngine, gate: Path, count: int) -> Iterator[None]:
        """So many requests of one address that have a rank, and end well."""
        running = [self.stream(engine, gate) for _ in range(count)]
        eventually("all have a rank", lambda: len(engine.ledger()["submits"]) == count)
        yield
        gate.touch()
        for connection in running:
            assert b"data: [DONE]" in rest(connection)


@pytest.fixture
def clients() -> Iterator[Clients]:
    with contextlib.ExitStack() as stack:
        yield Clients(stack)


def rest(connection: socket.socket) -> bytes:
    """All that comes until the engine closes."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def until_closed(connection: socket.socket) -> None:
    """Waits until the engine has closed a connection that it gave no answer."""
    with contextlib.suppress(ConnectionResetError):
        assert connection.recv(64) == b"", "an answer came"


def ask(connection: socket.socket, target: str = "/livez") -> int:
    """Status of a request on an open connection."""
    connection.sendall(f"GET {target} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    answer.read()
    return answer.status


def test_head_that_drips_ends_and_an_idle_connection_stays(path: str, clients: Clients) -> None:
    with fake_engine("--model-path", path, "--header-read-timeout-secs", "0.5") as engine:
        kept = clients.connect(engine)
        assert ask(kept) == 200
        halves = [clients.connect(engine) for _ in range(3)]
        for half, first in zip(halves, (b"P", HALF_HEAD, HALF_HEAD + b"x-a: "), strict=True):
            half.sendall(first)
        closed = threading.Event()

        def drip() -> None:
            while not closed.wait(0.05):
                with contextlib.suppress(OSError):
                    halves[2].sendall(b"a")

        dripping = threading.Thread(target=drip)
        dripping.start()
        for half in halves:
            until_closed(half)
        closed.set()
        dripping.join()
        assert ask(kept) == 200
        # The time of a head begins with its first byte, not with the connection.
        kept.sendall(b"GET /livez HTTP/1.1\r\n")
        until_closed(kept)


def test_idle_connection_ends_in_its_time(path: str, clients: Clients) -> None:
    with fake_engine("--model-path", path, "--idle-connection-timeout-secs", "0.5") as engine:
        silent = clients.connect(engine)
        used = clients.connect(engine)
        assert ask(used) == 200
        until_closed(silent)
        until_closed(used)


def test_waiting_connections_end_for_new_ones_and_streams_do_not(
    path: str, clients: Clients, tmp_path: Path
) -> None:
    with fake_engine("--model-path", path, "--max-connections", "16") as engine:
        other = clients.connect(engine, "127.0.0.3")
        assert ask(other) == 200
        # A router has more connections with requests than the share of those that wait.
        with clients.streams(engine, tmp_path / "gate", count=6):
            own = [clients.connect(engine, "127.0.0.2") for _ in range(6)]
            for one in own[:2]:
                until_closed(one)
            for one in own[2:]:
                assert ask(one) == 200
            assert ask(other) == 200
            silent = [clients.connect(engine, f"127.0.1.{1 + i % 20}") for i in range(40)]
            for one in silent[::2]:
                one.sendall(HALF_HEAD)
            assert httpx.get(engine.url + "/livez").status_code == 200
            for one in [*own[2:], other, *silent[:28]]:
                until_closed(one)
        assert "all --max-connections (16) are in use" in engine.log


def test_health_port_answers_probes_alone_while_all_connections_have_requests(
    path: str, clients: Clients, tmp_path: Path
) -> None:
    flags = ("--model-path", path, "--max-connections", "3", "--health-port", "0")
    with fake_engine(*flags) as engine:
        health = f"http://127.0.0.1:{engine.ready['health_port']}"
        for name in ("/livez", "/readyz", "/health", "/ping"):
            own = httpx.get(health + name)
            other = httpx.get(engine.url + name)
            assert (own.status_code, own.json()) == (200, other.json()), name
        for name in ("/metrics", "/v1/models", "/get_server_info", "/drain"):
            assert httpx.get(health + name).status_code == 404, name
        # The third place is for the questions about the streams.
        with clients.streams(engine, tmp_path / "gate", count=2):
            third = clients.stream(engine, tmp_path / "gate")
            until_closed(clients.connect(engine))
            assert httpx.get(health + "/readyz").status_code == 200
        assert b"data: [DONE]" in rest(third)
