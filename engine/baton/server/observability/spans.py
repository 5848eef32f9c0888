"""Spans of a traced request, made from its times after its end; pure, no clock and no exporter.

    router's leg span, or the client's
      └ POST /v1/…                 the front: body read to last byte              request_span
          ├ queue                  submitted to its place on the device
          ├ prefill | transfer     to the first token: computed here | by P and pulled (D)
          └ lease | decode         P: until D has the pages | to the last token   timeline_spans

A request that ends early has no spans of later stages; its last span has its end.
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
    """Begin a span below the caller's (W3C Trace Context), or of a new trace.

    None: the caller does not sample this request.
    """
    match = _TRACEPARENT.fullmatch((traceparent or "").strip())
    if match is not None:
        version, trace, above, flags, more = match.groups()
        # An invalid header begins a new trace, as the standard asks: zero is no id, and version 00
        # has no further fields.
        if int(trace, 16) and int(above, 16) and not (version == "00" and more):
            is_sampled = int(flags, 16) & 1
            return ParentSpan(int(trace, 16), new_id(), int(above, 16)) if is_sampled else None
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
    # A client's own mistake, or its leaving, is no failure of the server.
    is_failure = (
        answered.outcome not in ("ok", "client_disconnected")
        and by_code(answered.outcome).status >= 500
    )
    return Span(
        trace=parent.trace,
        id=parent.span,
        parent=parent.above,
        name=f"{answered.method} {answered.route}",
        is_server=True,
        start=unix(answered.arrived),
        end=unix(answered.ended),
        attributes=attributes,
        events=events,
        error=answered.outcome if is_failure else None,
    )


def timeline_spans(timeline: RequestTimeline, dp_rank: int, unix: ToUnix) -> list[Span]:
    """Stages of one item at a rank, in order of time. Children of the front's span."""
    trace, parent, submitted = _PACKED.unpack(timeline.trace)
    trace_id = int.from_bytes(trace, "big")
    rank_attributes: Attributes = [("baton.dp_rank", dp_rank), ("baton.handle", timeline.handle)]
    events = _sort_events(timeline)
    spans = []
    for stage in _list_stages(timeline, submitted):
        # An event at the border of two stages belongs to the first: the step that made the first
        # token is the end of the prefill.
        stage_events = [event for event in events if event.at <= stage.end]
        events = events[len(stage_events) :]
        spans.append(
            Span(
                trace=trace_id,
                id=new_id(),
                parent=parent,
                name=stage.name,
                is_server=False,
                start=unix(stage.start),
                end=unix(stage.end),
                attributes=rank_attributes + stage.attributes,
                events=[(unix(event.at), event.name, event.attributes) for event in stage_events],
                error=None,
            )
        )
    spans[-1] = spans[-1]._replace(error=timeline.error or None)
    return spans


class _Stage(NamedTuple):
    """Times are monotonic seconds."""

    name: str
    start: float
    end: float
    attributes: Attributes


class _StageEvent(NamedTuple):
    at: float
    name: str
    attributes: Attributes


def _list_stages(timeline: RequestTimeline, submitted: float) -> list[_Stage]:
    """Stages that the request lived to begin, in order of time; the last one has its end."""
    begun: list[tuple[str, float, Attributes]] = [
        ("queue", submitted, [("baton.prompt_tokens", timeline.prompt_tokens)])
    ]
    if timeline.admitted_at is not None:
        if timeline.is_transfer:
            begun.append(("transfer", timeline.admitted_at, _describe_transfer(timeline)))
        else:
            begun.append(("prefill", timeline.admitted_at, _describe_prefill(timeline)))
    if timeline.first_token_at is not None:
        if timeline.leased_pages:
            leased: Attributes = [("baton.pages", timeline.leased_pages)]
            begun.append(("lease", timeline.first_token_at, leased))
        else:
            begun.append(("decode", timeline.first_token_at, _describe_decode(timeline)))
    _, last_start, last_attributes = begun[-1]
    last_attributes.append(("baton.finish", timeline.finish))
    if timeline.lost_events:
        last_attributes.append(("baton.lost_events", timeline.lost_events))
    # A request may end before the stage that an event in flight has begun: no span is negative.
    ends = [start for _, start, _ in begun[1:]] + [max(timeline.ended_at, last_start)]
    return [
        _Stage(name, start, end, attributes)
        for (name, start, attributes), end in zip(begun, ends, strict=True)
    ]


def _sort_events(timeline: RequestTimeline) -> list[_StageEvent]:
    events = [
        _StageEvent(at, name, [("baton.tokens", tokens)]) for at, name, tokens in timeline.events
    ]
    # Recorded by itself, because it may come before the request is admitted.
    if timeline.announced_at is not None:
        events.append(_StageEvent(timeline.announced_at, "announced", []))
        events.sort(key=lambda event: event.at)
    return events


def _describe_prefill(timeline: RequestTimeline) -> Attributes:
    return [
        ("baton.cached_tokens", timeline.cached_tokens),
        ("baton.computed_tokens", timeline.computed_tokens),
        ("baton.steps", timeline.steps),
    ]


def _describe_transfer(timeline: RequestTimeline) -> Attributes:
    attributes: Attributes = [("baton.cached_tokens", timeline.cached_tokens)]
    if (pulled := timeline.pulled) is not None:
        attributes += [
            ("baton.transport", pulled.transport),
            ("baton.pages", pulled.pages),
            ("baton.bytes", pulled.bytes),
            ("baton.pull_us", round(pulled.pull_seconds * 1e6)),
        ]
    return attributes


def _describe_decode(timeline: RequestTimeline) -> Attributes:
    drafts: Attributes = []
    # Most engines draft nothing.
    if timeline.draft_tokens:
        drafts = [
            ("baton.draft_tokens", timeline.draft_tokens),
            ("baton.accepted_draft_tokens", timeline.drafts_drawn),
        ]
    return [
        ("gen_ai.usage.output_tokens", timeline.output_tokens),
        ("baton.retractions", timeline.retractions),
        ("baton.preemptions", timeline.preemptions),
        ("baton.recomputed_tokens", timeline.recomputed_tokens),
        *drafts,
    ]
