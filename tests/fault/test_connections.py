"""Clients that open connections and send no request: probes answer, streams end well, memory and files are bounded."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.processes.cluster import eventually
from tests.support.processes.front import FakeEngine, fake_engine, model, script_fields

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HALF_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
SECS = 120.0
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def many_files() -> Iterator[None]:
    """This process holds the other ends of all connections."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 12_000:
        pytest.skip("the hard limit of open files is below 12,000")
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def router_of(engine: FakeEngine, *flags: str) -> Iterator[dict[str, str]]:
    """READY of a router in front of the engine."""
    words = ["--host", "127.0.0.1", "--port", "0", "--health-port", "0"]
    command = [sys.executable, "-m", "baton_ops.cli", "router", *words]
    process = subprocess.Popen(
        [*command, "--worker-urls", engine.url, *flags], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline().removeprefix("READY "))
        eventually("it serves", lambda: httpx.get(ready["url"] + "/readyz").status_code == 200)
        yield ready
    finally:
        process.terminate()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


def open_silent(
    stack: contextlib.ExitStack, url: str, count: int, addresses: int
) -> list[socket.socket]:
    """Connections from so many addresses of this machine; every second one sends half a head."""
    target = httpx.URL(url)
    opened = []
    for i in range(count):
        source = (f"127.0.1.{1 + i % addresses}", 0)
        one = socket.create_connection((target.host, target.port or 80), SECS, source)
        stack.enter_context(one)
        if i % 2:
            with contextlib.suppress(OSError):  # another one has its place already
                one.sendall(HALF_HEAD)
        opened.append(one)
    return opened


@pytest.mark.parametrize("addresses", [1, 20])
def test_router_full_of_silent_connections_serves_probes_and_streams(
    addresses: int, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    body = {"prompt": "a", "stream": True, "max_tokens": 1}
    body |= script_fields(hold=str(gate), reply="a")
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(fake_engine("--model-path", model(), keepalive_secs=0.1))
        ready = stack.enter_context(router_of(engine, "--max-connections", "400"))
        url = ready["url"]
        client = stack.enter_context(httpx.Client(timeout=SECS))
        streams = [
            stack.enter_context(client.stream("POST", url + "/v1/completions", json=body))
            for _ in range(4)
        ]
        open_silent(stack, url, 2_000, addresses)
        health = f"http://127.0.0.1:{ready['health_port']}"
        # The first one waits until the router has accepted all of those before it.
        for probe in (url + "/livez", url + "/livez", health + "/livez", health + "/readyz"):
            answer = httpx.get(probe, timeout=SECS)
            print(f"{probe} with {addresses} addresses: {answer.elapsed.total_seconds():.3f} s")
            assert answer.status_code == 200
        chat = httpx.post(url + "/v1/completions", json={"prompt": "a"}, timeout=SECS)
        assert chat.status_code == 200
        gate.touch()
        for stream in streams:
            assert b"data: [DONE]" in stream.read()


def test_engine_with_10000_half_heads_stays_small_and_answers_probes() -> None:
    flags = ("--model-path", model(), "--max-connections", "1000", "--health-port", "0")
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(fake_engine(*flags))
        front = psutil.Process(engine.process.pid)
        before = front.memory_info().rss
        half = open_silent(stack, engine.url, 10_000, 20)
        for one in half:
            with contextlib.suppress(OSError):  # another one has its place already
                one.sendall(HALF_HEAD)
        health = f"http://127.0.0.1:{engine.ready['health_port']}"
        for probe in (engine.url + "/livez", health + "/livez", health + "/readyz"):
            answer = httpx.get(probe, timeout=SECS)
            print(f"{probe}: {answer.elapsed.total_seconds():.3f} s")
            assert answer.status_code == 200
        grown = (front.memory_info().rss - before) / MIB
        print(f"{front.num_fds()} descriptors, {grown:.0f} MiB more")
        assert front.num_fds() < 1_000 + 300
        assert grown < 100
        answer = httpx.post(engine.url + "/v1/completions", json={"prompt": "a"}, timeout=SECS)
        assert answer.status_code == 200
