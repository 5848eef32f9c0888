"""The router's index of what engines announce: what it expects in their caches is what they count
as cached.

The engines simulate their devices: their schedulers cache, announce and count.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from tests.support.processes.cluster import Cluster, count, eventually, get, metric
from tests.support.processes.http_server import QuietHandler, serve_requests
from tests.support.processes.router import Router

PAGE = 16
BOOKED_SECS = 2.1
"""After a first token the router goes on expecting the prompt for 2 s: until then its announcement may come."""
EVENTS = json.dumps({"enable_kv_cache_events": True, "publisher": "null"})


def prompt(number: int, pages: int = 5) -> list[int]:
    return [1 + (number * 37 + i * (1 + number % 5)) % 250 for i in range(pages * PAGE + 3)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.up(
        "--workers", "2", "--simulate", "reference,speed=100", "--max-total-tokens", "768",
        "--page-size", str(PAGE), "--kv-events-config", EVENTS,
        "--router-args", f"--kv-events on --block-size {PAGE}",
    ) as running:  # fmt: skip
        eventually("both caches are known", lambda: states(running.url) == ["exact", "exact"])
        yield running


def feeds(url: str) -> list[dict[str, Any]]:
    workers = json.loads(get(f"{url}/workers") or '{"workers": []}')["workers"]
    return [feed for worker in workers for feed in worker["kv_events"]]


def states(url: str) -> list[str]:
    return [str(feed["state"]) for feed in feeds(url)]


def settled(cluster: Cluster) -> None:
    """Until the router has taken in all that the engines announced."""

    def announced() -> list[int]:
        snapshots = [
            httpx.get(f"{url}/v1/kv_events?follow=false", timeout=20) for url in cluster.loads()
        ]
        return [json.loads(answer.text.splitlines()[0])["seq"] for answer in snapshots]

    eventually(
        "nothing is on its way",
        lambda: [feed["next_seq"] for feed in feeds(cluster.url)] == announced(),
    )


def asked(cluster: Cluster, ids: list[int]) -> tuple[int, int]:
    """Cached tokens of this prompt: as the router expected them, and as the engine counted them."""
    names = ("expected_cached_tokens", "reported_cached_tokens", "counted_prompt_tokens")

    def counts() -> list[float]:
        return [count(cluster.url, f"baton_router_{name}_total", role="regular") for name in names]

    before = counts()
    cluster.generate_ids(ids, 2)
    eventually("it is counted", lambda: counts()[2] >= before[2] + len(ids))
    expected, reported, _ = (int(now - then) for now, then in zip(counts(), before, strict=True))
    return expected, reported


def test_expected_is_counted_after_stores_evictions_and_a_flush(cluster: Cluster) -> None:
    assert asked(cluster, prompt(0)) == (0, 0)
    settled(cluster)
    assert asked(cluster, prompt(0)) == (5 * PAGE, 5 * PAGE)
    assert asked(cluster, prompt(0)[: 5 * PAGE]) == (4 * PAGE, 4 * PAGE), (
        "the last token is computed always"
    )
    for number in range(1, 30):  # more than both pools hold
        asked(cluster, prompt(number))
    time.sleep(BOOKED_SECS)
    settled(cluster)
    seen = []
    for number in range(29, 0, -4):
        expected, reported = asked(cluster, prompt(number))
        assert expected == reported, number
        seen.append(reported)
        settled(cluster)
    assert 0 in seen, f"nothing was evicted: {seen}"
    assert 5 * PAGE in seen, f"nothing was kept: {seen}"
    assert metric(cluster.url, "baton_router_kv_event_ranks", state="exact") == 2
    for url in cluster.loads():
        httpx.post(f"{url}/flush_cache").raise_for_status()
    time.sleep(BOOKED_SECS)
    settled(cluster)
    assert [feed["blocks"] for feed in feeds(cluster.url)] == [0, 0]
    assert asked(cluster, prompt(29)) == (0, 0)


@pytest.mark.slow
def test_restarted_engine_is_indexed_again(cluster: Cluster) -> None:
    asked(cluster, prompt(50))
    settled(cluster)
    for index in range(2):
        cluster.kill("worker", index)
    for index in range(2):
        cluster.await_restart("worker", index)
    eventually("both caches are known", lambda: states(cluster.url) == ["exact", "exact"])
    assert asked(cluster, prompt(50)) == (0, 0)
    settled(cluster)
    assert asked(cluster, prompt(50)) == (5 * PAGE, 5 * PAGE)


# ---- vLLM's format, published by libzmq ----------------------------------------------------------------------------


class Answers(QuietHandler):
    """A worker that knows no more than vLLM's: it is healthy, and answers /generate."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(b"{}", 200 if self.path == "/health" else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked += 1  # type: ignore[attr-defined]
        meta = {"prompt_tokens": len(body["input_ids"]), "completion_tokens": 1, "cached_tokens": 0}
        self.answer(json.dumps({"text": "x", "meta_info": meta}).encode())


@contextmanager
def worker(host: str) -> Iterator[ThreadingHTTPServer]:
    with serve_requests(Answers, host) as server:
        server.asked = 0  # type: ignore[attr-defined]
        yield server


