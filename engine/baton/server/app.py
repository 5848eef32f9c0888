"""The HTTP server of an engine: routes, the error middleware, and the life of a request in the front.

1. `_guard` gives the request an id, checks the key, and turns every exception into our error object;
2. a generation handler reads the body once, validates it, starts a Generation and answers whole or as a stream;
3. whatever happens (end, error, disconnect = cancellation by aiohttp), `finally` closes the Generation: the ranks
   are freed.

Stream headers go out with the first token, error or keep-alive, so an error before it still has its HTTP status.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import hmac
import logging
import re
import time
from array import array
from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Any, Protocol

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from baton.config import EngineConfig
from baton.errors import (
    BadRequest,
    Draining,
    EngineDead,
    EngineError,
    InvalidApiKey,
    InvalidJson,
    MethodNotAllowed,
    NotFound,
    NotReady,
    PayloadTooLarge,
)
from baton.request import SamplingParams
from baton.server.fields import Fields
from baton.server.generation import Delta, Generation
from baton.server.metrics import Metrics
from baton.server.model_dir import ModelFacts
from baton.server.native import GenerateFormat
from baton.server.openai import ChatFormat, CompletionFormat, encode_json, sse
from baton.server.ranks import Rank, Ranks
from baton.server.tokenizer import Tokenizer
from baton.server.validate import Accepted, Item, TextRules, Validator, new_id

log = logging.getLogger("baton.front")

MAX_BODY_BYTES = 32 * 2**20
"""A 128k-token prompt as JSON numbers is about 1 MiB; this leaves room for batches of them."""
KEEPALIVE_SECS = 15.0
"""Idle proxies cut connections after 30 to 60 s (nginx, cloud load balancers)."""
SLOW_CLIENT_SECS = 60.0
"""After the request's own timeout the client has this long to read the answer; then its connection is cut."""
CONTROL_SECS = 10.0
HEALTH_GENERATE_SECS = 20.0
DONE = b"data: [DONE]\n\n"
SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/health_generate", "/ping", "/metrics"})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
_PLAIN_NAME = re.compile(r"[^A-Za-z0-9_.\-]")
SECRETS = ("api_key", "cluster_key")

REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)


class Phase(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Format(Protocol):
    id: str

    def __init__(self, generation: Generation, request_id: str, model: str) -> None: ...
    def take(self, delta: Delta) -> None: ...
    def event(self, delta: Delta) -> bytes: ...
    def end(self) -> bytes: ...
    def whole(self) -> Any: ...


def version() -> str:
    try:
        return metadata.version("baton")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "0+source"


def error_response(err: EngineError) -> web.Response:
    headers = {} if err.retry_after_secs is None else {"retry-after": str(err.retry_after_secs)}
    return _json(err.body(), err.status, headers)


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=encode_json(value), status=status, headers=headers, content_type="application/json")


