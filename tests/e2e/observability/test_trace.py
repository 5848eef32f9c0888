"""One trace across router, prefill and decode node, as a collector gets it."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator

import openai
import pytest

from tests.support.processes.cluster import Cluster, eventually, metric
from tests.support.processes.collector import Collector, GotSpan

CLOCKS_NS = 1_000_000_000
"""Router and engines each read wall and monotonic clock once, one after the other, and may be interrupted between."""
CLIENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector.start() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(collector: Collector) -> Iterator[Cluster]:
    flags = (
        "--enable-trace",
        "--otlp-traces-endpoint",
        collector.endpoint,
        "--chunked-prefill-size",
        "64",
    )
    with Cluster.up(*flags) as cluster:
        yield cluster


def ask(cluster: Cluster, name: str, **more: object) -> str:
    """Send a request under its own trace id and return that."""
    trace = name.encode().hex().rjust(32, "a")
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    body: dict[str, object] = {
        "model": "demo",
        "prompt": f"{name} " + "Baton passes pages. " * 20,
        "max_tokens": 8,
    }
    with cluster.client() as client:
        client.post(
            "/completions", body={**body, **more}, cast_to=object, options={"headers": headers}
        )
    return trace


def named(spans: list[GotSpan], by: str, name: str) -> GotSpan:
    found = [span for span in spans if span.by == by and span.name == name]
    assert len(found) == 1, f"{by} {name}: {[(span.by, span.name) for span in spans]}"
    return found[0]


def test_one_request_is_one_trace_from_router_to_both_ranks(
    collector: Collector, traced: Cluster
) -> None:
    trace = ask(traced, "whole", temperature=0, ignore_eos=True)
    spans = collector.until(
        "all spans of router, prefill and decode node",
        lambda spans: len([span for span in spans if span.trace == trace]) >= 12,
    )
    spans = [span for span in spans if span.trace == trace]
    assert len({span.id for span in spans}) == len(spans) == 12
    path = "POST /v1/completions"
    root = named(spans, "baton-router", path)
    assert root.parent == "00f067aa0ba902b7", "the client's span"
    for service, leg, stages in (
        ("baton-prefill", "prefill", ("queue", "prefill", "lease")),
        ("baton-decode", "decode", ("queue", "transfer", "decode")),
    ):
        sent = named(spans, "baton-router", leg)
        front = named(spans, service, path)
        assert (sent.parent, front.parent) == (root.id, sent.id)
        assert (front.kind, sent.kind) == (2, 3), "server below client"
        assert front.service["baton.role"] == leg
        assert front.attributes["baton.room"] == sent.attributes["baton.room"]
        stage_spans = [named(spans, service, stage) for stage in stages]
        assert {span.parent for span in stage_spans} == {front.id}
        for one, other in itertools.pairwise(stage_spans):
            assert one.end == other.start, "one stage ends, the next begins"
        # Only what causes order is compared: a node's answer reaches the router before the node notes its own end, and
        # P's lease ends when it hears that D has the pages, which no answer waits for.
        assert root.start <= sent.start <= front.start + CLOCKS_NS
        assert front.start <= stage_spans[0].start
        assert all(span.end <= front.end for span in stage_spans if span.name != "lease")
    for span in spans:
        assert span.start <= span.end
        assert all(span.start <= at <= span.end for at, _, _ in span.events)
        assert span.error is None

    prefill, lease = (
        named(spans, "baton-prefill", "prefill"),
        named(spans, "baton-prefill", "lease"),
    )
    transfer, decode = (
        named(spans, "baton-decode", "transfer"),
        named(spans, "baton-decode", "decode"),
    )
    prompt_tokens = named(spans, "baton-prefill", "queue").attributes["baton.prompt_tokens"]
    counted = prefill.attributes
    assert counted["baton.cached_tokens"] + counted["baton.computed_tokens"] == prompt_tokens  # type: ignore[operator]
    chunks = [more["baton.tokens"] for _, name, more in prefill.events if name == "computed"]
    assert len(chunks) == counted["baton.steps"] > 1
    assert sum(map(int, chunks)) == counted["baton.computed_tokens"]
    assert lease.attributes["baton.finish"] == "DONE"
    assert lease.attributes["baton.pages"] == transfer.attributes["baton.pages"]
    assert transfer.attributes["baton.transport"] == "shm"
    assert int(transfer.attributes["baton.bytes"]) > 0
    assert prefill.end <= transfer.end + CLOCKS_NS, (
        "D has the pages no sooner than P has computed them"
    )
    assert decode.end <= root.end + CLOCKS_NS, "the answer ends no sooner than its last token"
    assert (decode.attributes["gen_ai.usage.output_tokens"], decode.attributes["baton.finish"]) == (
        8,
        "length",
    )


def test_client_that_does_not_sample_leaves_no_span(collector: Collector, traced: Cluster) -> None:
    headers = {"traceparent": CLIENT[:-2] + "00"}
    with traced.client() as client:
        client.completions.create(model="demo", prompt="quiet", max_tokens=2, extra_headers=headers)
    after = ask(traced, "after it")
    spans = collector.until(
        "the request after it",
        lambda spans: any(s.name == "lease" and s.trace == after for s in spans),
    )
    assert CLIENT[3:35] not in {span.trace for span in spans}


def test_error_is_in_the_span_where_it_happened(collector: Collector, traced: Cluster) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        ask(traced, "too late", deadline_ms=1, max_tokens=64)
    assert refused.value.code == "timeout"
    trace = b"too late".hex().rjust(32, "a")
    spans = collector.until(
        "the failed spans of a node",
        lambda spans: any(
            s.trace == trace and s.error == "timeout" and s.by != "baton-router" for s in spans
        ),
    )
    failed = [span for span in spans if span.trace == trace and span.error == "timeout"]
    assert {span.attributes["baton.finish"] for span in failed if span.kind == 1} <= {"error"}


def test_dead_collector_costs_spans_and_no_request() -> None:
    with socket.socket() as taken:  # bound and not listening: every connection is refused
        taken.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with Cluster.up(
            "--workers",
            "1",
            "--simulate",
            "reference",
            "--enable-trace",
            "--otlp-traces-endpoint",
            endpoint,
        ) as cluster:
            url = cluster.node("worker")["url"]
            for i in range(5):
                cluster.complete(f"prompt {i}", max_tokens=4)
            eventually(
                "spans are counted as lost",
                lambda: metric(url, "baton_trace_spans_total", result="failed") >= 5 * 4,
            )
            cluster.complete("and still", max_tokens=4)
            assert metric(url, "baton_trace_spans_total", result="exported") == 0