@dataclass
class Publisher:
    """As vLLM's: numbered batches, the last ones kept for replay."""

    context: zmq.Context[Any]
    port: int = 0
    replay_port: int = 0
    log: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pub = self.context.socket(zmq.PUB)
        self.port = self._bind(self.pub, self.port)
        self.router = self.context.socket(zmq.ROUTER)
        self.replay_port = self._bind(self.router, self.replay_port)
        self.is_closing = threading.Event()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _bind(self, socket: zmq.Socket[bytes], port: int) -> int:
        if port == 0:
            return socket.bind_to_random_port("tcp://127.0.0.1")
        eventually("the port is free", lambda: self._try_bind(socket, port))
        return port

    @staticmethod
    def _try_bind(socket: zmq.Socket[bytes], port: int) -> bool:
        try:
            socket.bind(f"tcp://127.0.0.1:{port}")
        except zmq.ZMQError:
            return False
        return True

    def _serve(self) -> None:
        while not self.is_closing.is_set():
            if self.router.poll(20):
                client, _, first = self.router.recv_multipart()
                for number in range(int.from_bytes(first, "big"), len(self.log)):
                    self.router.send_multipart(
                        (client, b"", number.to_bytes(8, "big"), self.log[number])
                    )
                self.router.send_multipart((client, b"", (-1).to_bytes(8, "big", signed=True), b""))
        self.router.close(linger=0)

    def publish(self, *events: Any, is_lost: bool = False, as_map: bool = False) -> None:
        number, ts = len(self.log), time.time()
        batch: Any = (
            {"ts": ts, "events": events, "data_parallel_rank": 0} if as_map else [ts, events, 0]
        )
        self.log.append(msgspec.msgpack.encode(batch))
        if not is_lost:
            self.pub.send_multipart((b"kv", number.to_bytes(8, "big"), self.log[-1]))

    def close(self) -> None:
        self.is_closing.set()
        self.thread.join()
        self.pub.close(linger=0)


def block(ids: list[int], page: int) -> bytes:
    """A name as long as SHA-256's, of everything up to the end of the page."""
    return b"block" + bytes(ids[: (page + 1) * PAGE])[-200:] + page.to_bytes(4, "big")


def stored(ids: list[int], first: int, pages: int) -> list[Any]:
    names = [block(ids, page) for page in range(first, first + pages)]
    parent = block(ids, first - 1) if first else None
    tokens = ids[first * PAGE : (first + pages) * PAGE]
    return ["BlockStored", names, parent, tokens, PAGE, None, "GPU", None]


def test_vllms_sockets_are_followed_through_a_gap_and_a_restart() -> None:
    context: zmq.Context[Any] = zmq.Context()
    publisher = Publisher(context)
    with worker("127.0.0.1") as first, worker("127.0.0.2") as second:
        urls = [
            f"http://{host}:{port}" for host, port in (s.server_address for s in (first, second))
        ]
        with Router.up(
            "--worker-urls", *urls, "--kv-events", "on", "--block-size", str(PAGE),
            "--kv-events-endpoint", f"tcp://{{host}}:{publisher.port}",
            "--kv-events-replay-endpoint", f"tcp://{{host}}:{publisher.replay_port}",
        ) as url:  # fmt: skip
            eventually(
                "both answer", lambda: metric(url, "baton_router_workers", state="ready") == 2
            )
            ids = prompt(1, pages=40)

            def followed() -> dict[str, Any]:
                return feeds(url)[0]

            def is_at(number: int) -> bool:
                feed = followed()
                return feed["state"] == "exact" and feed["next_seq"] == number

            publisher.publish(stored(ids, 0, 10))
            # A subscriber that joins late finds batch 0 in the replay.
            eventually("the first batch", lambda: is_at(1))
            publisher.publish(stored(ids, 10, 10), as_map=True)
            eventually("a batch in the newer form", lambda: is_at(2))
            assert followed()["blocks"] == 20
            for _ in range(4):
                httpx.post(
                    f"{url}/generate", json={"input_ids": ids}, timeout=10
                ).raise_for_status()
            assert (first.asked, second.asked) == (4, 0)  # type: ignore[attr-defined]

            publisher.publish(["BlockRemoved", [block(ids, 19)], "GPU"], is_lost=True)
            publisher.publish(stored(ids[: 30 * PAGE], 0, 1))  # a second copy of the first page
            eventually("the gap is filled", lambda: is_at(4))
            assert (followed()["blocks"], followed()["gaps"]) == (19, 1)
            assert metric(url, "baton_router_kv_event_resyncs_total", how="replay") == 1

            # Another process on the same ports: its numbers restart, and are larger soon.
            publisher.close()
            eventually("the connection is lost", lambda: followed()["state"] == "doubtful")
            publisher = Publisher(context, publisher.port, publisher.replay_port)
            for _ in range(6):
                publisher.publish(stored(ids, 0, 3))
            eventually("the new process is known", lambda: is_at(6))
            assert followed()["blocks"] == 3
            publisher.publish(["AllBlocksCleared"])
            eventually("it is empty", lambda: is_at(7) and followed()["blocks"] == 0)
            assert feeds(url)[1]["state"] == "connecting", "no engine publishes there"
    publisher.close()
    context.destroy(linger=0)
