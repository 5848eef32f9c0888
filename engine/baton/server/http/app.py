"""The HTTP server of an engine: its routes, who may call them, and what the node says about itself.

Every request passes `_guard`: it gets an id, its key is checked, and every exception becomes our error object.
Generation is request_handler.py's; here are the other endpoints: tokens, facts, health, control.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from baton import DISTRIBUTION, errors
from baton.config import SECRETS, EngineConfig, kv_events
from baton.sched.metrics import step_log
from baton.sched.setup.from_config import resolve_policy
from baton.server import fields
from baton.server.http import tracer
from baton.server.http.access.browsers import (
    refuse_foreign_page,
    refuse_other_media_types,
    refuse_unknown_host,
)
from baton.server.http.access.client_identity import client_of
from baton.server.http.access.keys import OPEN_PATHS, check_key
from baton.server.http.body_decoder import BodyDecoder
from baton.server.http.dialects.anthropic_errors import (
    COUNT_TOKENS_PATH,
    MESSAGES_PATH,
    anthropic_error_response,
    is_anthropic_path,
)
from baton.server.http.dialects.dialect_paths import (
    STORED_RESPONSES,
    models_response,
    refuse_stored_response,
)
from baton.server.http.http_utils import (
    REQUEST_ID,
    canonical_path,
    error_response,
    json_response,
    new_id,
    read_body,
    read_object,
    with_trailing_slashes,
)
from baton.server.http.lifecycle import (
    READY_PEERS_HEADER,
    NodeCondition,
    NodeState,
    ServerLifecycle,
)
from baton.server.http.openapi.handlers import answer_document, answer_page
from baton.server.http.request_handler import RequestHandler, Validate
from baton.server.http.translation import RequestTranslator
from baton.server.observability import diagnosis, load_report
from baton.server.observability.fingerprint import fingerprint, tokenizer_hash
from baton.server.observability.metrics import ROUTE_REFUSALS, EngineMetrics
from baton.server.request.grammar.checks.reader import CHECK_CLIENT, grammar_fingerprint
from baton.server.request.schema import INT64_MAX, MAX_ITEMS, AbortRequest
from baton.server.request.validation import AcceptedRequest, RequestValidator
from baton.server.response.health_probe import HealthProbe
from baton.server.response.kv_event_stream import KvStreams
from baton.server.text.answer_format import AnswerFormat
from baton.server.text.answer_spec import Dialect
from baton.server.text.model_info import ModelFacts
from baton.server.text.native import native_extension
from baton.server.text.tokenizer import Tokenizer
from baton.server.worker.client import RankClient, RankSet
from baton.server.worker.control import (
    AbortByRoom,
    ControlOperation,
    FlushCache,
    ReadLedger,
    ReadSteps,
    ResumeItems,
    SuspendItems,
)
from baton.server.worker.messages import ReplyMessage

log = logging.getLogger("baton.front")

CONTROL_SECS = 10.0
NONFINITE_IN_A_ROW = 3
"""So many answers that ended in NaN or infinity, with none that did not between them, make the node unhealthy."""
NONFINITE_SECS = 30.0
"""Seconds until an unhealthy node is tried again; the next such answer makes it unhealthy at once."""
RESPONSES_PATH = "/v1/responses"
GENERATION_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/generate", RESPONSES_PATH, MESSAGES_PATH}
)
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
FEATURES = {
    "null": ["resume"],
    "prefill": ["local_answer", "reopen", "resume"],
    "decode": ["local_prefill", "resume"],
}
"""By mode, what a router may rely on (docs/protocol.md §2)."""


def version() -> str:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:  # run from a source tree
        return "0+source"


class HttpServer:
    """The front process's state and handlers. `ranks` appears when the sockets are bound."""

    def __init__(
        self,
        config: EngineConfig,
        facts: ModelFacts,
        tokenizer: Tokenizer,
        answer_format: AnswerFormat,
        ranks: RankSet,
    ) -> None:
        self.config = config
        self.facts = facts
        self.tokenizer = tokenizer
        self.answer_format = answer_format
        self.ranks = ranks
        self._tokenizer_hash = tokenizer_hash(facts.tokenizer_path)
        self.validator = RequestValidator(config, facts, tokenizer, answer_format)
        self.bodies = BodyDecoder()
        self.translator = RequestTranslator(self.validator, self.bodies)
        self.metrics = EngineMetrics(
            version(),
            config.disaggregation_mode,
            facts.name,
            config.page_size,
            config.metrics_compat,
        )
        self.lifecycle = ServerLifecycle(ranks, config.disaggregation_mode)
        self._health_probe = HealthProbe(ranks)
        self._counted_refused = dict.fromkeys(ROUTE_REFUSALS, 0)
        """P nodes: refusals of the bootstrap server that are in the metric."""
        self.started_at = int(time.time())
        self.incarnation = os.urandom(8).hex()
        """Id of this process. Facts that a router has read belong to it, not to the address."""
        self.tracer = tracer.start(config)
        self.answering = RequestHandler(
            ranks, self.metrics, config.request_timeout_secs, self._refuse_if_not_accepting, self.validator,
            self.tracer, self.incarnation,
        )  # fmt: skip
        self.lifecycle.answers = self.answering
        if self.tracer is not None:
            ranks.on_timelines = self.tracer.on_timelines
        self.kv_streams = KvStreams(
            ranks, kv_events.parse_events_config(config.kv_events_config).enable_kv_cache_events
        )
        ranks.on_stats = self._on_stats
        self.metrics.gaps.counts = ranks.answers.gaps
        self.metrics.watch_checks(self.validator.grammars.checks)

    def _on_stats(self, rank: RankClient) -> None:
        self.metrics.report(rank.stats)
        if rank.dead is not None:
            self.kv_streams.on_death(rank.dp_rank)

    # ---- state -------------------------------------------------------------------------------------------------

    def became_ready(self) -> None:
        """All ranks have loaded: the pool may hold less than the model's context."""
        pools = [
            i for r in self.ranks.ranks if isinstance(i := r.info.get("max_total_num_tokens"), int)
        ]
        self.validator.context_length = min([self.facts.context_length, *pools])
        self.validator.fingerprint = self._fingerprint()
        self.lifecycle.is_loaded = True

    def _fingerprint(self) -> dict[str, str]:
        """Empty until a rank has reported its layout."""
        layout = self.ranks.ranks[0].info.get("layout")
        if not isinstance(layout, dict):
            return {}
        grammar = grammar_fingerprint(self.config)
        answer_format = self.answer_format.canonical
        return fingerprint(self.facts, self._tokenizer_hash, layout, answer_format, grammar)

    def _nonfinite(self) -> errors.EngineError | None:
        """Keeps routers away from a rank that computes NaN or infinity, for a while; requests are still accepted."""
        since = time.monotonic() - NONFINITE_SECS
        for rank in self.ranks.ranks:
            if rank.nonfinite >= NONFINITE_IN_A_ROW and rank.nonfinite_at > since:
                return errors.EngineDead(
                    f"the last {rank.nonfinite} answers of rank {rank.dp_rank} ended because the model computed NaN or "
                    "infinity; check the checkpoint and --dtype, or restart the engine",
                    retry_after_secs=int(NONFINITE_SECS),
                )
        return None

    # ---- generation --------------------------------------------------------------------------------------------

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self.answering.answer(
            request, "chat", self._of_object(self.validator.chat), Dialect.CHAT
        )

    async def completion(self, request: web.Request) -> web.StreamResponse:
        return await self.answering.answer(
            request, "completions", self._of_object(self.validator.completion), Dialect.COMPLETIONS
        )

    async def generate(self, request: web.Request) -> web.StreamResponse:
        return await self.answering.answer(
            request, "generate", self._of_object(self.validator.generate), Dialect.GENERATE
        )

    async def responses(self, request: web.Request) -> web.StreamResponse:
        return await self.answering.answer(
            request, "responses", self.translator.responses, Dialect.RESPONSES
        )

    async def messages(self, request: web.Request) -> web.StreamResponse:
        return await self.answering.answer(
            request, "messages", self.translator.messages, Dialect.MESSAGES
        )

    async def count_tokens(self, request: web.Request) -> web.Response:
        """/v1/messages/count_tokens: tokens of the prompt that the request would have."""
        raw = await read_body(request, self.validator.refuse_oversized)
        return json_response({"input_tokens": await self.translator.count_tokens(raw)})

    def _of_object(
        self, validate: Callable[[dict[str, Any]], Awaitable[AcceptedRequest]]
    ) -> Validate:
        """Reads a body that is a JSON object for `validate`."""

        async def read(raw: bytes) -> AcceptedRequest:
            return await validate(await self.bodies.decode(raw))

        return read

    def _refuse_if_not_accepting(self) -> None:
        if (refusal := self.lifecycle.condition().refusal) is not None:
            raise refusal

    # ---- tokens ------------------------------------------------------------------------------------------------

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await self.bodies.decode(await read_body(request))
        ids = await self.validator.tokenize(body)
        nested = bool(ids) and isinstance(ids[0], list)
        count = [len(row) for row in ids] if nested else len(ids)  # type: ignore[arg-type]
        answer: dict[str, Any] = {
            "tokens": ids,
            "count": count,
            "max_model_len": self.validator.context_length,
        }
        if body.get("return_token_strs"):
            names_of = self.tokenizer.names_of
            answer["token_strs"] = list(map(names_of, ids)) if nested else names_of(ids)  # type: ignore[arg-type]
        return json_response(answer)

    async def detokenize(self, request: web.Request) -> web.Response:
        body = await self.bodies.decode(await read_body(request))
        text = await self.validator.detokenize(body)
        # SGLang says `text`, vLLM says `prompt`; clients of both exist.
        return json_response({"text": text, "prompt": text})

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
        return models_response(request, {"object": "list", "data": [self._model_card()]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name != self.facts.name:
            raise self.facts.not_served(name)
        return models_response(request, self._model_card())

    async def version(self, request: web.Request) -> web.Response:
        # Routers take a server without server info that answers this path for vLLM's.
        return json_response({"version": version(), "engine": "baton"})

    async def model_info(self, request: web.Request) -> web.Response:
        return json_response(
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
        config["served_model_names"] = self.validator.model_names
        if self.lifecycle.bootstrap is not None:
            config["disaggregation_bootstrap_port"] = self.lifecycle.bootstrap.port
        ranks = self.ranks.ranks
        now = self.lifecycle.condition()
        if own_fingerprint := self._fingerprint():
            config["fingerprint"] = own_fingerprint
        return json_response(
            {
                **config,
                **ranks[0].info,  # max_total_num_tokens, dtype, layout: equal on all ranks
                "context_length": self.validator.context_length,  # a rank's pool may hold less than it says
                "max_prompt_chars": self.validator.max_prompt_chars,
                "engine": "baton",
                "incarnation": self.incarnation,
                "tokenizer_fingerprint": self.facts.tokenizer_fingerprint,
                "chat_template_caps": self.facts.template_caps,
                "tool_parser": self.answer_format.tool_parser,
                "reasoning_parser": self.answer_format.reasoning_parser,
                "schedule_policy_resolved": resolve_policy(self.config),
                "baton_features": FEATURES.get(self.config.disaggregation_mode, []),
                "state": now.state.value,
                "status": now.state.value,  # SGLang's name
                "load_progress": self.lifecycle.load_progress,
                "version": version(),
                "priority_order": "lower first"
                if self.config.schedule_low_priority_values_first
                else "higher first",
                "internal_states": [
                    {"dp_rank": r.dp_rank, "ready": r.ready, "dead": r.dead, **r.info}
                    for r in ranks
                ],
            }
        )

    async def load(self, request: web.Request) -> web.Response:
        ranks = self.ranks.ranks
        if canonical_path(request) == "/get_load":  # SGLang's
            return json_response([load_report.make_sglang_load(rank) for rank in ranks])
        return json_response(
            {
                "incarnation": self.incarnation,
                "dp_rank_count": len(ranks),
                "loads": [load_report.make_load(rank) for rank in ranks],
            }
        )

    def _count_refused_routes(self, bootstrap: Any) -> None:
        unsigned = bootstrap.refused_unsigned
        totals = {"AUTH": unsigned, "OTHER": bootstrap.refused - unsigned}
        for code, total in totals.items():
            counter = self.metrics.kv_routes_refused.labels(code)
            counter.inc(max(0, total - self._counted_refused[code]))
            self._counted_refused[code] = total

    async def metrics_text(self, request: web.Request) -> web.Response:
        if self.tracer is not None:
            self.tracer.count(self.metrics.trace_spans)
        if self.lifecycle.bootstrap is not None:
            self._count_refused_routes(self.lifecycle.bootstrap)
        now = self.lifecycle.condition()
        self.metrics.ready.set(now.refusal is None)
        for state in NodeState:
            self.metrics.state.labels(state.value).set(state is now.state)
        self.metrics.load_progress.set(self.lifecycle.load_progress)
        self.metrics.ranks_alive.set(sum(r.dead is None for r in self.ranks.ranks))
        return web.Response(
            body=self.metrics.text(),
            headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    # ---- health ------------------------------------------------------------------------------------------------

    async def livez(self, request: web.Request) -> web.Response:
        return json_response({"status": "alive", "incarnation": self.incarnation})

    async def health(self, request: web.Request) -> web.Response:
        self.lifecycle.note_ready_peers(request.headers.get(READY_PEERS_HEADER))
        now = self.lifecycle.condition()
        if now.refusal is None and (nonfinite := self._nonfinite()) is not None:
            now = NodeCondition(now.state, "nonfinite_logits", nonfinite)
        state = {"state": now.state.value, "incarnation": self.incarnation}
        if now.refusal is None:
            return json_response({"status": "ok", **state})
        return error_response(now.refusal, {**state, "reason": now.reason})

    async def health_generate(self, request: web.Request) -> web.Response:
        """Generate a real token on every rank, on the path that requests take."""
        self._refuse_if_not_accepting()
        token = next(iter(self.validator.eos_token_ids), 0)  # only ids that the model takes
        with self.answering.arrival(time.monotonic()):
            await self._health_probe.run(token)
        return json_response({"status": "ok"})

    # ---- control -----------------------------------------------------------------------------------------------

    async def drain(self, request: web.Request) -> web.Response:
        """POST: refuse new requests and finish the others. GET: what is left of them."""
        if request.method == "POST":
            self.lifecycle.begin_drain()
        return await self._drain_report()

    async def undrain(self, request: web.Request) -> web.Response:
        self.lifecycle.end_drain()
        return await self._drain_report()

    async def _drain_report(self) -> web.Response:
        report = await self.lifecycle.report()
        return json_response({**report, "incarnation": self.incarnation})

    async def flush_cache(self, request: web.Request) -> web.Response:
        return json_response({"success": True, "ranks": await self._ask_all(FlushCache())})

    async def ledger(self, request: web.Request) -> web.Response:
        return json_response({"ranks": await self._ask_all(ReadLedger())})

    async def rooms(self, request: web.Request) -> web.Response:
        """Timelines of live KV transfers; ?room=N for one."""
        raw = request.query.get("room")
        if raw is not None and not (raw.isascii() and raw.isdigit() and len(raw) < 20):
            raise errors.BadRequest(f"room {raw[:50]!r} is no integer", param="room")
        room = None if raw is None else int(raw)
        replies = await self._ask_all(ReadLedger(room))
        return json_response(
            {"ranks": [{"dp_rank": r["dp_rank"], "rooms": r.get("rooms", [])} for r in replies]}
        )

    async def diagnose(self, request: web.Request) -> web.Response:
        """Facts for `baton doctor`; the ranks' ledgers without timelines, whose room 0 is never drawn."""
        books = (
            await self._ask_all(ReadLedger(room=0))
            if any(r.ready for r in self.ranks.ranks)
            else []
        )
        refuse_other_media_types(request)
        return json_response(
            await diagnosis.diagnose(self.config, await read_object(request), books)
        )

    async def steps(self, request: web.Request) -> web.Response:
        """The scheduler's last decisions per rank; ?n= at most so many, newest last."""
        raw = request.query.get("n", str(step_log.RING))
        if not (raw.isascii() and raw.isdigit() and 1 <= int(raw[:9]) <= step_log.RING):
            raise errors.BadRequest(f"n is {raw[:50]!r}; give 1 to {step_log.RING}", param="n")
        return json_response({"ranks": await self._ask_all(ReadSteps(int(raw)))})

    async def _ask_all(self, operation: ControlOperation) -> list[dict[str, Any]]:
        """Results of a control operation that no living rank refuses."""
        if not any(r.ready for r in self.ranks.ranks):
            raise errors.NotReady("no rank is ready", retry_after_secs=2)

        replies = await self._ask(
            {rank.dp_rank: operation for rank in self.ranks.ranks if rank.dead is None}
        )
        return [{"dp_rank": dp_rank, **reply.result} for dp_rank, reply in replies.items()]

    async def _ask(self, operations: Mapping[int, ControlOperation]) -> dict[int, ReplyMessage]:
        """Replies of these ranks, each to its operation."""
        ranks = self.ranks.ranks
        replies = await asyncio.gather(
            *(
                self.ranks.control(ranks[dp_rank], operation, CONTROL_SECS)
                for dp_rank, operation in operations.items()
            )
        )
        return dict(zip(operations, replies, strict=True))

    async def abort_request(self, request: web.Request) -> web.Response:
        refuse_other_media_types(request)
        asked = fields.read(AbortRequest, await read_object(request))
        everything = asked.abort_all or False
        _, rid = fields.first(asked, "rid", "request_id")
        rooms = fields.integers("bootstrap_room", asked.bootstrap_room, MAX_ITEMS, 0, INT64_MAX)
        if not everything and rid is None and not rooms:
            raise errors.BadRequest("give rid, bootstrap_room, or abort_all: true", param="rid")
        count = (
            self.answering.cancel(None if everything else rid)
            if everything or rid is not None
            else 0
        )
        if any(r.ready for r in self.ranks.ranks):
            count += await self._abort_in_ranks(rid, rooms=list(rooms), everything=everything)
            for other in [] if count or rid is None else native_extension().id_spellings(rid)[1:]:
                count += await self._abort_in_ranks(other)
        return json_response({"success": True, "aborted": count})

    async def _abort_in_ranks(
        self, rid: str | None, *, rooms: Sequence[int] = (), everything: bool = False
    ) -> int:
        replies = await self._ask_all(AbortByRoom(list(rooms), rid, all_leases=everything))
        return sum(reply["aborted"] for reply in replies)

    async def suspend_request(self, request: web.Request) -> web.Response:
        """All items of the request, or none: what one rank suspended is resumed when another one cannot."""
        rid, handles = self._handles_of(request)
        replies = await self._ask({rank: SuspendItems(items) for rank, items in handles.items()})
        refused = [reply.result["message"] for reply in replies.values() if not reply.ok]
        if refused:
            suspended = [rank for rank, reply in replies.items() if reply.ok]
            await self._ask({rank: ResumeItems(handles[rank]) for rank in suspended})
            raise errors.WrongState(refused[0])
        return self._changed(rid, "suspended", replies)

    async def resume_request(self, request: web.Request) -> web.Response:
        rid, handles = self._handles_of(request)
        replies = await self._ask({rank: ResumeItems(items) for rank, items in handles.items()})
        return self._changed(rid, "resumed", replies)

    def _handles_of(self, request: web.Request) -> tuple[str, dict[int, list[int]]]:
        """The request's rid, and by rank the handles of its unfinished items."""
        rid = request.match_info["rid"]
        handles: dict[int, list[int]] = {}
        for generation in self.answering.live(rid):
            for running in generation.items:
                if running.rank is not None and self.ranks.runs(running.handle):
                    handles.setdefault(running.rank.dp_rank, []).append(running.handle)
        if not handles:
            raise _no_such_request(rid)
        return rid, handles

    @staticmethod
    def _changed(rid: str, state: str, replies: dict[int, ReplyMessage]) -> web.Response:
        found = sum(int(reply.result["found"]) for reply in replies.values())
        if not found:  # it ended while the question was on its way
            raise _no_such_request(rid)
        return json_response({"rid": rid, "state": state, "items": found})

    # ---- the application ---------------------------------------------------------------------------------------

    def _health_routes(self) -> list[web.RouteDef]:
        ready = [web.get(path, self.health) for path in ("/health", "/readyz", "/ping")]
        return [*ready, web.get("/livez", self.livez)]

    def health_application(self) -> web.Application:
        """The health endpoints alone, for --health-port."""
        app = web.Application()
        app.add_routes(self._health_routes())
        return app

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.on_response_prepare.append(_common_headers)
        app.on_shutdown.append(self.kv_streams.close)
        app.add_routes(
            with_trailing_slashes(
                web.post("/v1/chat/completions", self.chat),
                web.post("/v1/completions", self.completion),
                web.post("/generate", self.generate),
                web.put("/generate", self.generate),
                web.post(RESPONSES_PATH, self.responses),
                web.post(MESSAGES_PATH, self.messages),
                web.post(COUNT_TOKENS_PATH, self.count_tokens),
                *(
                    web.route(method, RESPONSES_PATH + path, refuse_stored_response)
                    for method, path in STORED_RESPONSES
                ),
                web.get("/v1/models", self.models),
                web.get("/v1/models/{name:.+}", self.model),
                *(web.post(path, self.tokenize) for path in ("/tokenize", "/v1/tokenize")),
                *(web.post(path, self.detokenize) for path in ("/detokenize", "/v1/detokenize")),
                *self._health_routes(),
                web.get("/health_generate", self.health_generate),
                *(web.get(path, self.model_info) for path in ("/get_model_info", "/model_info")),
                *(web.get(path, self.server_info) for path in ("/get_server_info", "/server_info")),
                *(web.get(path, self.load) for path in ("/v1/loads", "/get_load")),
                *(method("/drain", self.drain) for method in (web.get, web.post)),
                web.post("/undrain", self.undrain),
                *(method("/flush_cache", self.flush_cache) for method in (web.get, web.post)),
                web.post("/abort_request", self.abort_request),
                web.post("/v1/requests/{rid:.+}/suspend", self.suspend_request),
                web.post("/v1/requests/{rid:.+}/resume", self.resume_request),
                web.get("/v1/kv_events", self.kv_streams.serve),
                web.get("/metrics", self.metrics_text),
                web.get("/debug/ledger", self.ledger),
                web.get("/debug/rooms", self.rooms),
                web.post("/debug/diagnosis", self.diagnose),
                web.get("/v1/scheduler/steps", self.steps),
                web.get("/version", self.version),
                web.get("/openapi.json", answer_document),
                web.get("/docs", answer_page),
            )
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("x-request-id", "")
        request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else new_id()
        try:
            self._check_access(request)
            has_tenants = self.validator.tenancy.limits_rates
            CHECK_CLIENT.set(client_of(request, has_tenants=has_tenants))
            return await handler(request)
        except errors.EngineError as err:
            response = _error_response(request, err)
            if (
                canonical_path(request) in GENERATION_PATHS
            ):  # a router that expected another process asks again
                own = load_report.format_incarnation_header(self.incarnation)
                response.headers[load_report.LOAD_HEADER] = own
            return response
        except web.HTTPNotFound:
            return _error_response(request, errors.NotFound(f"no such path: {request.path[:200]}"))
        except web.HTTPMethodNotAllowed as err:
            allowed = ", ".join(sorted(err.allowed_methods))
            response = _error_response(
                request,
                errors.MethodNotAllowed(
                    f"{request.path[:200]} does not accept {request.method}; it accepts {allowed}"
                ),
            )
            response.headers["allow"] = allowed
            return response
        except web.HTTPException as err:
            return _error_response(request, errors.BadRequest(f"{err.reason}"))
        except ConnectionError:
            # The client is gone and will not read this; an exception would be logged by aiohttp as ours.
            return _error_response(request, errors.Aborted("the client closed the connection"))
        except Exception:
            log.exception("rid=%s %s %s failed", request[REQUEST_ID], request.method, request.path)
            return _error_response(
                request, errors.EngineError("internal error; the engine's log has the details")
            )

    def _check_access(self, request: web.Request) -> None:
        path = canonical_path(request)
        if path in OPEN_PATHS:
            return
        key = self.config.api_key
        if key is not None:
            check_key(request, key)
            return
        # A web page has no key: where there is one, its requests have ended above.
        refuse_unknown_host(
            request, self.config.host_names, is_on_loopback=self.config.is_on_loopback
        )
        refuse_foreign_page(request, path)


def _error_response(request: web.Request, err: errors.EngineError) -> web.Response:
    """The error in the form of the request's API."""
    if is_anthropic_path(canonical_path(request)):
        return anthropic_error_response(err, request[REQUEST_ID])
    return error_response(err)


def _no_such_request(rid: str) -> errors.NotFound:
    return errors.NotFound(
        f"no request {rid[:200]!r} is being answered here; give the rid (or the x-request-id header) it was sent with",
        param="rid",
    )


async def _common_headers(request: web.BaseRequest, response: web.StreamResponse) -> None:
    response.headers["server"] = "baton"
    response.headers["x-request-id"] = request[REQUEST_ID]
    if is_anthropic_path(canonical_path(request)):
        response.headers["request-id"] = request[REQUEST_ID]
