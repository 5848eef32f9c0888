"""Handlers of operators: drain, abort, suspend, and facts for finding faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from baton.config import EngineConfig
from baton.errors import BadRequest, NotFound, WrongState
from baton.sched.metrics import step_log
from baton.server import fields
from baton.server.http.access.browsers import refuse_other_media_types
from baton.server.http.http_utils import json_response, read_object
from baton.server.http.lifecycle import ServerLifecycle
from baton.server.http.rank_calls import call_all_ranks, call_ranks
from baton.server.http.request_handler import RequestHandler
from baton.server.observability import diagnosis
from baton.server.request.schema import INT64_MAX, MAX_ITEMS, AbortRequest
from baton.server.text.native import native_extension
from baton.server.worker.client import RankSet
from baton.server.worker.control import (
    AbortByRoom,
    ReadLedger,
    ReadSteps,
    ResumeItems,
    SuspendItems,
)
from baton.server.worker.messages import ReplyMessage


@dataclass(frozen=True, slots=True)
class AdminContext:
    """The node's state, its running requests and its ranks."""

    config: EngineConfig
    incarnation: str
    lifecycle: ServerLifecycle
    answering: RequestHandler
    ranks: RankSet


ADMIN: web.AppKey[AdminContext] = web.AppKey("admin", AdminContext)


async def show_drain(request: web.Request) -> web.Response:
    """Requests that are left."""
    return await _answer_drain_report(request.app[ADMIN])


async def begin_drain(request: web.Request) -> web.Response:
    """Refuse new requests and finish the others."""
    context = request.app[ADMIN]
    context.lifecycle.begin_drain()
    return await _answer_drain_report(context)


async def end_drain(request: web.Request) -> web.Response:
    context = request.app[ADMIN]
    context.lifecycle.end_drain()
    return await _answer_drain_report(context)


async def _answer_drain_report(context: AdminContext) -> web.Response:
    report = await context.lifecycle.report()
    return json_response({**report, "incarnation": context.incarnation})


async def diagnose(request: web.Request) -> web.Response:
    """Facts for `baton doctor`; the ranks' ledgers without timelines, whose room 0 is never
    drawn.
    """
    context = request.app[ADMIN]
    is_any_ready = any(rank.ready for rank in context.ranks.ranks)
    books = await call_all_ranks(context.ranks, ReadLedger(room=0)) if is_any_ready else []
    refuse_other_media_types(request)
    asked = await read_object(request)
    return json_response(await diagnosis.diagnose(context.config, asked, books))


async def show_steps(request: web.Request) -> web.Response:
    """The scheduler's last decisions per rank; ?n= at most so many, newest last."""
    raw = request.query.get("n", str(step_log.RING))
    if not (raw.isascii() and raw.isdigit() and 1 <= int(raw[:9]) <= step_log.RING):
        raise BadRequest(f"n is {raw[:50]!r}; give 1 to {step_log.RING}", param="n")
    ranks = request.app[ADMIN].ranks
    return json_response({"ranks": await call_all_ranks(ranks, ReadSteps(int(raw)))})


async def abort_requests(request: web.Request) -> web.Response:
    context = request.app[ADMIN]
    refuse_other_media_types(request)
    asked = fields.read(AbortRequest, await read_object(request))
    everything = asked.abort_all or False
    _, rid = fields.first(asked, "rid", "request_id")
    rooms = fields.integers("bootstrap_room", asked.bootstrap_room, MAX_ITEMS, 0, INT64_MAX)
    if not everything and rid is None and not rooms:
        raise BadRequest("give rid, bootstrap_room, or abort_all: true", param="rid")
    count = 0
    if everything:
        count = context.answering.cancel(None)
    elif rid is not None:
        count = context.answering.cancel(rid)
    ranks = context.ranks
    if any(rank.ready for rank in ranks.ranks):
        count += await _abort_in_ranks(ranks, rid, rooms=list(rooms), everything=everything)
        if not count and rid is not None:
            # A router may know the request by its id without the prefix of an API, or with it.
            for spelling in native_extension().id_spellings(rid)[1:]:
                count += await _abort_in_ranks(ranks, spelling)
    return json_response({"success": True, "aborted": count})


async def _abort_in_ranks(
    ranks: RankSet, rid: str | None, *, rooms: Sequence[int] = (), everything: bool = False
) -> int:
    abort = AbortByRoom(list(rooms), rid, all_leases=everything)
    return sum(reply["aborted"] for reply in await call_all_ranks(ranks, abort))


async def suspend_request(request: web.Request) -> web.Response:
    """All items of the request, or none."""
    context = request.app[ADMIN]
    rid = request.match_info["id"]
    handles = _handles_of(context, rid)
    suspensions = {rank: SuspendItems(items) for rank, items in handles.items()}
    replies = await call_ranks(context.ranks, suspensions)
    refused = [reply.result["message"] for reply in replies.values() if not reply.ok]
    if refused:
        # A request of which one rank runs a part never ends while the other part is suspended.
        suspended = [rank for rank, reply in replies.items() if reply.ok]
        resumptions = {rank: ResumeItems(handles[rank]) for rank in suspended}
        await call_ranks(context.ranks, resumptions)
        raise WrongState(refused[0])
    return _answer_change(rid, "suspended", replies)


async def resume_request(request: web.Request) -> web.Response:
    context = request.app[ADMIN]
    rid = request.match_info["id"]
    handles = _handles_of(context, rid)
    resumptions = {rank: ResumeItems(items) for rank, items in handles.items()}
    replies = await call_ranks(context.ranks, resumptions)
    return _answer_change(rid, "resumed", replies)


def _handles_of(context: AdminContext, rid: str) -> dict[int, list[int]]:
    """By rank the handles of the request's unfinished items."""
    handles: dict[int, list[int]] = {}
    for generation in context.answering.live(rid):
        for running in generation.items:
            if running.rank is not None and context.ranks.runs(running.handle):
                handles.setdefault(running.rank.dp_rank, []).append(running.handle)
    if not handles:
        raise _no_such_request(rid)
    return handles


def _answer_change(rid: str, state: str, replies: dict[int, ReplyMessage]) -> web.Response:
    found = sum(int(reply.result["found"]) for reply in replies.values())
    if not found:  # it ended while the question was on its way
        raise _no_such_request(rid)
    return json_response({"rid": rid, "state": state, "items": found})


def _no_such_request(rid: str) -> NotFound:
    return NotFound(
        f"no request {rid[:200]!r} is being answered here; give the rid (or the x-request-id "
        "header) it was sent with",
        param="rid",
    )
