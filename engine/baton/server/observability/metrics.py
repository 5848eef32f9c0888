"""All metrics of an engine: one table with help texts, the objects the front writes, and the text of GET /metrics.

The front owns `FRONT`. The ranks report `RANK` by message once a second; they pass through with the
prefix `baton_` and a `dp_rank` label. server.observability.metric_aliases repeats some of them under other engines'
names.
`python -m baton.server.observability.metrics` prints the table as markdown; docs/metrics.md holds it and a test
compares them.
"""

from __future__ import annotations

import itertools
import math
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.sched.metrics.collector import HISTOGRAMS
from baton.sched.metrics.histogram import GAP_BUCKETS, STAGE_BUCKETS, TOKEN_BUCKETS
from baton.server.observability import metric_aliases
from baton.server.worker.messages import HistogramColumns

PREFIX = "baton_"


@dataclass(frozen=True, slots=True)
class Spec:
    """Definition of a metric. `name` is without the prefix."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _rank_histogram(name: str, help: str, labels: tuple[str, ...] = ()) -> Spec:
    return Spec(name, "histogram", help, labels, HISTOGRAMS[name])


FRONT = (
    Spec(
        "http_requests",
        "counter",
        "requests answered, by endpoint and outcome ('ok' or an error code)",
        ("endpoint", "code"),
    ),
    Spec("requests_in_flight", "gauge", "requests this process is working on", ("endpoint",)),
    Spec("ttft_seconds", "histogram", "arrival of the request to its first token", ("endpoint",), STAGE_BUCKETS),
    Spec("itl_seconds", "histogram", "mean gap between tokens of one delivery", (), GAP_BUCKETS),
    Spec("e2e_seconds", "histogram", "arrival of the request to the end of its answer", ("endpoint",), STAGE_BUCKETS),
    Spec("prompt_tokens", "counter", "prompt tokens of answered requests"),
    Spec("cached_prompt_tokens", "counter", "of these, tokens that prefill did not compute for the request"),
    Spec("completion_tokens", "counter", "tokens generated for answered requests"),
    Spec("request_prompt_tokens", "histogram", "prompt length of a request", (), TOKEN_BUCKETS),
    Spec("request_completion_tokens", "histogram", "answer length of a request", (), TOKEN_BUCKETS),
    Spec("client_disconnects", "counter", "requests whose client left before the answer's end", ("phase",)),
    Spec("keepalives", "counter", "SSE comments sent while a request waited"),
    Spec("ignored_parameters", "counter", "unknown request fields that had no effect"),
    Spec("tenant_rate_limited", "counter", "requests refused with 429: their tenant's tokens_per_minute are used up"),
    Spec(
        "trace_spans",
        "counter",
        "spans of --enable-trace: exported, dropped (the queue was full) or failed (the collector)",
        ("result",),
    ),
    Spec("ready", "gauge", "1 when a request sent now would be accepted"),
    Spec("state", "gauge", "1 for the state in force: starting, loading, ready, draining or dead", ("state",)),
    Spec("load_progress_ratio", "gauge", "share of the model's weights that are in memory, 0 to 1"),
    Spec("ranks_alive", "gauge", "DP ranks of this engine that live"),
    Spec("build", "info", "version and mode, value 1", ("version", "python", "mode", "model")),
    Spec("kv_routes_refused", "counter", "P: requests to the bootstrap server refused, or closed while silent"),
)

RANK = (
    Spec(
        "requests",
        "gauge",
        "requests by state: waiting, opening, transfer, running, suspended, leased, aborting",
        ("state",),
    ),
    Spec("max_running_requests", "gauge", "most requests that run at once: --max-running-requests, or its default"),
    Spec("kv_pages", "gauge", "KV pages by state: free, cached (evictable), held, in_transfer", ("state",)),
    Spec(
        "kv_host_pages",
        "gauge",
        "pages of the host tier by state: free, cached, pinned (preempted requests)",
        ("state",),
    ),
    Spec("page_ledger_healthy", "gauge", "1 while the KV pages add up; at 0 the rank has ended its requests"),
    Spec("kv_host_copies", "counter", "KV pages copied between device and host: out, in", ("direction",)),
    Spec("kv_host_copy_bytes", "counter", "bytes of these", ("direction",)),
    Spec("kv_host_copy_seconds", "counter", "time they took; 0 on devices that copy in the background"),
    Spec("kv_usage_ratio", "gauge", "pages neither free nor evictable / all pages, 0 to 1"),
    Spec("new_token_ratio", "gauge", "estimate of the answer's share of its limit, used for admission"),
    Spec("engine_steps", "counter", "forward passes"),
    Spec("engine_step_seconds", "counter", "time from launch to commit of forward passes"),
    Spec("tp_collectives", "counter", "exchanges among tensor-parallel ranks, as the first one counts; with --tp-size"),
    Spec(
        "tp_collective_seconds",
        "counter",
        "how long the first tensor-parallel rank was in exchanges, waiting for others included; on CUDA until the call "
        "returned",
    ),
    Spec("prompt_tokens_computed", "counter", "prompt tokens that went through the model"),
    Spec(
        "cached_prompt_tokens_by_source",
        "counter",
        "tokens found in the cache: device, in_flight, host, decode_tree, rematch (docs/scheduling/cache.md)",
        ("source",),
    ),
    Spec("kv_event_batches", "counter", "batches of KV events announced, with --kv-events-config"),
    Spec("generated_tokens", "counter", "tokens sampled"),
    Spec("nonfinite_logits", "counter", "rows that got no token because the model computed NaN or infinity"),
    Spec("generated_tokens_per_s", "gauge", "the same per second, over the second before the report"),
    Spec("retractions", "counter", "running requests sent back to the waiting queue for memory"),
    Spec(
        "deadline_missed",
        "counter",
        "first tokens past ttft_deadline_ms (ttft), requests timed out (total)",
        ("kind",),
    ),
    Spec("schedule_policy_active", "gauge", "1 for the queue order in force, 0 for the other candidates", ("policy",)),
    Spec("adaptive_policy", "gauge", "the same, only under --schedule-policy adaptive", ("policy",)),
    Spec("priority_hook_errors", "counter", "failed calls of --priority-adjustment-function"),
    Spec("schedule_policy_degraded", "counter", "times lpm turned to fcfs because of --lpm-degrade-threshold"),
    Spec(
        "queue_turned_away",
        "counter",
        "waiting requests that ended with an error: refused (queue full), evicted (for a higher priority), timeout, "
        "deadline",
        ("reason",),
    ),
    Spec("preemptions", "counter", "running requests sent back to the waiting queue for one of higher priority"),
    Spec("suspensions", "counter", "requests suspended by POST /v1/requests/{rid}/suspend"),
    Spec(
        "steps",
        "counter",
        "steps planned, by mode (extend, decode, mixed) and by why they took no further prompt tokens",
        ("mode", "stopped_by"),
    ),
    Spec("log_lines_dropped", "counter", "lines of --decision-log and --scheduler-trace that were lost", ("log",)),
    Spec("starving_requests", "gauge", "requests that wait too long while later ones are admitted", ("class",)),
    Spec("priority_starvation", "counter", "requests that were starving at any time", ("class",)),
    Spec(
        "priority_preemption",
        "counter",
        "running requests sent back to the queue, by their class and the class they made room for",
        ("class", "by", "reason"),
    ),
    Spec("request_retraction_reasons", "counter", "the same: memory, priority, slots, admin", ("reason",)),
    Spec("recomputed_tokens", "counter", "tokens computed again because their request was sent back"),
    _rank_histogram("priority_waiting_time_seconds", "arrival of a request to its first admission", ("class",)),
    _rank_histogram("request_overtaken", "later requests that were admitted before this one"),
    _rank_histogram("decode_stall_seconds", "gaps between tokens of a running request in which other work was done"),
    _rank_histogram("deadline_slack_seconds", "time left to ttft_deadline_ms at the first token, negative if late"),
    Spec("class_waiting", "gauge", "requests waiting, by priority class", ("class",)),
    Spec("class_tokens", "counter", "tokens by priority class: prompt (computed), generated", ("class", "kind")),
    Spec(
        "tenant_tokens",
        "counter",
        "tokens by tenant (those of the tenant file, 100 more, then other): prompt (computed), cached, generated",
        ("tenant", "kind"),
    ),
    Spec(
        "tenant_throttled",
        "counter",
        "requests that met a limit of their tenant: queue (refused), running, kv (waited)",
        ("reason",),
    ),
    Spec("tenants_forgotten", "counter", "idle tenants dropped from the table at --max-idle-tenants"),
    Spec("kv_rooms", "gauge", "live KV transfers by state", ("state",)),
    Spec("kv_leases", "gauge", "P: finished prompts whose pages wait for D"),
    Spec("kv_oldest_lease_seconds", "gauge", "P: age of the oldest of these prompts; 0 without any"),
    Spec("kv_peers", "gauge", "connected nodes of the other role"),
    Spec("kv_outbox_bytes", "gauge", "control messages that wait for the slowest peer, about"),
    Spec("kv_transfer_healthy", "gauge", "1 while the KV transfer runtime works; at 0 the node reports itself unready"),
    Spec("kv_quarantined_pages", "counter", "cached pages taken out of use: one was damaged, or gave NaN"),
    Spec("kv_accept_errors", "counter", "connections of this host not accepted for lack of descriptors or memory"),
    Spec("kv_pulls", "counter", "D: prompts whose pages arrived and verified", ("transport",)),
    Spec("kv_pull_bytes", "counter", "D: bytes of KV pages pulled", ("transport",)),
    Spec(
        "kv_pull_seconds",
        "counter",
        "D: sum of baton_kv_pull_duration_seconds as the transfer runtime counts it",
        ("transport",),
    ),
    _rank_histogram(
        "kv_pull_duration_seconds", "D: time from the first pull of a prompt to its last page verified", ("transport",)
    ),
    Spec("kv_transfer_failures", "counter", "transfers that failed, by reason code (docs/protocol.md)", ("code",)),
    Spec(
        "kv_room_errors",
        "counter",
        "transfers this node ended itself: refused (no capacity), call (a failed call), payload (a bad first token)",
        ("kind",),
    ),
    Spec("kv_rejects", "counter", "P: OPENs of decode ranks that were refused, by reason code", ("code",)),
    Spec("kv_hellos_refused", "counter", "connections refused before a link existed, by reason code", ("code",)),
    Spec("kv_hellos_evicted", "counter", "silent connections closed to make space for new ones"),
    Spec("kv_reads_refused", "counter", "P: reads of pages that were not announced to the asking decode rank"),
    Spec("kv_links_lost", "counter", "links to nodes of the other role that ended, for any reason"),
    Spec("kv_bad_frames", "counter", "connections cut because of a damaged, unauthenticated or unexpected message"),
    Spec("kv_damaged_pulls", "counter", "D: pulls that brought pages other than announced", ("transport",)),
    Spec(
        "kv_quarantines",
        "counter",
        "D: times that transfers from a P rank were stopped for a while because several in a row were damaged",
    ),
    Spec("kv_transport_fallbacks", "counter", "pairs that changed to a slower transport"),
    Spec("kv_communicators", "gauge", "communicators of the gloo or nccl transport by state", ("state",)),
    Spec(
        "kv_communicators_ended",
        "counter",
        "communicators closed to make place, failed, or abandoned because their abort hung",
        ("end",),
    ),
)

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class _RankCollector(Collector):
    """Renders what the ranks reported last. Names outside RANK pass too, with a help text that says so."""

    def __init__(self) -> None:
        self.reports: dict[int, tuple[dict[str, float], dict[str, float], dict[str, HistogramColumns]]] = {}

    def collect(self) -> Iterator[Metric]:
        specs = {s.name: s for s in RANK}
        families: dict[str, Metric] = {}
        for dp_rank, (gauges, counters, histograms) in sorted(self.reports.items()):
            for table, family in ((gauges, GaugeMetricFamily), (counters, CounterMetricFamily)):
                for key, value in table.items():
                    name, _, rest = key.partition("{")
                    name = name.removesuffix("_total") if family is CounterMetricFamily else name
                    labels = dict(_LABEL.findall(rest))
                    if name not in families:
                        text = specs[name].help if name in specs else "reported by the rank"
                        families[name] = family(PREFIX + name, text, labels=["dp_rank", *labels])
                    families[name].add_metric([str(dp_rank), *labels.values()], value)  # type: ignore[attr-defined]
            for key, columns in histograms.items():
                name, _, rest = key.partition("{")
                labels = dict(_LABEL.findall(rest))
                if name not in families:
                    families[name] = HistogramMetricFamily(PREFIX + name, specs[name].help, labels=["dp_rank", *labels])
                families[name].add_metric(  # type: ignore[attr-defined]
                    [str(dp_rank), *labels.values()], _cumulated(specs[name].buckets, columns.counts), columns.sum
                )
        yield from families.values()

    def describe(self) -> Sequence[Metric]:
        return ()


def _cumulated(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Prometheus' form: for each upper bound all observations up to it."""
    return list(zip(map(floatToGoString, (*bounds, math.inf)), itertools.accumulate(counts), strict=True))