class Front:
    """The front process's state and handlers. `ranks` appears when the sockets are bound."""

    def __init__(self, config: EngineConfig, facts: ModelFacts, tokenizer: Tokenizer, ranks: Ranks) -> None:
        self.config = config
        self.facts = facts
        self.tokenizer = tokenizer
        self.ranks = ranks
        self.validator = Validator(config, facts, tokenizer)
        self.metrics = Metrics(version(), config.disaggregation_mode, facts.name)
        self.phase = Phase.STARTING
        self.bootstrap_port: int | None = None
        self.started_at = int(time.time())
        self._live: dict[str, set[Generation]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        ranks.on_stats = lambda rank: self.metrics.report(rank.dp_rank, rank.gauges, rank.counters)

    # ---- state -------------------------------------------------------------------------------------------------

    def became_ready(self) -> None:
        """All ranks have loaded: the pool may hold less than the model's context."""
        pools = [i for r in self.ranks.ranks if isinstance(i := r.info.get("max_total_num_tokens"), int)]
        self.validator.context_length = min([self.facts.context_length, *pools])
        self.phase = Phase.READY

    def trouble(self) -> EngineError | None:
        """Why a request sent now would not be accepted; None: it would."""
        if self.phase is Phase.DRAINING:
            return Draining("this node is draining; send the request to another", retry_after_secs=2)
        dead = [r for r in self.ranks.ranks if r.dead is not None]
        if dead:
            return EngineDead(f"rank {dead[0].dp_rank} of this engine is gone ({dead[0].dead})", retry_after_secs=5)
        if self.phase is Phase.STARTING:
            ready = sum(r.ready for r in self.ranks.ranks)
            return NotReady(
                f"the model is loading: {ready} of {len(self.ranks.ranks)} ranks are ready", retry_after_secs=2
            )
        return None

    async def idle(self) -> None:
        """Wait until no request is live."""
        await self._idle.wait()

    def cut_all(self) -> None:
        """End every live request with an error: this process is about to go."""
        for generation in [g for same in self._live.values() for g in same]:
            generation.fail(Draining("this node was shut down before the answer was finished", retry_after_secs=2))

    def _refuse_if_not_accepting(self) -> None:
        # A dead rank fails its own requests; the living ones serve what still reaches this node.
        trouble = self.trouble()
        if trouble is not None and not (isinstance(trouble, EngineDead) and self.ranks.any_alive):
            raise trouble

    # ---- generation --------------------------------------------------------------------------------------------

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "chat", self.validator.chat, ChatFormat)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "completions", self.validator.completion, CompletionFormat)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "generate", self.validator.generate, GenerateFormat)

    async def _generate(
        self,
        request: web.Request,
        endpoint: str,
        validate: Callable[[dict[str, Any]], Awaitable[Accepted]],
        format: type[Format],
    ) -> web.StreamResponse:
        arrived = time.monotonic()
        outcome = "internal_error"
        generation: Generation | None = None
        limit = self.config.request_timeout_secs
        cut = asyncio.get_running_loop().call_later(limit + SLOW_CLIENT_SECS, _cut_connection, request)
        self.metrics.in_flight.labels(endpoint).inc()
        try:
            self._refuse_if_not_accepting()
            accepted = await validate(await _read_object(request))
            if accepted.ignored:
                self.metrics.ignored.inc(len(accepted.ignored))
            request_id = request[REQUEST_ID]
            generation = Generation(
                accepted.rid or request_id, accepted, self.ranks, self.tokenizer, self.metrics, endpoint, arrived, limit
            )
            self._enter(generation)
            generation.start()
            shape = format(generation, request_id, self.facts.name)
            headers = _ignored_header(accepted)
            if accepted.stream:
                response, outcome = await self._stream(request, generation, shape, headers)
                return response
            while not generation.finished:
                for delta in await generation.next() or ():
                    shape.take(delta)
            outcome = "ok"
            return _json(shape.whole(), headers=headers)
        except EngineError as err:
            outcome = err.code
            raise
        except (asyncio.CancelledError, ConnectionError):
            outcome = "client_disconnected"
            waiting = generation is None or generation.first_token_at is None
            self.metrics.disconnects.labels("before_first_token" if waiting else "streaming").inc()
            raise
        finally:
            cut.cancel()
            self.metrics.in_flight.labels(endpoint).dec()
            self.metrics.requests.labels(endpoint, outcome).inc()
            if generation is not None:
                generation.close()
                self._leave(generation)
                self._account(generation, endpoint, outcome, arrived)

    async def _stream(
        self, request: web.Request, generation: Generation, shape: Format, headers: dict[str, str]
    ) -> tuple[web.StreamResponse, str]:
        """Send events until the end; returns the outcome's code. Errors before the first byte are raised."""
        response = web.StreamResponse(headers={**SSE_HEADERS, **headers})

        async def send(data: bytes) -> None:
            if not response.prepared:
                await response.prepare(request)
            await response.write(data)

        outcome = "ok"
        try:
            while not generation.finished:
                deltas = await generation.next(KEEPALIVE_SECS)
                if deltas is None:
                    self.metrics.keepalives.inc()
                    await send(b": waiting\n\n")
                    continue
                data = b"".join(shape.event(d) for d in deltas)
                if generation.finished:
                    data += shape.end() + DONE
                if data:
                    await send(data)
        except EngineError as err:
            if not response.prepared:
                raise
            outcome = err.code
            await send(sse(err.body()) + DONE)
        except ConnectionError:
            raise
        except Exception:
            if not response.prepared:
                raise
            log.exception("rid=%s failed in mid-stream", generation.rid)
            outcome = "internal_error"
            await send(sse(EngineError("internal error; the engine's log has the details").body()) + DONE)
        await response.write_eof()
        return response, outcome

    def _enter(self, generation: Generation) -> None:
        self._live.setdefault(generation.rid, set()).add(generation)
        self._idle.clear()

    def _leave(self, generation: Generation) -> None:
        same = self._live.get(generation.rid)
        if same is not None:
            same.discard(generation)
            if not same:
                del self._live[generation.rid]
        if not self._live:
            self._idle.set()

    def _account(self, g: Generation, endpoint: str, outcome: str, arrived: float) -> None:
        now = time.monotonic()
        m = self.metrics
        m.prompt_tokens.inc(g.prompt_tokens)
        m.cached_tokens.inc(g.cached_tokens)
        m.completion_tokens.inc(g.completion_tokens)
        if outcome == "ok":
            m.e2e.labels(endpoint).observe(now - arrived)
            m.prompt_length.observe(g.prompt_tokens)
            m.completion_length.observe(g.completion_tokens)
        ttft = None if g.first_token_at is None else g.first_token_at - arrived
        after_first = max(g.completion_tokens - len(g.tracks), 0)
        first = g.tracks[0]
        meet = first.item.rendezvous
        log.info(
            "request rid=%s endpoint=%s outcome=%s rank=%s room=%s items=%d prompt_tokens=%d cached_tokens=%d "
            "completion_tokens=%d ttft_ms=%s tpot_ms=%s e2e_ms=%.1f",
            g.rid, endpoint, outcome, "-" if first.rank is None else first.rank.dp_rank,
            "-" if meet is None else meet.room, len(g.tracks), g.prompt_tokens, g.cached_tokens, g.completion_tokens,
            "-" if ttft is None else f"{ttft * 1e3:.1f}",
            "-" if ttft is None or not after_first else f"{(now - arrived - ttft) / after_first * 1e3:.2f}",
            (now - arrived) * 1e3,
        )  # fmt: skip

    # ---- tokens ------------------------------------------------------------------------------------------------

    async def tokenize(self, request: web.Request) -> web.Response:
        ids = await self.validator.tokenize(await _read_object(request))
        nested = bool(ids) and isinstance(ids[0], list)
        count = [len(row) for row in ids] if nested else len(ids)  # type: ignore[arg-type]
        return _json({"tokens": ids, "count": count, "max_model_len": self.validator.context_length})

    async def detokenize(self, request: web.Request) -> web.Response:
        text = self.validator.detokenize(await _read_object(request))
        # SGLang says `text`, vLLM says `prompt`; clients of both exist.
        return _json({"text": text, "prompt": text})

    # ---- facts -------------------------------------------------------------------------------------------------

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self.facts.name,
            "object": "model",
            "created": self.started_at,
            # Routers of this family decide by this word how to dispatch to a P/D pair: smg 1.13 sends both legs at
            # once to "sglang", which is our protocol, and vLLM's sequential form to everything else.
            "owned_by": "sglang",
            "root": self.facts.name,
            "parent": None,
            "max_model_len": self.validator.context_length,
        }

    async def models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._model_card()]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name != self.facts.name:
            raise NotFound(
                f"model {name[:200]!r} is not served here; this engine serves {self.facts.name!r}", param="model"
            )
        return _json(self._model_card())

    async def model_info(self, request: web.Request) -> web.Response:
        return _json(
            {
                "model_path": str(self.facts.path),
                "tokenizer_path": str(self.facts.tokenizer_path),
                "served_model_name": self.facts.name,
                "is_generation": True,
                "model_type": self.facts.model_type,
                "architectures": self.facts.architectures,
                "context_length": self.validator.context_length,
                "has_chat_template": self.facts.chat_template is not None,
            }
        )

    async def server_info(self, request: web.Request) -> web.Response:
        config = {k: v for k, v in dataclasses.asdict(self.config).items() if k not in SECRETS}
        config["model_path"] = str(self.facts.path)
        config["served_model_name"] = self.facts.name
        config["context_length"] = self.validator.context_length
        if self.bootstrap_port is not None:
            config["disaggregation_bootstrap_port"] = self.bootstrap_port
        ranks = self.ranks.ranks
        return _json(
            {
                **config,
                **ranks[0].info,  # max_total_num_tokens, dtype, layout: equal on all ranks
                "status": self.phase.value,
                "version": version(),
                "priority_order": "higher first",
                "internal_states": [{"dp_rank": r.dp_rank, "ready": r.ready, "dead": r.dead, **r.info} for r in ranks],
            }
        )

    async def loads(self, request: web.Request) -> web.Response:
        loads = [
            {
                "dp_rank": r.dp_rank,
                "num_reqs": len(r.sinks),
                "num_running_reqs": int(r.gauges.get('requests{state="running"}', 0)),
                "num_waiting_reqs": int(r.gauges.get('requests{state="waiting"}', 0)),
                "num_tokens": r.tokens_in_flight,
                "token_usage": r.gauges.get("kv_usage_ratio", 0.0),
            }
            for r in self.ranks.ranks
        ]
        return _json({"dp_rank_count": len(loads), "loads": loads} if request.path.startswith("/v1/") else loads)

    async def metrics_text(self, request: web.Request) -> web.Response:
        self.metrics.ready.set(self.trouble() is None)
        self.metrics.ranks_alive.set(sum(r.dead is None for r in self.ranks.ranks))
        return web.Response(
            body=self.metrics.text(), headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    # ---- health ------------------------------------------------------------------------------------------------

    async def livez(self, request: web.Request) -> web.Response:
        return _json({"status": "alive"})

    async def health(self, request: web.Request) -> web.Response:
        trouble = self.trouble()
        return _json({"status": "ok"}) if trouble is None else error_response(trouble)

    async def health_generate(self, request: web.Request) -> web.Response:
        """One real token on every rank, on the path that requests take."""
        if (trouble := self.trouble()) is not None:
            raise trouble
        token = self.validator.eos_token_ids[0] if self.validator.eos_token_ids else 0
        params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        items = tuple(Item(r.dp_rank, 0, array("i", [token]), params, None, r.dp_rank) for r in self.ranks.ranks)
        probe = Generation(
            "health-" + new_id(), Accepted(rid=None, items=items, n=1, text=TextRules()), self.ranks, self.tokenizer,
            Metrics(), "health", time.monotonic(), HEALTH_GENERATE_SECS,
        )  # fmt: skip
        try:
            probe.start()
            while not probe.finished:
                await probe.next()
        finally:
            probe.close()
        return _json({"status": "ok"})

    # ---- control -----------------------------------------------------------------------------------------------

    async def flush_cache(self, request: web.Request) -> web.Response:
        replies = await self._ask_all("flush_cache")
        if not all(ok for ok, _ in replies):
            raise BadRequest(
                f"the cache was not flushed on every rank: {[r for ok, r in replies if not ok]}; "
                "wait for running requests"
            )
        return _json({"success": True, "ranks": [r for _, r in replies]})

    async def ledger(self, request: web.Request) -> web.Response:
        return _json({"ranks": [r for _, r in await self._ask_all("ledger")]})

    async def rooms(self, request: web.Request) -> web.Response:
        """Timelines of live KV transfers; ?room=N for one."""
        raw = request.query.get("room")
        if raw is not None and not (raw.isascii() and raw.isdigit() and len(raw) < 20):
            raise BadRequest(f"room {raw[:50]!r} is no integer", param="room")
        args = {} if raw is None else {"room": int(raw)}
        replies = await self._ask_all("ledger", **args)
        return _json({"ranks": [{"dp_rank": r["dp_rank"], "rooms": r.get("rooms", [])} for _, r in replies]})

    async def _ask_all(self, op: str, **args: Any) -> list[tuple[bool, dict[str, Any]]]:
        if not any(r.ready for r in self.ranks.ranks):
            raise NotReady("no rank is ready", retry_after_secs=2)

        async def ask(rank: Rank) -> tuple[bool, dict[str, Any]]:
            reply = await self.ranks.control(rank, op, CONTROL_SECS, **args)
            return reply.ok, {"dp_rank": rank.dp_rank, **reply.result}

        return list(await asyncio.gather(*(ask(r) for r in self.ranks.ranks if r.dead is None)))

    async def abort_request(self, request: web.Request) -> web.Response:
        f = Fields(await _read_object(request))
        everything = f.boolean("abort_all", False)
        rid = f.string(f.first("rid", "request_id"))
        if not everything and rid is None:
            raise BadRequest("give rid, or abort_all: true", param="rid")
        found = [g for key, same in self._live.items() if everything or key == rid for g in same]
        for generation in found:
            generation.cancel()
        return _json({"success": True, "aborted": len(found)})

    # ---- the application ---------------------------------------------------------------------------------------

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        app.on_response_prepare.append(_common_headers)
        get, post = app.router.add_get, app.router.add_post
        post("/v1/chat/completions", self.chat)
        post("/v1/completions", self.completion)
        post("/generate", self.generate)
        app.router.add_put("/generate", self.generate)
        get("/v1/models", self.models)
        get("/v1/models/{name:.+}", self.model)
        for path in ("/tokenize", "/v1/tokenize"):
            post(path, self.tokenize)
        for path in ("/detokenize", "/v1/detokenize"):
            post(path, self.detokenize)
        for path in ("/health", "/readyz", "/ping"):
            get(path, self.health)
        get("/livez", self.livez)
        get("/health_generate", self.health_generate)
        for path in ("/get_model_info", "/model_info"):
            get(path, self.model_info)
        for path in ("/get_server_info", "/server_info"):
            get(path, self.server_info)
        for path in ("/v1/loads", "/get_load"):
            get(path, self.loads)
        get("/flush_cache", self.flush_cache)
        post("/flush_cache", self.flush_cache)
        post("/abort_request", self.abort_request)
        get("/metrics", self.metrics_text)
        get("/debug/ledger", self.ledger)
        get("/debug/rooms", self.rooms)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("x-request-id", "")
        request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else new_id()
        try:
            self._check_key(request)
            return await handler(request)
        except EngineError as err:
            return error_response(err)
        except web.HTTPRequestEntityTooLarge:
            return error_response(PayloadTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes; split the batch"))
        except web.HTTPNotFound:
            return error_response(NotFound(f"no such path: {request.path[:200]}"))
        except web.HTTPMethodNotAllowed as err:
            allowed = ", ".join(sorted(err.allowed_methods))
            response = error_response(
                MethodNotAllowed(f"{request.path[:200]} does not accept {request.method}; it accepts {allowed}")
            )
            response.headers["allow"] = allowed
            return response
        except web.HTTPException as err:
            return error_response(BadRequest(f"{err.reason}"))
        except ConnectionError:
            raise  # the client is gone: nobody reads an answer
        except Exception:
            log.exception("rid=%s %s %s failed", request[REQUEST_ID], request.method, request.path)
            return error_response(EngineError("internal error; the engine's log has the details"))

    def _check_key(self, request: web.Request) -> None:
        key = self.config.api_key
        if key is None or request.path in OPEN_PATHS:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), key.encode()):
            raise InvalidApiKey("send the engine's --api-key as 'Authorization: Bearer KEY'")


