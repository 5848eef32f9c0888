"""Spans from a request's times: where they hang, what they cover, what they say."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.sched.types.request_timeline import PulledPages, RequestTimeline
from baton.server.observability.spans import (
    AnsweredRequest,
    ParentSpan,
    Span,
    continue_trace,
    request_span,
    timeline_spans,
)

W3C = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PARENT = ParentSpan(0x4BF92F3577B34DA6A3CE929D0E0E4736, 11, 0x00F067AA0BA902B7)
ANSWERED = AnsweredRequest(
    method="POST",
    route="/generate",
    request_id="r",
    status=200,
    outcome="ok",
    arrived=1.0,
    ended=9.0,
    submitted=1.5,
)


def unix(at: float) -> int:
    return round(at * 1e9)


def of(spans: list[Span]) -> dict[str, tuple[float, float]]:
    return {span.name: (span.start / 1e9, span.end / 1e9) for span in spans}


def timeline(**fields: Any) -> RequestTimeline:
    return RequestTimeline(handle=3, trace=PARENT.packed(2.0), prompt_tokens=40, **fields)


# ---------------------------------------------------------------------- traceparent


def test_callers_trace_is_continued() -> None:
    mine = continue_trace(W3C)
    assert mine is not None
    assert (mine.trace, mine.above) == (PARENT.trace, PARENT.above)
    assert mine.span not in (0, mine.above)
    assert continue_trace(f"cc{W3C[2:]}-more") is not None, "a later version may add to the end"


def test_caller_that_does_not_sample_is_followed() -> None:
    assert continue_trace(W3C[:-1] + "0") is None
    assert continue_trace(W3C[:-2] + "02") is None, "only the lowest bit says so"


@pytest.mark.parametrize(
    "wrong",
    [
        None, "", "00", W3C[:54], W3C + "-more", "ff" + W3C[2:], W3C.upper(), W3C.replace("4bf9", "4BF9"),
        f"00-{'0' * 32}-00f067aa0ba902b7-01", f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01",
    ],
)  # fmt: skip
def test_without_a_valid_parent_a_trace_begins(wrong: str | None) -> None:
    one, other = continue_trace(wrong), continue_trace(wrong)
    assert one is not None
    assert other is not None
    assert one.above is None
    assert one.trace not in (0, PARENT.trace, other.trace)


# ---------------------------------------------------------------------- the front's span


def test_request_hangs_below_the_caller() -> None:
    span = request_span(PARENT, dataclasses.replace(ANSWERED, first_token=4.0), unix)
    assert (span.trace, span.id, span.parent) == (PARENT.trace, 11, PARENT.above)
    assert (span.name, span.is_server, span.error) == ("POST /generate", True, None)
    assert (span.start, span.end) == (1_000_000_000, 9_000_000_000)
    assert [(at / 1e9, name) for at, name, _ in span.events] == [
        (1.5, "submitted"),
        (4.0, "first_token"),
    ]
    assert dict(span.attributes)["http.response.status_code"] == 200


@pytest.mark.parametrize(
    ("outcome", "fails"),
    [("ok", False), ("client_disconnected", False), ("context_length_exceeded", False), ("kv_transfer_failed", True),
     ("internal_error", True), ("timeout", True), ("aborted", False)],
)  # fmt: skip
def test_only_what_the_server_did_wrong_is_an_error(outcome: str, fails: bool) -> None:
    span = request_span(PARENT, dataclasses.replace(ANSWERED, outcome=outcome), unix)
    assert span.error == (outcome if fails else None)
    assert dict(span.attributes)["baton.outcome"] == outcome


# ---------------------------------------------------------------------- a rank's spans


def test_node_that_does_both_phases() -> None:
    spans = timeline_spans(
        timeline(
            admitted_at=3.0, first_token_at=5.0, ended_at=8.0, cached_tokens=16, computed_tokens=24, steps=2,
            output_tokens=9, retractions=1, finish="stop",
            events=[(4.0, "computed", 16), (5.0, "computed", 8), (6.0, "retracted", 41), (7.0, "admitted", 0)],
        ),
        2, unix,
    )  # fmt: skip
    assert of(spans) == {"queue": (2.0, 3.0), "prefill": (3.0, 5.0), "decode": (5.0, 8.0)}
    assert {(span.trace, span.parent) for span in spans} == {(PARENT.trace, PARENT.span)}
    queue, prefill, decode = (dict(span.attributes) for span in spans)
    assert queue == {"baton.dp_rank": 2, "baton.handle": 3, "baton.prompt_tokens": 40}
    assert (
        prefill["baton.cached_tokens"],
        prefill["baton.computed_tokens"],
        prefill["baton.steps"],
    ) == (16, 24, 2)
    assert (
        decode["gen_ai.usage.output_tokens"],
        decode["baton.retractions"],
        decode["baton.finish"],
    ) == (9, 1, "stop")
    assert [name for _, name, _ in spans[1].events] == ["computed", "computed"], (
        "the step that made the first token"
    )
    assert [name for _, name, _ in spans[2].events] == ["retracted", "admitted"]
    assert spans[1].events[0][2] == [("baton.tokens", 16)]


def test_drafts_of_an_answer_are_told_where_there_were_some() -> None:
    times = {"admitted_at": 3.0, "first_token_at": 5.0, "ended_at": 8.0}
    *_, plain = timeline_spans(timeline(**times), 0, unix)
    *_, drafted = timeline_spans(timeline(**times, draft_tokens=9, drafts_drawn=7), 0, unix)
    told = dict(drafted.attributes).items() - dict(plain.attributes).items()
    assert told == {("baton.draft_tokens", 9), ("baton.accepted_draft_tokens", 7)}


def test_prefill_node_holds_a_lease() -> None:
    spans = timeline_spans(
        timeline(admitted_at=3.0, first_token_at=5.0, ended_at=30.0, leased_pages=7, finish="DONE"),
        0,
        unix,
    )
    assert of(spans) == {"queue": (2.0, 3.0), "prefill": (3.0, 5.0), "lease": (5.0, 30.0)}
    assert dict(spans[2].attributes) == {
        "baton.dp_rank": 0, "baton.handle": 3, "baton.pages": 7, "baton.finish": "DONE",
    }  # fmt: skip


def test_decode_node_waits_for_pages() -> None:
    pulled = PulledPages("shm", 7, 7 << 14, 0.000_25, 1.0)
    spans = timeline_spans(
        timeline(
            is_transfer=True, admitted_at=3.0, announced_at=2.5, first_token_at=4.0, ended_at=6.0, pulled=pulled,
            finish="length",
        ),
        0, unix,
    )  # fmt: skip
    assert list(of(spans)) == ["queue", "transfer", "decode"]
    assert [name for _, name, _ in spans[0].events] == ["announced"]
    transfer = dict(spans[1].attributes)
    assert (transfer["baton.transport"], transfer["baton.pages"], transfer["baton.pull_us"]) == (
        "shm",
        7,
        250,
    )
    assert transfer["baton.bytes"] == 7 << 14


def test_failed_request_has_its_error_in_the_span_where_it_failed() -> None:
    (queue,) = timeline_spans(
        timeline(ended_at=3.0, finish="error", error="queue_timeout"), 0, unix
    )
    assert (queue.name, queue.error, queue.end) == ("queue", "queue_timeout", 3_000_000_000)
    spans = timeline_spans(
        timeline(
            is_transfer=True,
            admitted_at=3.0,
            ended_at=4.0,
            finish="error",
            error="kv_transfer_failed",
        ),
        0,
        unix,
    )
    assert [span.error for span in spans] == [None, "kv_transfer_failed"]


seconds = st.floats(2.0, 100.0)


@given(st.lists(seconds, min_size=1, max_size=3), st.lists(seconds, max_size=8), st.booleans())
def test_stages_follow_each_other_and_no_event_is_lost(
    times: list[float], events: list[float], leased: bool
) -> None:
    *stages, end = sorted(times)
    fields = dict(zip(("admitted_at", "first_token_at"), stages, strict=False))
    events = sorted(at for at in events if at <= end)
    computed = [(at, "computed", 1) for at in events]
    spans = timeline_spans(
        timeline(**fields, ended_at=end, leased_pages=int(leased), events=computed), 0, unix
    )
    assert len(spans) == 1 + len(stages)
    assert (spans[0].start, spans[-1].end) == (unix(2.0), unix(end))
    assert all(one.end == other.start for one, other in itertools.pairwise(spans))
    assert [at for span in spans for at, _, _ in span.events] == [unix(at) for at in events]
    assert all(span.start <= at <= span.end for span in spans for at, _, _ in span.events)
    assert len({span.id for span in spans}) == len(spans)