class EngineMetrics:
    """The front's metrics, one instance per process (own registry: tests start several)."""

    def __init__(
        self, version: str = "", mode: str = "", model: str = "", page_size: int = 16, compat_names: str = "none"
    ) -> None:
        """`compat_names`: --metrics-compat."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per counter and histogram that is not read
        self.registry = CollectorRegistry()
        made = {s.name: self._make(s) for s in FRONT}
        self.requests: Counter = made["http_requests"]
        self.in_flight: Gauge = made["requests_in_flight"]
        self.ttft: Histogram = made["ttft_seconds"]
        self.itl: Histogram = made["itl_seconds"]
        self.e2e: Histogram = made["e2e_seconds"]
        self.prompt_tokens: Counter = made["prompt_tokens"]
        self.cached_tokens: Counter = made["cached_prompt_tokens"]
        self.completion_tokens: Counter = made["completion_tokens"]
        self.prompt_length: Histogram = made["request_prompt_tokens"]
        self.completion_length: Histogram = made["request_completion_tokens"]
        self.disconnects: Counter = made["client_disconnects"]
        self.keepalives: Counter = made["keepalives"]
        self.ignored: Counter = made["ignored_parameters"]
        self.rate_limited: Counter = made["tenant_rate_limited"]
        self.trace_spans: Counter = made["trace_spans"]
        self.kv_routes_refused: Counter = made["kv_routes_refused"]
        self.ready: Gauge = made["ready"]
        self.state: Gauge = made["state"]
        self.load_progress: Gauge = made["load_progress_ratio"]
        self.ranks_alive: Gauge = made["ranks_alive"]
        made["build"].labels(version, platform.python_version(), mode, model).set(1)
        ProcessCollector(namespace=PREFIX.rstrip("_"), registry=self.registry)
        self._ranks = _RankCollector()
        self.registry.register(self._ranks)
        self.registry.register(metric_aliases.CompatCollector(compat_names, model, page_size, PREFIX, self._native))
        self._made = tuple(made.values())

    def _native(self) -> Iterator[Metric]:
        for metric in self._made:
            yield from metric.collect()
        yield from self._ranks.collect()

    def _make(self, spec: Spec) -> Any:
        name = PREFIX + spec.name
        if spec.kind == "counter":
            return Counter(name, spec.help, spec.labels, registry=self.registry)
        if spec.kind == "histogram":
            return Histogram(name, spec.help, spec.labels, buckets=spec.buckets, registry=self.registry)
        return Gauge(name + ("_info" if spec.kind == "info" else ""), spec.help, spec.labels, registry=self.registry)

    def report(
        self,
        dp_rank: int,
        gauges: dict[str, float],
        counters: dict[str, float],
        histograms: dict[str, HistogramColumns] | None = None,
    ) -> None:
        """Set the last report of a rank; empty tables when it died."""
        self._ranks.reports[dp_rank] = (gauges, counters, histograms or {})

    def text(self) -> bytes:
        return generate_latest(self.registry)


def exported_name(spec: Spec) -> str:
    """The name as it appears in /metrics."""
    return PREFIX + spec.name + {"counter": "_total", "info": "_info"}.get(spec.kind, "")


def markdown() -> str:
    """The tables of docs/metrics.md."""
    out = []
    for title, specs in (
        ("Written by the front process", FRONT),
        ("Written by each rank (label `dp_rank`)", RANK),
    ):
        out += [f"### {title}", "", "| metric | type | labels | meaning |", "|---|---|---|---|"]
        for s in specs:
            labels = ", ".join(f"`{label}`" for label in s.labels) or "-"
            out.append(f"| `{exported_name(s)}` | {'gauge' if s.kind == 'info' else s.kind} | {labels} | {s.help} |")
        out.append("")
    return "\n".join([*out, metric_aliases.markdown()])


if __name__ == "__main__":
    print(markdown())