async def _common_headers(request: web.BaseRequest, response: web.StreamResponse) -> None:
    response.headers["server"] = "baton"
    response.headers["x-request-id"] = request[REQUEST_ID]


def _ignored_header(accepted: Accepted) -> dict[str, str]:
    """Names of fields that had no effect, made safe for a header."""
    if not accepted.ignored:
        return {}
    return {"x-ignored-params": ",".join(_PLAIN_NAME.sub("?", name[:64]) for name in accepted.ignored[:32])}


def _cut_connection(request: web.Request) -> None:
    if request.transport is not None:
        log.warning("rid=%s: the client does not read its answer; closing the connection", request[REQUEST_ID])
        request.transport.abort()


async def _read_object(request: web.Request) -> dict[str, Any]:
    """The body as a JSON object. Raises InvalidJson."""
    raw = await request.read()
    try:
        value = msgspec.json.decode(raw)
    except UnicodeDecodeError as err:
        raise InvalidJson(f"the body is not UTF-8: {err.reason} at byte {err.start}") from err
    except (msgspec.DecodeError, RecursionError) as err:
        raise InvalidJson(f"the body ({len(raw)} bytes) is not JSON: {err}") from err
    if type(value) is not dict:
        raise InvalidJson("the body must be a JSON object")
    return value
