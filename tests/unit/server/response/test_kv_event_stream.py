"""GET /v1/kv_events of the front with a scripted rank: snapshots, batches, slow readers, ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from baton.cache.kv_events import Removed, Stored
from baton.errors import EngineError
from baton.server.http.http_utils import error_response
from baton.server.response import kv_event_stream
from baton.server.response.kv_event_stream import KvStreams
from baton.server.worker.client import RankClient
from baton.server.worker.control import ControlOperation, ReadKvSnapshot
from baton.server.worker.kv_events import codec
from baton.server.worker.messages import KvEvents, ReplyMessage

BLOCK = Stored((2**64 - 1,), None, b"\1\0\0\0\2\0\0\0", b"salt\0")


class ScriptedRanks:
    """The part of Ranks that streams use; a snapshot holds BLOCK and stands for what was sent so far."""

    def __init__(self, size: int) -> None:
        self.ranks = [
            RankClient(i, None, ready=True, info={"kv_events": {"epoch": "e1"}})
            for i in range(size)
        ]  # type: ignore[arg-type]
        self.on_kv_events: Callable[[KvEvents], None] = lambda message: None
        self.sent = 0
        self.snapshots = 0

    def choose(self, wanted: int | None) -> RankClient:
        assert wanted is not None
        return self.ranks[wanted]

    async def control(
        self, rank: RankClient, operation: ControlOperation, timeout_secs: float
    ) -> ReplyMessage:
        assert operation == ReadKvSnapshot()
        self.snapshots += 1
        return ReplyMessage(
            1,
            True,
            {
                "epoch": "e1",
                "seq": self.sent,
                "payload": codec.encode([BLOCK], 2, 1.0, 0, "latent"),
            },
        )

    def send(self, dp_rank: int = 0) -> None:
        payload = codec.encode([Removed((self.sent,))], 2, 2.0, dp_rank, "full")
        self.on_kv_events(KvEvents(dp_rank, self.sent, payload))
        self.sent += 1


@web.middleware
async def errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> Any:
    try:
        return await handler(request)
    except EngineError as err:
        return error_response(err)


@asynccontextmanager
async def serving(
    ranks: ScriptedRanks, enabled: bool = True
) -> AsyncIterator[tuple[TestClient[Any, Any], KvStreams]]:
    streams = KvStreams(ranks, enabled)  # type: ignore[arg-type]
    app = web.Application(middlewares=[errors])
    app.router.add_get("/v1/kv_events", streams.serve)
    app.on_shutdown.append(streams.close)
    async with TestClient(TestServer(app)) as client:
        yield client, streams


async def lines(client: TestClient[Any, Any], query: str) -> list[dict[str, Any]]:
    answer = await client.get("/v1/kv_events?follow=false&" + query)
    assert answer.status == 200, await answer.text()
    return [json.loads(line) for line in (await answer.text()).splitlines()]


async def next_line(content: Any) -> dict[str, Any]:
    return dict(json.loads(await asyncio.wait_for(content.readline(), 10)))


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def test_reader_without_a_number_gets_a_snapshot_and_what_follows() -> None:
    async def scene() -> None:
        ranks = ScriptedRanks(1)
        async with serving(ranks) as (client, _):
            for _ in range(3):
                ranks.send()
            answer = await client.get("/v1/kv_events")
            first = await next_line(answer.content)
            assert first == {
                "type": "snapshot", "epoch": "e1", "dp_rank": 0, "seq": 3, "ts": 1.0,
                "events": [{
                    "type": "BlockStored", "block_hashes": [2**64 - 1], "parent_block_hash": None,
                    "token_ids": [1, 2], "block_size": 2, "lora_id": None, "medium": "GPU",
                    "extra_keys": [["salt", ""]], "group_idx": 0,
                    "kv_cache_spec_kind": "mla_attention",
                }],
            }  # fmt: skip
            ranks.send()
            second = await next_line(answer.content)
            assert (second["type"], second["seq"]) == ("batch", 3)
            assert second["events"] == [
                {"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU", "group_idx": 0}
            ]
            answer.close()

    run(scene)


def test_reader_that_is_up_to_date_gets_batches_only() -> None:
    async def scene() -> None:
        ranks = ScriptedRanks(1)
        async with serving(ranks) as (client, _):
            for _ in range(3):
                ranks.send()
            assert [line["seq"] for line in await lines(client, "epoch=e1&from_seq=1")] == [1, 2]
            assert await lines(client, "epoch=e1&from_seq=3") == []
            assert ranks.snapshots == 0

    run(scene)


@pytest.mark.parametrize("query", ["epoch=another&from_seq=1", "from_seq=99", "epoch=e1"])
def test_another_epoch_or_an_unknown_number_means_a_snapshot(query: str) -> None:
    async def scene() -> None:
        ranks = ScriptedRanks(1)
        async with serving(ranks) as (client, _):
            ranks.send()
            assert [line["type"] for line in await lines(client, query)] == ["snapshot"]

    run(scene)


def test_events_no_longer_kept_are_replaced_by_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        ranks = ScriptedRanks(1)
        async with serving(ranks) as (client, streams):
            for _ in range(kv_event_stream.KEEP + 5):
                ranks.send()
            assert len(streams._recent[0].payloads) == kv_event_stream.KEEP
            assert [line["type"] for line in await lines(client, "from_seq=4")] == ["snapshot"]
            assert len(await lines(client, "from_seq=5")) == kv_event_stream.KEEP

    run(scene)


def test_living_stream_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_stream, "ALIVE_SECS", 0.01)

    async def scene() -> None:
        async with serving(ScriptedRanks(1)) as (client, _):
            answer = await client.get("/v1/kv_events?from_seq=0")
            assert await asyncio.wait_for(answer.content.readline(), 10) == b"\n"
            answer.close()

    run(scene)


def test_end_of_a_rank_or_of_the_node_ends_the_stream() -> None:
    async def scene() -> None:
        ranks = ScriptedRanks(2)
        async with serving(ranks) as (client, streams):
            dying = await client.get("/v1/kv_events?dp_rank=0&from_seq=0")
            ranks.ranks[0].dead = "killed"
            streams.on_death(0)
            last = await next_line(dying.content)
            assert (last["type"], last["error"]["code"]) == ("error", "engine_dead")
            assert await dying.content.read() == b""
            living = await client.get("/v1/kv_events?dp_rank=1&from_seq=0")
            await streams.close(web.Application())
            assert await asyncio.wait_for(living.content.read(), 10) == b""

    run(scene)


@pytest.mark.parametrize(
    ("size", "query", "param", "says"),
    [
        (2, "", "dp_rank", "this engine has 2 ranks, each with its own cache: name one"),
        (2, "dp_rank=2", "dp_rank", "dp_rank '2': give an integer from 0 to 1"),
        (1, "from_seq=-1", "from_seq", "from_seq '-1': give an integer from 0"),
        (1, "from_seq=" + "9" * 19, "from_seq", "give an integer from 0 to 9223372036854775807"),
        (1, "follow=yes", "follow", "follow 'yes': give true or false"),
    ],
)
def test_wrong_values_are_refused(size: int, query: str, param: str, says: str) -> None:
    async def scene() -> None:
        async with serving(ScriptedRanks(size)) as (client, _):
            answer = await client.get("/v1/kv_events?" + query)
            error = (await answer.json())["error"]
            assert (answer.status, error["param"]) == (400, param)
            assert says in error["message"]

    run(scene)


def test_without_the_flag_the_answer_says_how_to_get_events() -> None:
    async def scene() -> None:
        async with serving(ScriptedRanks(1), enabled=False) as (client, _):
            answer = await client.get("/v1/kv_events")
            assert answer.status == 404
            assert "--kv-events-config" in (await answer.json())["error"]["message"]

    run(scene)
