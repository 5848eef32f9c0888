"""--enable-trace: this process's access to the span exporter, which sends from a native thread of
its own.

Spans are made when a request has ended (front) or a rank has sent its timeline, so a running
request pays for ids only. The exporter's queue is bounded: a slow or dead collector costs spans,
counted in the metric, never a request.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import Counter

from baton.config import EngineConfig
from baton.errors import ConfigError
from baton.server.http.http_utils import REQUEST_ID
from baton.server.observability import spans
from baton.server.response.generation import Generation
from baton.server.worker.messages import TimelinesMessage

if TYPE_CHECKING:
    from baton._native import SpanExporter

SERVICE = {"null": "baton-engine", "prefill": "baton-prefill", "decode": "baton-decode"}
"""service.name by --disaggregation-mode."""
LAST_SPANS_SECS = 2.0
"""A collector gets this long to take the spans of the last requests."""
CLOCKS_APART_NS = 1_000_000
"""The wall clock was set when it moves by more than this against the monotonic one."""


def start(config: EngineConfig) -> SpanTracer | None:
    """None without --enable-trace. Raises ConfigError."""
    if not config.enable_trace:
        return None
    try:
        from baton._native import SpanExporter
    except ImportError as err:
        raise ConfigError(
            f"--enable-trace needs the native extension of this version ({err}); build it"
        ) from err
    role = config.disaggregation_mode
    resource = [
        ("baton.role", role),
        ("service.instance.id", f"{socket.gethostname()}-{os.getpid()}"),
    ]
    try:
        exporter = SpanExporter(config.otlp_traces_endpoint, SERVICE[role], resource)
    except ValueError as err:
        raise ConfigError(f"--otlp-traces-endpoint {config.otlp_traces_endpoint}: {err}") from err
    return SpanTracer(exporter)


class SpanTracer:
    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._offset = 0
        self._counted: dict[str, int] = {}

    def begin(self, headers: Mapping[str, str]) -> spans.ParentSpan | None:
        """The span of a request that has just come; None: it is not to be traced."""
        return spans.continue_trace(headers.get("traceparent"))

    def answered(
        self,
        parent: spans.ParentSpan,
        request: web.Request,
        generation: Generation | None,
        status: int | None,
        outcome: str,
        arrived: float,
    ) -> None:
        """A request has ended."""
        more: list[tuple[str, str | int]] = []
        if generation is not None:
            first = generation.items[0]
            more += [
                ("gen_ai.usage.input_tokens", generation.prompt_tokens),
                ("gen_ai.usage.output_tokens", generation.completion_tokens),
                ("baton.cached_tokens", generation.cached_tokens),
                ("baton.items", len(generation.items)),
            ]
            if first.rank is not None:
                more.append(("baton.dp_rank", first.rank.dp_rank))
            if first.item.rendezvous is not None:
                more.append(("baton.room", first.item.rendezvous.room))
        answered = spans.AnsweredRequest(
            method=request.method,
            route=request.path,
            request_id=request[REQUEST_ID],
            status=status,
            outcome=outcome,
            arrived=arrived,
            ended=time.monotonic(),
            submitted=None if generation is None else generation.submitted_at,
            first_token=None if generation is None else generation.first_token_at,
            more=tuple(more),
        )
        self._exporter.put([spans.request_span(parent, answered, self._to_unix())])

    def on_timelines(self, message: TimelinesMessage) -> None:
        """A rank is through with some requests."""
        unix = self._to_unix()
        of_each = (
            spans.timeline_spans(timeline, message.dp_rank, unix) for timeline in message.timelines
        )
        self._exporter.put([*itertools.chain.from_iterable(of_each)])

    def count(self, metric: Counter) -> None:
        """Bring the metric's series up to what the exporter has counted."""
        for result, total in self._exporter.counts().items():
            metric.labels(result).inc(total - self._counted.get(result, 0))
            self._counted[result] = total

    async def flush(self) -> None:
        """Send what is queued; before the process ends."""
        await asyncio.to_thread(self._exporter.flush, LAST_SPANS_SECS)

    def _to_unix(self) -> spans.ToUnix:
        """Offset for all spans as long as the clock is not set, so that children lie within their
        parents.
        """
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        # The thread may be interrupted between the readings, so they give a range.
        if not wall - after - CLOCKS_APART_NS <= self._offset <= wall - before + CLOCKS_APART_NS:
            self._offset = wall - after
        fixed = self._offset
        return lambda at: round(at * 1e9) + fixed
