"""Handlers of load, prefix cache, pages and transfers."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from baton.errors import BadRequest
from baton.server.http.http_utils import json_response
from baton.server.http.rank_calls import call_all_ranks
from baton.server.observability import load_report
from baton.server.response.kv_event_stream import KvStreams
from baton.server.worker.client import RankSet
from baton.server.worker.control import FlushCache, ReadLedger


@dataclass(frozen=True, slots=True)
class KvContext:
    """The ranks, and the streams of what they cache."""

    incarnation: str
    ranks: RankSet
    streams: KvStreams


KV: web.AppKey[KvContext] = web.AppKey("kv", KvContext)


async def show_loads(request: web.Request) -> web.Response:
    context = request.app[KV]
    ranks = context.ranks.ranks
    return json_response(
        {
            "incarnation": context.incarnation,
            "dp_rank_count": len(ranks),
            "loads": [load_report.make_load(rank) for rank in ranks],
        }
    )


async def show_sglang_load(request: web.Request) -> web.Response:
    ranks = request.app[KV].ranks.ranks
    return json_response([load_report.make_sglang_load(rank) for rank in ranks])


async def stream_events(request: web.Request) -> web.StreamResponse:
    return await request.app[KV].streams.serve(request)


async def flush_cache(request: web.Request) -> web.Response:
    ranks = await call_all_ranks(request.app[KV].ranks, FlushCache())
    return json_response({"success": True, "ranks": ranks})


async def show_ledger(request: web.Request) -> web.Response:
    return json_response({"ranks": await call_all_ranks(request.app[KV].ranks, ReadLedger())})


async def show_rooms(request: web.Request) -> web.Response:
    """Timelines of live KV transfers; ?room=N for one."""
    raw = request.query.get("room")
    if raw is not None and not (raw.isascii() and raw.isdigit() and len(raw) < 20):
        raise BadRequest(f"room {raw[:50]!r} is no integer", param="room")
    room = None if raw is None else int(raw)
    replies = await call_all_ranks(request.app[KV].ranks, ReadLedger(room))
    return json_response(
        {"ranks": [{"dp_rank": r["dp_rank"], "rooms": r.get("rooms", [])} for r in replies]}
    )
