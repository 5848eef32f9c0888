"""Answering a generation request: body in, validated, run on the ranks, one JSON or a stream of
events out.

1. the body is read and validated; a Generation is entered in the table of live ones and started;
2. a whole answer collects deltas until the end; a stream sends them as they come, its headers with
   the first token, error or keep-alive, so that an error before it still has its HTTP status;
3. whatever happens (end, error, disconnect = cancellation by aiohttp), `finally` closes the
   Generation, frees the ranks, counts the outcome and writes the request's one log line.

Invariant: a stream ends with one finish_reason per choice or one error event, then [DONE].
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import msgspec
from aiohttp import HttpVersion11, web

from baton.errors import Aborted, Draining, EngineError, RateLimited
from baton.server.http.deadline_headers import with_deadline_headers
from baton.server.http.http_utils import REQUEST_ID, read_body, send_json_body
from baton.server.http.tracer import SpanTracer
from baton.server.logs import fields
from baton.server.observability import load_report
from baton.server.observability.metrics import EngineMetrics
from baton.server.request.accepted import AcceptedRequest
from baton.server.request.validation import RequestValidator
from baton.server.response.generation import ClientConnection, Generation
from baton.server.text.answer_spec import Dialect
from baton.server.text.native import native_extension
from baton.server.worker.client import RankSet

log = logging.getLogger("baton.front")

KEEPALIVE_SECS = 15.0
"""Idle proxies cut connections after 30 to 60 s (nginx, cloud load balancers)."""
SLOW_CLIENT_SECS = 60.0
"""After the request's own timeout the client has this long to read the answer; then its connection
is cut.
"""
KEEPALIVE = b": waiting\n\n"
SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
_PLAIN_NAME = re.compile(r"[^A-Za-z0-9_.:\-]")


Validate = Callable[[bytes], Awaitable[AcceptedRequest]]
"""Reads a request's body. Raises EngineError."""


