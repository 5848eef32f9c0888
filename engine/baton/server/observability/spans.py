"""Spans of a traced request, made from its times after its end; pure, no clock and no exporter.

    router's leg span, or the client's
      └ POST /v1/…                 the front: body read to last byte              request_span
          ├ queue                  submitted to its place on the device
          ├ prefill | transfer     to the first token: computed here | by P and pulled (D)
          └ lease | decode         P: until D has the pages | to the last token   story_spans

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
from baton.sched.metrics.request_timeline import RequestTimeline

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
        """What a rank hands back with its story."""
        return _PACKED.pack(self.trace.to_bytes(16, "big"), self.span, submitted)


def continue_trace(traceparent: str | None) -> ParentSpan | None:
    """A span below the caller's (W3C Trace Context), or of a new trace; None: the caller does not sample this one."""
    found = _TRACEPARENT.fullmatch((traceparent or "").strip())
    if found is not None:
        version, trace, above, flags, more = found.groups()
        if int(trace, 16) and int(above, 16) and not (version == "00" and more):
            return ParentSpan(int(trace, 16), new_id(), int(above, 16)) if int(flags, 16) & 1 else None
    return ParentSpan(random.getrandbits(128) or 1, new_id(), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredRequest:
    """A request as the front saw it; times are monotonic seconds."""

    method: str
    route: str
    request_id: str
    status: int | None
    """None: nobody was there to get one."""
    outcome: str
    """ok, client_disconnected, or an error's code."""
    arrived: float
    ended: float
    submitted: float | None = None
    """It had been checked and tokenized, and went to a rank."""
    first_token: float | None = None
    more: tuple[tuple[str, str | int], ...] = ()


def request_span(parent: ParentSpan, told: AnsweredRequest, unix: ToUnix) -> Span:
    attributes: Attributes = [
        ("http.request.method", told.method),
        ("http.route", told.route),
        ("baton.request_id", told.request_id),
        ("baton.outcome", told.outcome),
        *told.more,
    ]
    if told.status is not None:
        attributes.append(("http.response.status_code", told.status))
    marks = (("submitted", told.submitted), ("first_token", told.first_token))
    events: list[tuple[int, str, Attributes]] = [(unix(at), name, []) for name, at in marks if at is not None]
    failed = told.outcome not in ("ok", "client_disconnected") and by_code(told.outcome).status >= 500
    return Span(
        parent.trace, parent.span, parent.above, f"{told.method} {told.route}", True, unix(told.arrived),
        unix(told.ended), attributes, events, told.outcome if failed else None,
    )  # fmt: skip


def story_spans(story: RequestTimeline, dp_rank: int, unix: ToUnix) -> list[Span]:
    """What a rank told of one item, in order of time. Children of the front's span."""
    trace, parent, submitted = _PACKED.unpack(story.trace)
    stages = [_Stage("queue", submitted, [("baton.prompt_tokens", story.prompt_tokens)])]
    if story.admitted_at is not None:
        name, told = ("transfer", _transfer(story)) if story.is_transfer else ("prefill", _prefill(story))
        stages.append(_Stage(name, story.admitted_at, told))
    if story.first_token_at is not None:
        name, told = ("lease", _lease(story)) if story.leased_pages else ("decode", _decode(story))
        stages.append(_Stage(name, story.first_token_at, told))
    stages[-1].attributes.append(("baton.finish", story.finish))
    if story.lost_events:
        stages[-1].attributes.append(("baton.lost_events", story.lost_events))
    ends = [stage.start for stage in stages[1:]] + [max(story.ended_at, stages[-1].start)]
    events: list[tuple[float, str, Attributes]] = [(at, name, [("baton.tokens", n)]) for at, name, n in story.events]
    if story.announced_at is not None:
        events = sorted([*events, (story.announced_at, "announced", [])], key=lambda event: event[0])
    who: Attributes = [("baton.dp_rank", dp_rank), ("baton.handle", story.handle)]
    spans = []
    for (name, start, attributes), end in zip(stages, ends, strict=True):
        # What happens at the border of two belongs to the first: the step that made the first token.
        happened = [event for event in events if event[0] <= end]
        events = events[len(happened) :]
        span = Span(
            trace=int.from_bytes(trace, "big"),
            id=new_id(),
            parent=parent,
            name=name,
            is_server=False,
            start=unix(start),
            end=unix(end),
            attributes=who + attributes,
            events=[(unix(at), what, more) for at, what, more in happened],
            error=None,
        )
        spans.append(span)
    spans[-1] = spans[-1]._replace(error=story.error or None)
    return spans


class _Stage(NamedTuple):
    name: str
    start: float
    attributes: Attributes


def _prefill(story: RequestTimeline) -> Attributes:
    return [
        ("baton.cached_tokens", story.cached_tokens),
        ("baton.computed_tokens", story.computed_tokens),
        ("baton.steps", story.steps),
    ]


def _transfer(story: RequestTimeline) -> Attributes:
    told: Attributes = [("baton.cached_tokens", story.cached_tokens)]
    if (pulled := story.pulled) is not None:
        told += [
            ("baton.transport", pulled.transport),
            ("baton.pages", pulled.pages),
            ("baton.bytes", pulled.bytes),
            ("baton.pull_us", round(pulled.pull_seconds * 1e6)),
        ]
    return told


def _lease(story: RequestTimeline) -> Attributes:
    return [("baton.pages", story.leased_pages)]


def _decode(story: RequestTimeline) -> Attributes:
    return [
        ("gen_ai.usage.output_tokens", story.output_tokens),
        ("baton.retractions", story.retractions),
        ("baton.preemptions", story.preemptions),
        ("baton.recomputed_tokens", story.recomputed_tokens),
    ]
