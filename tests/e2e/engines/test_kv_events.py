"""KV events of an engine, read as vLLM's clients do: PUB/SUB, replay of a gap, snapshot, restart.

The engine simulates its device: events tell what the scheduler caches, and no tensor of it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from tests.support.processes.cluster import Cluster, eventually

PAGE = 16
DEVICE = "reference,speed=100"
CONFIG = {
    "enable_kv_cache_events": True,
    "endpoint": "tcp://127.0.0.1:*",
    "replay_endpoint": "tcp://127.0.0.1:*",
    "buffer_steps": 400,
    "topic": "kv",
}


# What follows is how a client of vLLM declares the messages.
class Event(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def sha(parent: int, tokens: list[int]) -> int:
    digest = hashlib.sha256(
        struct.pack(">Q", parent) + struct.pack(f"<{len(tokens)}i", *tokens)
    ).digest()
    return int.from_bytes(digest[:8], "big")


def names(tokens: list[int]) -> list[int]:
    """Hashes of the whole pages of a prompt."""
    found, at = [], 0
    for i in range(len(tokens) // PAGE):
        at = sha(at, tokens[i * PAGE : (i + 1) * PAGE])
        found.append(at)
    return found


@dataclass
class Subscriber:
    """Keeps a copy of the cache; notices gaps and asks for what it missed."""

    context: zmq.Context[Any]
    endpoint: str
    replay_endpoint: str
    blocks: dict[int, int | None] = field(default_factory=dict)
    """Hash → parent."""
    next_seq: int = 0
    gaps: int = 0

    def __post_init__(self) -> None:
        self.connect()

    def connect(self) -> None:
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"kv")
        self.sub.connect(self.endpoint)

    def replay(self) -> None:
        with self.context.socket(zmq.DEALER) as ask:
            ask.connect(self.replay_endpoint)
            ask.send_multipart([b"", self.next_seq.to_bytes(8, "big")])
            while True:
                assert ask.poll(10_000), "no answer to a replay request"
                empty, seq, payload = ask.recv_multipart()
                assert empty == b""
                if not payload:
                    assert seq == (-1).to_bytes(8, "big", signed=True)
                    return
                self.apply(int.from_bytes(seq, "big"), payload)

    def receive(self) -> None:
        """Everything that is there now."""
        while self.sub.poll(50):
            topic, seq, payload = self.sub.recv_multipart()
            assert topic == b"kv"
            number = int.from_bytes(seq, "big")
            if number > self.next_seq:
                self.gaps += 1
                self.replay()
            self.apply(number, payload)

    def apply(self, number: int, payload: bytes) -> None:
        if number < self.next_seq:
            return  # came by replay already
        assert number == self.next_seq
        self.next_seq += 1
        batch = msgspec.msgpack.decode(payload, type=EventBatch)
        assert batch.data_parallel_rank == 0
        assert batch.ts > 1.6e9
        for event in batch.events:
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == PAGE * len(event.block_hashes)
                assert (event.block_size, event.medium) == (PAGE, "GPU")
                parent = event.parent_block_hash
                assert parent is None or parent in self.blocks
                for block in event.block_hashes:
                    assert block not in self.blocks
                    self.blocks[block] = parent
                    parent = block
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    del self.blocks[block]
            else:
                self.blocks.clear()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.up(
        "--workers", "1", "--simulate", DEVICE, "--max-total-tokens", "1024",
        "--page-size", str(PAGE), "--kv-events-config", json.dumps(CONFIG),
    ) as running:  # fmt: skip
        yield running


@pytest.fixture
def subscriber(cluster: Cluster) -> Iterator[Subscriber]:
    where = kv_info(cluster)
    context: zmq.Context[Any] = zmq.Context()
    yield Subscriber(context, where["endpoint"], where["replay_endpoint"])
    context.destroy(linger=0)


def kv_info(cluster: Cluster) -> dict[str, Any]:
    info = httpx.get(cluster.node("worker")["url"] + "/get_server_info").json()
    return dict(info["internal_states"][0]["kv_events"])


def over_http(cluster: Cluster, query: str) -> list[dict[str, Any]]:
    answer = httpx.get(
        cluster.node("worker")["url"] + "/v1/kv_events?follow=false&" + query, timeout=20
    )
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def cached_pages(cluster: Cluster) -> int:
    books = httpx.get(cluster.node("worker")["url"] + "/debug/ledger").json()["ranks"][0]["pages"]
    assert books['kv_pages{state="held"}'] == 0
    return int(books['kv_pages{state="cached"}'])


def prompt(number: int, pages: int = 4) -> list[int]:
    return [1 + (number * 31 + i) % 200 for i in range(pages * PAGE + 3)]


def test_subscriber_holds_what_the_engine_caches(cluster: Cluster, subscriber: Subscriber) -> None:
    """More prompts than the pool holds: stored, evicted, and in the middle a subscriber that was away."""
    subscriber.replay()
    assert subscriber.next_seq >= 1, "the first word is AllBlocksCleared"

    def follows(tokens: list[int]) -> bool:
        subscriber.receive()
        return set(names(tokens)) <= subscriber.blocks.keys()

    for number in range(6):
        cluster.generate_ids(prompt(number), 4)
        eventually("the prompt's pages are announced", lambda n=number: follows(prompt(n)))  # type: ignore[misc]
    assert subscriber.gaps == 0
    subscriber.sub.close(linger=0)
    for number in range(6, 30):
        cluster.generate_ids(prompt(number), 4)
    subscriber.connect()

    numbers = itertools.count(30)

    def gap_after_prompt() -> list[int] | None:
        """A new prompt each time: a subscriber receives only batches published after it has joined."""
        last = prompt(next(numbers), pages=2)
        cluster.generate_ids(last, 2)
        subscriber.receive()
        return last if subscriber.gaps > 0 else None

    last = eventually("a gap is noticed", gap_after_prompt)
    eventually("the last prompt is known", lambda: follows(last))
    assert len(subscriber.blocks) == cached_pages(cluster) <= 64
    snapshot = over_http(cluster, "")[0]
    assert snapshot["seq"] == subscriber.next_seq
    assert {
        block for event in snapshot["events"] for block in event["block_hashes"]
    } == subscriber.blocks.keys()


def test_http_gives_the_same_batches_as_zmq(cluster: Cluster, subscriber: Subscriber) -> None:
    epoch = kv_info(cluster)["epoch"]
    before = over_http(cluster, "")[0]["seq"]
    with httpx.stream(
        "GET", cluster.node("worker")["url"] + f"/v1/kv_events?epoch={epoch}&from_seq={before}"
    ) as live:
        cluster.generate_ids(prompt(200), 4)
        batch = json.loads(next(line for line in live.iter_lines() if line))
    assert (batch["type"], batch["seq"], batch["epoch"]) == ("batch", before, epoch)
    subscriber.next_seq = before
    with subscriber.context.socket(zmq.DEALER) as ask:
        ask.connect(subscriber.replay_endpoint)
        ask.send_multipart([b"", before.to_bytes(8, "big")])
        assert ask.poll(10_000)
        _, seq, payload = ask.recv_multipart()
    assert int.from_bytes(seq, "big") == before
    same = msgspec.msgpack.decode(payload, type=EventBatch)
    assert same.ts == batch["ts"]
    for one, other in zip(same.events, batch["events"], strict=True):
        assert type(one).__name__ == other["type"]
        assert one.block_hashes == other["block_hashes"]  # type: ignore[union-attr]


def test_flushing_the_cache_is_announced(cluster: Cluster, subscriber: Subscriber) -> None:
    cluster.generate_ids(prompt(300), 4)
    httpx.post(cluster.node("worker")["url"] + "/flush_cache").raise_for_status()
    assert cached_pages(cluster) == 0
    eventually("nothing is cached", lambda: over_http(cluster, "")[0]["events"] == [])


def test_after_a_restart_old_numbers_mean_nothing(cluster: Cluster) -> None:
    old = kv_info(cluster)["epoch"]
    cluster.generate_ids(prompt(400), 4)
    seq = over_http(cluster, "")[0]["seq"]
    cluster.kill("worker")
    cluster.await_restart("worker")
    cluster.await_service()
    assert kv_info(cluster)["epoch"] != old
    first = over_http(cluster, f"epoch={old}&from_seq={min(seq, 1)}")[0]
    assert (first["type"], first["events"]) == ("snapshot", [])
