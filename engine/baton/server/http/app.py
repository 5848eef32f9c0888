"""The HTTP server of an engine: its application, and what surrounds every handler.

Every request passes `_guard`: it gets an id, its key is checked, and every exception becomes our
error object. The handlers are those of `routes`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable

from aiohttp import web
from aiohttp.typedefs import Handler

from baton import errors
from baton.config import EngineConfig, kv_events
from baton.server.http import tracer
from baton.server.http.access.browsers import refuse_foreign_page, refuse_unknown_host
from baton.server.http.access.client_identity import client_of
from baton.server.http.access.keys import check_key
from baton.server.http.anthropic_errors import anthropic_error_response, is_anthropic_path
from baton.server.http.body_decoder import BodyDecoder
from baton.server.http.http_utils import (
    REQUEST_ID,
    canonical_path,
    error_response,
    new_id,
    with_trailing_slashes,
)
from baton.server.http.lifecycle import ServerLifecycle
from baton.server.http.openapi.document import openapi_document
from baton.server.http.openapi.page import docs_page
from baton.server.http.request_handler import RequestHandler
from baton.server.http.routes.admin import ADMIN, AdminContext
from baton.server.http.routes.docs import API, NODE, ApiDescription, NodeDescription, version
from baton.server.http.routes.generation import GENERATION, GenerationContext
from baton.server.http.routes.health import HEALTH, HealthContext, MetricsPage
from baton.server.http.routes.kv import KV, KvContext
from baton.server.http.routes.route import Route, Server
from baton.server.http.routes.table import GENERATION_PATHS, OPEN_PATHS, PROBES, routes_of
from baton.server.observability import load_report
from baton.server.observability.metrics import EngineMetrics
from baton.server.request.grammar.checks.reader import CHECK_CLIENT
from baton.server.request.validation import RequestValidator
from baton.server.response.health_probe import HealthProbe
from baton.server.response.kv_event_stream import KvStreams
from baton.server.text.answer_format import AnswerFormat
from baton.server.text.model_info import ModelFacts
from baton.server.text.native import native_extension
from baton.server.text.tokenizer import Tokenizer
from baton.server.worker.client import RankClient, RankSet

log = logging.getLogger("baton.front")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")


def engine_routes(routes: Iterable[Route]) -> list[web.RouteDef]:
    """The routes of aiohttp that answer these paths, each with and without a slash at its end."""
    return with_trailing_slashes(
        *(
            web.route(method.upper(), route.path, route.handler)
            for route in routes
            if route.handler is not None
            for method in route.methods
        )
    )


class HttpServer:
    """The parts of the front process, as the launcher and the contexts of the handlers share
    them.
    """

    def __init__(
        self,
        config: EngineConfig,
        facts: ModelFacts,
        tokenizer: Tokenizer,
        answer_format: AnswerFormat,
        ranks: RankSet,
    ) -> None:
        self._config = config
        self._facts = facts
        self._ranks = ranks
        self.incarnation = os.urandom(8).hex()
        """Id of this process. Facts that a router has read belong to it, not to the address."""
        self.validator = RequestValidator(config, facts, tokenizer, answer_format)
        self.lifecycle = ServerLifecycle(ranks, config.disaggregation_mode)
        self.tracer = tracer.start(config)
        self._metrics = EngineMetrics(
            version(),
            config.disaggregation_mode,
            facts.name,
            config.page_size,
            config.metrics_compat,
        )
        self.answering = RequestHandler(
            ranks,
            self._metrics,
            config.request_timeout_secs,
            self.lifecycle.refuse_if_not_accepting,
            self.validator,
            self.tracer,
            self.incarnation,
        )
        self.lifecycle.answers = self.answering
        self._kv_streams = KvStreams(
            ranks, kv_events.parse_events_config(config.kv_events_config).enable_kv_cache_events
        )
        self._generation = GenerationContext(
            self.answering, self.validator, tokenizer, BodyDecoder()
        )
        self._node = NodeDescription(
            config, facts, answer_format, ranks, self.lifecycle, self.validator, self.incarnation
        )
        metrics_page = MetricsPage(self._metrics, self.lifecycle, ranks, self.tracer)
        self._health = HealthContext(
            self.incarnation, self.lifecycle, self.answering, HealthProbe(ranks), metrics_page
        )
        if self.tracer is not None:
            ranks.on_timelines = self.tracer.on_timelines
        ranks.on_stats = self._on_stats
        self._metrics.gaps.counts = ranks.answers.gaps
        self._metrics.watch_checks(self.validator.grammars.checks)

    def _on_stats(self, rank: RankClient) -> None:
        self._metrics.report(rank.stats)
        if rank.dead is not None:
            self._kv_streams.on_death(rank.dp_rank)

    def became_ready(self) -> None:
        """All ranks have loaded: the pool may hold less than the model's context."""
        pools = [
            tokens
            for rank in self._ranks.ranks
            if isinstance(tokens := rank.info.get("max_total_num_tokens"), int)
        ]
        context_length = min([self._facts.context_length, *pools])
        self.validator.set_node_facts(context_length, self._node.fingerprint())
        self.lifecycle.is_loaded = True

    def health_application(self) -> web.Application:
        """The health endpoints alone, for --health-port."""
        app = web.Application()
        app[HEALTH] = self._health
        app.add_routes(
            [web.get(route.path, route.handler) for route in PROBES if route.handler is not None]
        )
        return app

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.on_response_prepare.append(_common_headers)
        app.on_shutdown.append(self._kv_streams.close)
        app[GENERATION] = self._generation
        app[NODE] = self._node
        app[API] = ApiDescription(
            make_document=lambda: openapi_document(Server.ENGINE),
            make_page=lambda: docs_page(openapi_document(Server.ENGINE), Server.ENGINE),
        )
        app[HEALTH] = self._health
        app[ADMIN] = AdminContext(
            self._config, self.incarnation, self.lifecycle, self.answering, self._ranks
        )
        app[KV] = KvContext(self.incarnation, self._ranks, self._kv_streams)
        app.add_routes(engine_routes(routes_of(Server.ENGINE)))
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
                response.headers[native_extension().headers.LOAD] = own
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
            # The client is gone and will not read this; an exception would be logged by aiohttp as
            # ours.
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
        key = self._config.api_key
        if key is not None:
            check_key(request, key)
            return
        # A web page has no key: where there is one, its requests have ended above.
        refuse_unknown_host(
            request, self._config.host_names, is_on_loopback=self._config.is_on_loopback
        )
        refuse_foreign_page(request, path)


def _error_response(request: web.Request, err: errors.EngineError) -> web.Response:
    """The error in the form of the request's API."""
    if is_anthropic_path(canonical_path(request)):
        return anthropic_error_response(err, request[REQUEST_ID])
    return error_response(err)


async def _common_headers(request: web.BaseRequest, response: web.StreamResponse) -> None:
    response.headers["server"] = "baton"
    response.headers["x-request-id"] = request[REQUEST_ID]
    if is_anthropic_path(canonical_path(request)):
        response.headers["request-id"] = request[REQUEST_ID]
