"""Spans of a traced request, made from its times after its end; pure, no clock and no exporter.

    router's leg span, or the client's
      └ POST /v1/…                 the front: body read to last byte              request_span
          ├ queue                  submitted to its place on the device
          ├ prefill | transfer     to the first token: computed here | by P and pulled (D)
          └ lease | decode         P: until D has the pages | to the last token   timeline_spans

A span that its request did not live to begin is not there; the last one carries how the request ended.
"""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from baton.errors import by_code
from baton.sched.types.request_timeline import RequestTimeline

Attributes = list[tuple[str, "str | int"]]
ToUnix = Callable[[float], int]
"""Monotonic seconds → nanoseconds since 1970."""

_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_PACKED = struct.Struct(">16sQd")


class Span(NamedTuple):
    """An ended span; engine/native reads these fields by name. Times are nanoseconds since 1970."""

    trace: int
    id: int
    parent: int | None
    name: str
    is_server: bool
    start: int
    end: int
    attributes: Attributes
    events: list[tuple[int, str, Attributes]]
    error: str | None
    """Why it counts as failed."""


def new_id() -> int:
    """Zero is no id."""
    return random.getrandbits(64) or 1


@dataclass(frozen=True, slots=True)
class ParentSpan:
    """The front's span of a request, and where it hangs."""

    trace: int
    span: int
    above: int | None

    def packed(self, submitted: float) -> bytes:
        """Pack ids for the rank, which hands them back with its timeline."""
        return _PACKED.pack(self.trace.to_bytes(16, "big"), self.span, submitted)


def continue_trace(traceparent: str | None) -> ParentSpan | None:
    """A span below the caller's (W3C Trace Context), or of a new trace; None: the caller does not sample this one."""
    found = _TRACEPARENT.fullmatch((traceparent or "").strip())
    if found is not None:
        version, trace, above, flags, more = found.groups()
        if int(trace, 16) and int(above, 16) and not (version == "00" and more):
            return (
                ParentSpan(int(trace, 16), new_id(), int(above, 16)) if int(flags, 16) & 1 else None
            )
    return ParentSpan(random.getrandbits(128) or 1, new_id(), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredRequest:
    """A request as the front saw it; times are monotonic seconds."""

    method: str
    route: str
    request_id: str
    status: int | None
    """None: the client had left."""
    outcome: str
    """ok, client_disconnected, or an error's code."""
    arrived: float
    ended: float
    submitted: float | None = None
    """Time when it had been checked and tokenized, and went to a rank."""
    first_token: float | None = None
    more: tuple[tuple[str, str | int], ...] = ()


def request_span(parent: ParentSpan, answered: AnsweredRequest, unix: ToUnix) -> Span:
    attributes: Attributes = [
        ("http.request.method", answered.method),
        ("http.route", answered.route),
        ("baton.request_id", answered.request_id),
        ("baton.outcome", answered.outcome),
        *answered.more,
    ]
    if answered.status is not None:
        attributes.append(("http.response.status_code", answered.status))
    marks = (("submitted", answered.submitted), ("first_token", answered.first_token))
    events: list[tuple[int, str, Attributes]] = [
        (unix(at), name, []) for name, at in marks if at is not None
    ]
    failed = (
        answered.outcome not in ("ok", "client_disconnected")
        and by_code(answered.outcome).status >= 500
    )
    return Span(
        parent.trace, parent.span, parent.above, f"{answered.method} {answered.route}", True, unix(answered.arrived),
        unix(answered.ended), attributes, events, answered.outcome if failed else None,
    )  # fmt: skip


def timeline_spans(timeline: RequestTimeline, dp_rank: int, unix: ToUnix) -> list[Span]:
    """Stages of one item at a rank, in order of time. Children of the front's span."""
    trace, parent, submitted = _PACKED.unpack(timeline.trace)
    stages = [_Stage("queue", submitted, [("baton.prompt_tokens", timeline.prompt_tokens)])]
    if timeline.admitted_at is not None:
        name, attributes = (
            ("transfer", _transfer(timeline))
            if timeline.is_transfer
            else ("prefill", _prefill(timeline))
        )
        stages.append(_Stage(name, timeline.admitted_at, attributes))
    if timeline.first_token_at is not None:
        leased: Attributes = [("baton.pages", timeline.leased_pages)]
        name, attributes = (
            ("lease", leased) if timeline.leased_pages else ("decode", _decode(timeline))
        )
        stages.append(_Stage(name, timeline.first_token_at, attributes))
    stages[-1].attributes.append(("baton.finish", timeline.finish))
    if timeline.lost_events:
        stages[-1].attributes.append(("baton.lost_events", timeline.lost_events))
    ends = [stage.start for stage in stages[1:]] + [max(timeline.ended_at, stages[-1].start)]
    events: list[tuple[float, str, Attributes]] = [
        (at, name, [("baton.tokens", n)]) for at, name, n in timeline.events
    ]
    if timeline.announced_at is not None:
        events = sorted(
            [*events, (timeline.announced_at, "announced", [])], key=lambda event: event[0]
        )
    who: Attributes = [("baton.dp_rank", dp_rank), ("baton.handle", timeline.handle)]
    spans = []
    for (name, start, attributes), end in zip(stages, ends, strict=True):
        # What happens at the border of two belongs to the first: the step that made the first token.
        happened = [event for event in events if event[0] <= end]
        events = events[len(happened) :]
        noted = [(unix(at), what, more) for at, what, more in happened]
        trace_id, attributes = int.from_bytes(trace, "big"), who + attributes
        spans.append(
            Span(
                trace_id,
                new_id(),
                parent,
                name,
                False,
                unix(start),
                unix(end),
                attributes,
                noted,
                error=None,
            )
        )
    spans[-1] = spans[-1]._replace(error=timeline.error or None)
    return spans


class _Stage(NamedTuple):
    name: str
    start: float
    attributes: Attributes


def _prefill(timeline: RequestTimeline) -> Attributes:
    return [
        ("baton.cached_tokens", timeline.cached_tokens),
        ("baton.computed_tokens", timeline.computed_tokens),
        ("baton.steps", timeline.steps),
    ]


def _transfer(timeline: RequestTimeline) -> Attributes:
    attributes: Attributes = [("baton.cached_tokens", timeline.cached_tokens)]
    if (pulled := timeline.pulled) is not None:
        attributes += [
            ("baton.transport", pulled.transport),
            ("baton.pages", pulled.pages),
            ("baton.bytes", pulled.bytes),
            ("baton.pull_us", round(pulled.pull_seconds * 1e6)),
        ]
    return attributes


def _decode(timeline: RequestTimeline) -> Attributes:
    return [
        ("gen_ai.usage.output_tokens", timeline.output_tokens),
        ("baton.retractions", timeline.retractions),
        ("baton.preemptions", timeline.preemptions),
        ("baton.recomputed_tokens", timeline.recomputed_tokens),
    ]