@dataclass(eq=False)
class RequestHandler:
    """The live requests of this process, and how they are answered."""

    ranks: RankSet
    metrics: EngineMetrics
    timeout_secs: float
    admit: Callable[[], None]
    """Raises when the node does not take requests now (loading, draining, dead)."""
    validator: RequestValidator
    tracer: SpanTracer | None
    incarnation: str
    """Id of this process, for the load reports."""

    def __post_init__(self) -> None:
        self._live: set[Generation] = set()
        self.arrivals: dict[object, float] = {}
        """Requests from before their body is read until their answer is out, oldest first
        (monotonic seconds).
        """
        self.is_idle = asyncio.Event()
        """Set while no request is being answered."""
        self.is_idle.set()

    @property
    def streams(self) -> int:
        """Answers in progress that are streams."""
        return sum(generation.accepted.answer.stream for generation in self._live)

    def cut_all(self) -> None:
        """End every live request with an error: this process is about to go."""
        for generation in list(self._live):
            generation.fail(
                Draining(
                    "this node was shut down before the answer was finished", retry_after_secs=2
                )
            )

    def cancel(self, rid: str | None) -> int:
        """End the live requests with this rid (None: all) as aborted; returns how many."""
        found = list(self._live) if rid is None else self.live(rid)
        for generation in found:
            generation.fail(Aborted("the request was aborted with /abort_request"))
        return len(found)

    def live(self, rid: str) -> list[Generation]:
        """The requests that are being worked on with this rid, or else with this id but for the
        prefix of an API.
        """
        equal = [generation for generation in self._live if generation.rid == rid]
        plain_id = native_extension().plain_id
        plain = plain_id(rid)
        return equal or [live for live in self._live if plain_id(live.rid) == plain]

    @contextmanager
    def arrival(self, arrived: float) -> Iterator[None]:
        """Count a request among those in progress, which a drain waits for."""
        ticket = object()
        self.arrivals[ticket] = arrived
        self.is_idle.clear()
        try:
            yield
        finally:
            del self.arrivals[ticket]
            if not self.arrivals:
                self.is_idle.set()

    async def answer(
        self, request: web.Request, endpoint: str, validate: Validate, dialect: Dialect
    ) -> web.StreamResponse:
        """The whole life of one request. Raises EngineError when no byte of the answer was sent."""
        arrived = time.monotonic()
        with self.arrival(arrived):
            return await self._answer(request, endpoint, validate, dialect, arrived=arrived)

    async def _answer(
        self,
        request: web.Request,
        endpoint: str,
        validate: Validate,
        dialect: Dialect,
        *,
        arrived: float,
    ) -> web.StreamResponse:
        status: int | None = 500
        outcome = "internal_error"
        parent = None if self.tracer is None else self.tracer.begin(request.headers)
        generation: Generation | None = None
        limit = self.timeout_secs
        cut = asyncio.get_running_loop().call_later(
            limit + SLOW_CLIENT_SECS, _cut_connection, request
        )
        self.metrics.of_endpoint(endpoint).in_flight.inc()
        try:
            self.admit()
            body = await read_body(request, self.validator.limits.refuse_oversized)
            accepted = with_deadline_headers(await validate(body), request.headers)
            accepted = self._take_tokens(accepted, request.headers)
            limit = min(limit, accepted.deadline_secs or limit)
            if accepted.ignored:
                self.metrics.ignored.inc(len(accepted.ignored))
            request_id = request[REQUEST_ID]
            counts_tokens = self.validator.tenancy.limits_rates
            generation = Generation(
                rid=accepted.answer.rid or request_id,
                request_id=request_id,
                accepted=accepted,
                dialect=dialect,
                ranks=self.ranks,
                metrics=self.metrics,
                endpoint=endpoint,
                arrived=arrived,
                timeout_secs=limit,
                eos_token_ids=self.validator.eos_token_ids,
                on_generated=partial(self._spend, accepted.tenant) if counts_tokens else None,
                parent=parent,
                reports_tokens=native_extension().headers.EMIT_TOKENS in request.headers
                and accepted.is_resumable(dialect),
            )
            self._live.add(generation)
            generation.start()
            headers = _ignored_header(accepted)
            if accepted.answer.stream:
                response, outcome = await self._stream(request, generation, headers)
                status = 200
                return response
            whole = await self._whole(generation)
            status = 200
            outcome = "ok"
            headers |= self._router_headers(generation)
            return await send_json_body(request, whole, headers)
        except EngineError as err:
            status = err.status
            outcome = err.code
            if generation is not None and generation.first_token_at is None and err.status == 503:
                self._spend(accepted.tenant, -accepted.prompt_tokens)
            raise
        except (asyncio.CancelledError, ConnectionError):
            status = None
            outcome = "client_disconnected"
            waiting = generation is None or generation.first_token_at is None
            self.metrics.disconnects.labels("before_first_token" if waiting else "streaming").inc()
            raise
        finally:
            cut.cancel()
            self.metrics.of_endpoint(endpoint).in_flight.dec()
            self.metrics.requests.labels(endpoint, outcome).inc()
            if generation is not None:
                generation.close()
                self._live.remove(generation)
                self._account(generation, endpoint, outcome, arrived)
            if self.tracer is not None and parent is not None:
                self.tracer.answered(parent, request, generation, status, outcome, arrived)

    def _take_tokens(
        self, accepted: AcceptedRequest, headers: Mapping[str, str]
    ) -> AcceptedRequest:
        """Set class and tenant, and take the tenant's tokens for its prompt. Raises RateLimited."""
        tenancy = self.validator.tenancy
        priority, priority_class, tenant = tenancy.resolve(
            accepted.priority_class, accepted.tenant, accepted.priority, headers
        )
        try:
            tenancy.admit(tenant, accepted.prompt_tokens, time.monotonic())
        except RateLimited:
            self.metrics.rate_limited.inc()
            raise
        if (priority, priority_class, tenant) == (
            accepted.priority,
            accepted.priority_class,
            accepted.tenant,
        ):
            return accepted
        return msgspec.structs.replace(
            accepted, priority=priority, priority_class=priority_class, tenant=tenant
        )

    def _spend(self, tenant: str, tokens: int) -> None:
        self.validator.tenancy.spend(tenant, tokens, time.monotonic())

    async def _whole(self, generation: Generation) -> bytes:
        """The body of an answer that is no stream."""
        body = b""
        while not generation.finished:
            body += await generation.next() or b""
        return body

    async def _stream(
        self, request: web.Request, generation: Generation, headers: dict[str, str]
    ) -> tuple[web.StreamResponse, str]:
        """Send events until the end; returns the outcome's code. Errors before the first byte are
        raised.
        """
        response = web.StreamResponse(headers={**SSE_HEADERS, **headers})

        async def send(data: bytes) -> None:
            if not response.prepared:
                response.headers.update(self._router_headers(generation))
                await response.prepare(request)
            await response.write(data)

        outcome = "ok"
        try:
            while not generation.finished:
                data = await generation.next(KEEPALIVE_SECS)
                if data is None:
                    self.metrics.keepalives.inc()
                    data = KEEPALIVE
                if data:
                    await send(data)
                if not generation.finished:
                    generation.write_directly(_connection_of(request))
        except Exception as err:
            if not response.prepared or isinstance(err, ConnectionError):
                raise
            if not isinstance(err, EngineError):
                log.exception("rid=%s failed in mid-stream", generation.rid)
                err = EngineError("internal error; the engine's log has the details")
            outcome = err.code
            await send(generation.break_off(err))
        await response.write_eof()
        return response, outcome

    def _router_headers(self, generation: Generation) -> dict[str, str]:
        """For routers: load of the rank that answers (the first item's) at this moment, way to its
        first token.
        """
        first = generation.items[0]
        if first.rank is None:
            load = load_report.format_incarnation_header(self.incarnation)
        else:
            load = load_report.format_load_header(first.rank, self.incarnation)
        names = native_extension().headers
        headers = {names.LOAD: load}
        if generation.stages is not None:
            headers[names.STAGES] = load_report.format_stages_header(generation.stages)
        return headers

    def _account(self, g: Generation, endpoint: str, outcome: str, arrived: float) -> None:
        e2e = time.monotonic() - arrived
        m = self.metrics
        m.prompt_tokens.inc(g.prompt_tokens)
        m.cached_tokens.inc(g.cached_tokens)
        m.completion_tokens.inc(g.completion_tokens)
        if outcome == "ok":
            m.of_endpoint(endpoint).e2e.observe(e2e)
            m.prompt_length.observe(g.prompt_tokens)
            m.completion_length.observe(g.completion_tokens)
        ttft = None if g.first_token_at is None else g.first_token_at - arrived
        after_first = max(g.completion_tokens - len(g.items), 0)
        first = g.items[0]
        tpot = None if ttft is None or not after_first else (e2e - ttft) / after_first
        log.info(
            "request",
            extra=fields(
                rid=g.rid,
                endpoint=endpoint,
                outcome=outcome,
                rank=None if first.rank is None else first.rank.dp_rank,
                room=None if first.item.rendezvous is None else first.item.rendezvous.room,
                items=len(g.items),
                prompt_tokens=g.prompt_tokens,
                cached_tokens=g.cached_tokens,
                completion_tokens=g.completion_tokens,
                ttft_ms=None if ttft is None else round(ttft * 1e3, 1),
                tpot_ms=None if tpot is None else round(tpot * 1e3, 2),
                e2e_ms=round(e2e * 1e3, 1),
            ),
        )


def _connection_of(request: web.Request) -> ClientConnection:
    """Where the events of a stream go once the response's head is out. Raises ConnectionError."""
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client has closed the connection")
    _, high_water = transport.get_write_buffer_limits()
    is_chunked = request.version >= HttpVersion11
    return ClientConnection(transport, request.writer.drain, high_water, is_chunked)


def _ignored_header(accepted: AcceptedRequest) -> dict[str, str]:
    """Names of fields that had no effect, made safe for a header."""
    if not accepted.ignored:
        return {}
    return {
        "x-ignored-params": ",".join(
            _PLAIN_NAME.sub("?", name[:64]) for name in accepted.ignored[:32]
        )
    }


def _cut_connection(request: web.Request) -> None:
    if request.transport is not None:
        log.warning(
            "rid=%s: the client does not read its answer; closing the connection",
            request[REQUEST_ID],
        )
        request.transport.abort()
