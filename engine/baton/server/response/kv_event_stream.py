"""`GET /v1/kv_events`: what one DP rank has cached, as lines of JSON: a snapshot if need be, then
batch after batch.

1. The rank sends every batch to the front, which keeps the last few (`RecentEvents`).
2. A reader names the epoch and the first number it wants. Is either unknown or no longer here, it
   gets a snapshot of the rank's tree and everything after it; else just everything from that number
   on.
3. The stream goes on until the reader leaves, the rank dies or the node stops; an empty line every
   few seconds shows that it lives. A reader slower than the batches gets another snapshot instead
   of what it missed.

Invariants: memory is bounded (`KEEP` batches per rank, one snapshot per reader being served); the
numbers of a stream have no gap except before a snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from baton.errors import BadRequest, EngineDead, EngineError, NotFound
from baton.server.worker.client import RankClient, RankSet
from baton.server.worker.control import ReadKvSnapshot
from baton.server.worker.kv_events import codec
from baton.server.worker.messages import KvEvents

KEEP = 1024
"""Batches per rank that a reader may be behind by."""
ALIVE_SECS = 15.0
SNAPSHOT_SECS = 30.0
MAX_SEQ = 2**63 - 1


@dataclass(slots=True)
class RecentEvents:
    """The last batches of one rank."""

    next_seq: int = 0
    payloads: deque[bytes] = field(default_factory=lambda: deque(maxlen=KEEP))
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Replaced at every change: who holds one waits for the next."""

    @property
    def first_seq(self) -> int:
        return self.next_seq - len(self.payloads)

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class KvStreams:
    """All readers of this front."""

    def __init__(self, ranks: RankSet, enabled: bool) -> None:
        self._ranks = ranks
        self._enabled = enabled
        self._recent = [RecentEvents() for _ in ranks.ranks]
        self._is_closing = False
        ranks.on_kv_events = self._on_events

    def _on_events(self, message: KvEvents) -> None:
        recent = self._recent[message.dp_rank]
        recent.payloads.append(message.payload)
        recent.next_seq = message.seq + 1
        recent.wake()

    def on_death(self, dp_rank: int) -> None:
        self._recent[dp_rank].wake()

    async def close(self, _app: web.Application) -> None:
        """The node stops: end all streams."""
        self._is_closing = True
        for recent in self._recent:
            recent.wake()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """The handler. Query: dp_rank (needed with several), epoch, from_seq, follow=false to end
        when caught up.
        """
        if not self._enabled:
            raise NotFound(
                "this engine announces no KV events; start it with "
                "--kv-events-config '{\"enable_kv_cache_events\": true}'"
            )
        rank = self._ranks.choose(self._rank_asked(request))
        epoch = request.query.get("epoch")
        from_seq = _integer(request, "from_seq", MAX_SEQ)
        if from_seq is not None and epoch is not None and epoch != rank.info["kv_events"]["epoch"]:
            from_seq = None
        follow = request.query.get("follow", "true")
        if follow not in ("true", "false"):
            raise BadRequest(f"follow {follow[:50]!r}: give true or false", param="follow")
        response = web.StreamResponse(
            headers={"content-type": "application/x-ndjson", "cache-control": "no-store"}
        )
        response.enable_chunked_encoding()
        await response.prepare(request)
        try:
            async with contextlib.aclosing(
                self._lines(rank, from_seq, follow=follow == "true")
            ) as lines:
                async for line in lines:
                    await response.write(line)
        except EngineError as err:  # the headers are out: the reason is the last line
            await response.write(_line({"type": "error", **err.body()}))
        await response.write_eof()
        return response

    def _rank_asked(self, request: web.Request) -> int:
        last = len(self._ranks.ranks) - 1
        asked = _integer(request, "dp_rank", last)
        if asked is None and last > 0:
            raise BadRequest(
                f"this engine has {last + 1} ranks, each with its own cache: name one",
                param="dp_rank",
            )
        return asked or 0

    async def _lines(
        self, rank: RankClient, from_seq: int | None, *, follow: bool
    ) -> AsyncGenerator[bytes, None]:
        recent = self._recent[rank.dp_rank]
        about = {"epoch": rank.info["kv_events"]["epoch"], "dp_rank": rank.dp_rank}
        at = from_seq
        while True:
            changed = recent.changed
            if at is None or not recent.first_seq <= at <= recent.next_seq:
                # Answers and batches come through one socket in order: what is before the snapshot
                # has arrived.
                reply = await self._ranks.control(rank, ReadKvSnapshot(), SNAPSHOT_SECS)
                at = int(reply.result["seq"])
                yield _events_line("snapshot", about, at, reply.result["payload"])
                continue
            if at < recent.next_seq:
                yield _events_line("batch", about, at, recent.payloads[at - recent.first_seq])
                at += 1
                continue
            if rank.dead is not None:
                raise EngineDead(
                    f"rank {rank.dp_rank} of this engine is gone ({rank.dead}); its cache is lost"
                )
            if not follow or self._is_closing:
                return
            try:
                await asyncio.wait_for(changed.wait(), ALIVE_SECS)
            except asyncio.TimeoutError:
                yield b"\n"


def _integer(request: web.Request, name: str, most: int) -> int | None:
    raw = request.query.get(name)
    if raw is None:
        return None
    if not (raw.isascii() and raw.isdigit() and len(raw) < 20 and int(raw) <= most):
        raise BadRequest(f"{name} {raw[:50]!r}: give an integer from 0 to {most}", param=name)
    return int(raw)


def _events_line(kind: str, about: dict[str, Any], seq: int, payload: bytes) -> bytes:
    ts, events = codec.as_objects(payload)
    return _line({"type": kind, **about, "seq": seq, "ts": ts, "events": events})


def _line(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value) + b"\n"
