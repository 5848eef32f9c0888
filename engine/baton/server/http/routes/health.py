"""Handlers of probes and scrapers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from baton.server.http.http_utils import error_response, json_response
from baton.server.http.lifecycle import NodeState, ServerLifecycle
from baton.server.http.request_handler import RequestHandler
from baton.server.http.tracer import SpanTracer
from baton.server.observability.metrics import ROUTE_REFUSALS, EngineMetrics
from baton.server.response.health_probe import HealthProbe
from baton.server.text.native import native_extension
from baton.server.worker.client import RankSet


class MetricsPage:
    """The answer of /metrics: what the ranks reported, and what is read when it is asked for."""

    def __init__(
        self,
        metrics: EngineMetrics,
        lifecycle: ServerLifecycle,
        ranks: RankSet,
        tracer: SpanTracer | None,
    ) -> None:
        self._metrics = metrics
        self._lifecycle = lifecycle
        self._ranks = ranks
        self._tracer = tracer
        self._counted_refused = dict.fromkeys(ROUTE_REFUSALS, 0)
        """P nodes: refusals of the bootstrap server that are in the metric."""

    def text(self) -> bytes:
        metrics = self._metrics
        if self._tracer is not None:
            self._tracer.count(metrics.trace_spans)
        if self._lifecycle.bootstrap is not None:
            self._count_refused_routes(self._lifecycle.bootstrap)
        now = self._lifecycle.condition()
        metrics.ready.set(now.refusal is None)
        for state in NodeState:
            metrics.state.labels(state.value).set(state is now.state)
        metrics.load_progress.set(self._lifecycle.load_progress)
        metrics.ranks_alive.set(sum(rank.dead is None for rank in self._ranks.ranks))
        return metrics.text()

    def _count_refused_routes(self, bootstrap: Any) -> None:
        unsigned = bootstrap.refused_unsigned
        totals = {"AUTH": unsigned, "OTHER": bootstrap.refused - unsigned}
        for code, total in totals.items():
            counter = self._metrics.kv_routes_refused.labels(code)
            counter.inc(max(0, total - self._counted_refused[code]))
            self._counted_refused[code] = total


@dataclass(frozen=True, slots=True)
class HealthContext:
    """State of the node, and the parts by which a probe generates a token."""

    incarnation: str
    lifecycle: ServerLifecycle
    answering: RequestHandler
    probe: HealthProbe
    metrics_page: MetricsPage


HEALTH: web.AppKey[HealthContext] = web.AppKey("health", HealthContext)


async def show_liveness(request: web.Request) -> web.Response:
    incarnation = request.app[HEALTH].incarnation
    return json_response({"status": "alive", "incarnation": incarnation})


async def show_readiness(request: web.Request) -> web.Response:
    context = request.app[HEALTH]
    context.lifecycle.note_ready_peers(request.headers.get(native_extension().headers.READY_PEERS))
    now = context.lifecycle.probe_condition()
    state = {"state": now.state.value, "incarnation": context.incarnation}
    if now.refusal is None:
        return json_response({"status": "ok", **state})
    return error_response(now.refusal, {**state, "reason": now.reason})


async def generate_token(request: web.Request) -> web.Response:
    """Generate a real token on every rank, on the path that requests take."""
    context = request.app[HEALTH]
    context.lifecycle.refuse_if_not_accepting()
    # Only ids that the model takes.
    token = next(iter(context.answering.validator.eos_token_ids), 0)
    with context.answering.arrival(time.monotonic()):
        await context.probe.run(token)
    return json_response({"status": "ok"})


async def show_metrics(request: web.Request) -> web.Response:
    return web.Response(
        body=request.app[HEALTH].metrics_page.text(),
        headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"},
    )
