"""All metrics of an engine: one table with help texts, the objects the front writes, and the text
of GET /metrics.

The front owns `FRONT`. The ranks report `RANK` by message once a second; they pass through with the
prefix `baton_` and a `dp_rank` label. server.observability.metric_aliases repeats some of them
under other engines' names. `python -m baton.server.observability.metrics` prints the table as
markdown; docs/metrics.md holds it and a test compares them.
"""

from __future__ import annotations

import itertools
import math
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import prometheus_client as prometheus
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.sched.metrics.histogram import GAP_BUCKETS, STAGE_BUCKETS, TOKEN_BUCKETS, Histogram
from baton.server.observability import metric_aliases
from baton.server.request.grammar.checks.queue import CheckQueue
from baton.server.worker.messages import StatsMessage

PREFIX = "baton_"
M = TypeVar("M", bound=MetricWrapperBase)


@dataclass(frozen=True, slots=True)
class Spec:
    """Definition of a metric. `name` is without the prefix."""

    kind: str
    name: str
    help: str
    labels: tuple[str, ...] = ()


_gauge = partial(Spec, "gauge")
_counter = partial(Spec, "counter")
_histogram = partial(Spec, "histogram")
MODEL = "model_name"
"""Label of latencies: the name under which the model is served, as SGLang and vLLM have it."""

ROUTE_REFUSALS = ("AUTH", "OTHER")
"""Codes of requests that the bootstrap server refused."""
ROUTES_REFUSED_HELP = (
    "P: requests to the bootstrap server refused (AUTH: not signed with the cluster key), or "
    "closed "
    "while silent"
)

RANK = (
    _gauge(
        "requests",
        "requests by state: waiting, opening, transfer, running, suspended, leased, aborting",
        ("state",),
    ),
    _gauge(
        "max_running_requests",
        "most requests that run at once: --max-running-requests, or its default",
    ),
    _gauge(
        "kv_pages", "KV pages by state: free, cached (evictable), held, in_transfer", ("state",)
    ),
    _gauge(
        "kv_further_pages",
        "models whose layers see a part of a sequence, or keep states: those of the KV pages that "
        "such layers take, by kind (window, chunk, state) and state (held, cached)",
        ("kind", "state"),
    ),
    _gauge(
        "kv_host_pages",
        "pages of the host tier by state: free, cached, pinned (preempted requests)",
        ("state",),
    ),
    _gauge(
        "page_ledger_healthy", "1 while the KV pages add up; at 0 the rank has ended its requests"
    ),
    _counter("kv_host_copies", "KV pages copied between device and host: out, in", ("direction",)),
    _counter("kv_host_copy_bytes", "bytes of these", ("direction",)),
    _counter("kv_host_copy_seconds", "time they took; 0 on devices that copy in the background"),
    _counter(
        "kv_host_checksum_failures",
        "KV pages that came back from the host tier with another checksum than they left with; "
        "what reads them is computed again",
    ),
    _gauge(
        "expert_load_peak_ratio",
        "models with experts: tokens of the busiest expert / of the mean one, mean over the layers "
        "since the last report; 1 is even",
    ),
    _gauge(
        "expert_load_rank_peak_ratio",
        "the same of tensor-parallel ranks instead of experts; with --ep-size",
    ),
    _gauge("kv_usage_ratio", "pages neither free nor evictable / all pages, 0 to 1"),
    _gauge("new_token_ratio", "estimate of the answer's share of its limit, used for admission"),
    _counter("engine_steps", "forward passes"),
    _counter("engine_step_seconds", "time from launch to commit of forward passes"),
    _counter(
        "tp_collectives",
        "exchanges among tensor-parallel ranks, as the first one counts; with --tp-size",
    ),
    _counter(
        "tp_collective_seconds",
        "how long the first tensor-parallel rank was in exchanges, waiting for others included; on "
        "CUDA until the call "
        "returned",
    ),
    _counter("prompt_tokens_computed", "prompt tokens that went through the model"),
    _counter(
        "cached_prompt_tokens_by_source",
        "tokens found in the cache: device, in_flight, host, decode_tree, rematch "
        "(docs/scheduling/cache.md)",
        ("source",),
    ),
    _counter("kv_event_batches", "batches of KV events announced, with --kv-events-config"),
    _counter("generated_tokens", "tokens sampled"),
    _counter(
        "nonfinite_logits", "rows that got no token because the model computed NaN or infinity"
    ),
    _gauge("generated_tokens_per_second", "the same per second, over the second before the report"),
    _counter(
        "grammar_failures", "rows that got no token because the answer's grammar could not go on"
    ),
    _counter("grammar_errors", "requests whose grammar could not be compiled"),
    _counter("grammar_cache_hits", "requests whose grammar had been compiled before"),
    _histogram("grammar_compile_seconds", "time to compile a grammar", (MODEL,)),
    _histogram(
        "grammar_mask_seconds",
        "time to find the allowed tokens of a step's rows with grammars",
        (MODEL,),
    ),
    _counter("retractions", "running requests sent back to the waiting queue for memory"),
    _counter(
        "deadline_missed",
        "first tokens past ttft_deadline_ms (ttft), requests timed out (total)",
        ("kind",),
    ),
    _gauge(
        "schedule_policy_active",
        "1 for the queue order in force, 0 for the configured one while another is",
        ("policy",),
    ),
    _counter("priority_hook_errors", "failed calls of --priority-adjustment-function"),
    _counter(
        "schedule_policy_degraded", "times lpm turned to fcfs because of --lpm-degrade-threshold"
    ),
    _counter(
        "queue_turned_away",
        "waiting requests that ended with an error: refused (queue full), evicted (for a higher "
        "priority), timeout, "
        "deadline",
        ("reason",),
    ),
    _counter(
        "preemptions", "running requests sent back to the waiting queue for one of higher priority"
    ),
    _counter("suspensions", "requests suspended by POST /v1/requests/{rid}/suspend"),
    _counter(
        "steps",
        "steps planned, by mode (extend, decode, mixed) and by why they took no further prompt "
        "tokens",
        ("mode", "stopped_by"),
    ),
    _counter(
        "log_lines_dropped",
        "lines of --decision-log and --scheduler-trace that were lost",
        ("log",),
    ),
    _gauge(
        "starving_requests", "requests that wait too long while later ones are admitted", ("class",)
    ),
    _counter("priority_starvation", "requests that were starving at any time", ("class",)),
    _counter(
        "priority_preemption",
        "running requests sent back to the queue, by their class and the class they made room for",
        ("class", "by", "reason"),
    ),
    _counter(
        "request_retraction_reasons",
        "the same: memory, priority, slots, admin, checksum",
        ("reason",),
    ),
    _counter("recomputed_tokens", "tokens computed again because their request was sent back"),
    _counter("spec_decode_num_drafts", "rows of answers that had drafted tokens"),
    _counter("spec_decode_num_draft_tokens", "tokens drafted in them"),
    _counter(
        "spec_decode_num_accepted_tokens",
        "drafted tokens that were the tokens drawn; over the rows, plus one: tokens per row",
    ),
    _counter(
        "spec_decode_num_accepted_tokens_per_pos",
        "the same, by place behind the known token, from 0",
        ("position",),
    ),
    _counter(
        "spec_decode_saved_seconds",
        "time that steps for the accepted tokens alone would have taken, by the rank's estimate",
    ),
    _counter(
        "spec_decode_spent_seconds",
        "time that drafted tokens took, by the same estimate, and a model or head to make them",
    ),
    _histogram(
        "priority_waiting_time_seconds",
        "arrival of a request to its first admission",
        (MODEL, "class"),
    ),
    _histogram("request_overtaken", "later requests that were admitted before this one"),
    _histogram(
        "decode_stall_seconds",
        "gaps between tokens of a running request in which other work was done",
        (MODEL,),
    ),
    _histogram(
        "deadline_slack_seconds",
        "time left to ttft_deadline_ms at the first token, negative if late",
        (MODEL,),
    ),
    _gauge("class_waiting", "requests waiting, by priority class", ("class",)),
    _counter(
        "class_tokens", "tokens by priority class: prompt (computed), generated", ("class", "kind")
    ),
    _counter(
        "tenant_tokens",
        "tokens by tenant (those of the tenant file, 100 more, then other): prompt (computed), "
        "cached, generated",
        ("tenant", "kind"),
    ),
    _counter(
        "tenant_throttled",
        "requests that met a limit of their tenant: queue (refused), running, kv (waited)",
        ("reason",),
    ),
    _counter("tenants_forgotten", "idle tenants dropped from the table at --max-idle-tenants"),
    _gauge("kv_rooms", "live KV transfers by state", ("state",)),
    _gauge("kv_leases", "P: finished prompts whose pages wait for D"),
    _gauge("kv_oldest_lease_seconds", "P: age of the oldest of these prompts; 0 without any"),
    _gauge("kv_peers", "connected nodes of the other role"),
    _gauge("kv_outbox_bytes", "control messages that wait for the slowest peer, about"),
    _gauge(
        "kv_transfer_healthy",
        "1 while the KV transfer runtime works; at 0 the node reports itself unready",
    ),
    _counter("kv_quarantined_pages", "cached pages taken out of use: one was damaged, or gave NaN"),
    _counter(
        "kv_accept_errors",
        "connections of this host not accepted for lack of descriptors or memory",
    ),
    _counter("kv_pulls", "D: prompts whose pages arrived and verified", ("transport",)),
    _counter("kv_pull_bytes", "D: bytes of KV pages pulled", ("transport",)),
    _counter(
        "kv_pull_seconds",
        "D: sum of baton_kv_pull_duration_seconds as the transfer runtime counts it",
        ("transport",),
    ),
    _histogram(
        "kv_pull_duration_seconds",
        "D: time from the first pull of a prompt to its last page verified",
        (MODEL, "transport"),
    ),
    _counter(
        "kv_transfer_failures",
        "transfers that failed, by reason code (docs/protocol.md)",
        ("code",),
    ),
    _counter(
        "kv_room_errors",
        "transfers this node ended itself: refused (no capacity), call (a failed call), payload (a "
        "bad first token)",
        ("kind",),
    ),
    _counter("kv_rejects", "P: OPENs of decode ranks that were refused, by reason code", ("code",)),
    _counter(
        "kv_hellos_refused", "connections refused before a link existed, by reason code", ("code",)
    ),
    _counter("kv_hellos_evicted", "silent connections closed to make space for new ones"),
    _counter(
        "kv_reads_refused", "P: reads of pages that were not announced to the asking decode rank"
    ),
    _counter("kv_links_lost", "links to nodes of the other role that ended, for any reason"),
    _counter(
        "kv_bad_frames",
        "connections cut because of a damaged, unauthenticated or unexpected message",
    ),
    _counter(
        "kv_damaged_pulls", "D: pulls that brought pages other than announced", ("transport",)
    ),
    _counter(
        "kv_quarantines",
        "D: times that transfers from a P rank were stopped for a while because several in a row "
        "were damaged",
    ),
    _counter("kv_transport_fallbacks", "pairs that changed to a slower transport"),
    _gauge("kv_communicators", "communicators of the gloo or nccl transport by state", ("state",)),
    _counter(
        "kv_communicators_ended",
        "communicators closed to make place, failed, or abandoned because their abort hung",
        ("end",),
    ),
)

_FAMILIES = (GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class _RankCollector(Collector):
    """Renders what the ranks reported last. Names outside RANK pass too, with a help text that says
    so.
    """

    def __init__(self, model: str) -> None:
        self.reports: dict[int, StatsMessage] = {}
        self._model = model

    def collect(self) -> Iterator[Metric]:
        specs = {s.name: s for s in RANK}
        families: dict[str, Any] = {}
        for dp_rank, report in sorted(self.reports.items()):
            tables: tuple[Mapping[str, float | Histogram], ...] = (
                report.gauges,
                report.counters,
                report.histograms,
            )
            for family, table in zip(_FAMILIES, tables, strict=True):
                for key, value in table.items():
                    series, _, rest = key.partition("{")
                    labels = dict(_LABEL.findall(rest))
                    spec = specs.get(series.removesuffix("_total"))
                    if spec is not None and MODEL in spec.labels:
                        labels = {MODEL: self._model, **labels}
                    if series not in families:
                        text = "reported by the rank" if spec is None else spec.help
                        families[series] = family(
                            PREFIX + series, text, labels=["dp_rank", *labels]
                        )
                    values = (
                        (_cumulated(value), value.sum) if isinstance(value, Histogram) else (value,)
                    )
                    families[series].add_metric([str(dp_rank), *labels.values()], *values)
        yield from families.values()


def _cumulated(kept: Histogram) -> list[tuple[str, float]]:
    """Prometheus' form: for each upper bound all observations up to it."""
    return list(
        zip(
            map(floatToGoString, (*kept.bounds, math.inf)),
            itertools.accumulate(kept.counts),
            strict=True,
        )
    )


class _GapCollector(Collector):
    """Renders the gaps between tokens, which the text layer counts."""

    def __init__(self, spec: Spec, model: str) -> None:
        self.spec = spec
        self.counts: Callable[[], tuple[list[int], float]] = lambda: (
            [0] * (len(GAP_BUCKETS) + 1),
            0.0,
        )
        """Observations by bucket of GAP_BUCKETS, and their sum [seconds]."""
        self._model = model

    def collect(self) -> Iterator[Metric]:
        counts, total = self.counts()
        family = HistogramMetricFamily(PREFIX + self.spec.name, self.spec.help, labels=[MODEL])
        family.add_metric([self._model], _cumulated(Histogram(GAP_BUCKETS, counts, total)), total)
        yield family


class _CountsCollector(Collector):
    """Renders values that another part of the front counts, by one label."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.read: Callable[[], Mapping[str, float]] = dict
        """Values by label."""

    def collect(self) -> Iterator[Metric]:
        made = GaugeMetricFamily if self.spec.kind == "gauge" else CounterMetricFamily
        family = made(PREFIX + self.spec.name, self.spec.help, labels=self.spec.labels)
        for label, value in self.read().items():
            family.add_metric([label], value)
        yield family


@dataclass(frozen=True, slots=True)
class EndpointMetrics:
    """Series of one endpoint."""

    in_flight: prometheus.Gauge
    ttft: prometheus.Histogram
    e2e: prometheus.Histogram


class EngineMetrics:
    """The front's metrics, one instance per process (own registry: tests start several)."""

    def __init__(
        self,
        version: str = "",
        mode: str = "",
        model: str = "",
        page_size: int = 16,
        compat_names: str = "none",
    ) -> None:
        """`compat_names`: --metrics-compat."""
        # Else each counter and histogram has a second series, which nothing reads.
        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = prometheus.CollectorRegistry()
        self.model_name = model
        self._of_endpoint: dict[str, EndpointMetrics] = {}
        self.table: dict[Spec, Collector] = {}
        """Metrics of the front."""
        self._add_request_metrics()
        self._add_state_metrics()
        self._add_check_metrics()
        self._add_build_info(version, mode)
        self._add_route_refusals()
        prometheus.ProcessCollector(namespace=PREFIX.rstrip("_"), registry=self.registry)
        self._ranks = _RankCollector(model)
        self.registry.register(self._ranks)
        self.registry.register(
            metric_aliases.CompatCollector(compat_names, model, page_size, PREFIX, self._native)
        )

    def of_endpoint(self, endpoint: str) -> EndpointMetrics:
        """The series of an endpoint, looked up once."""
        known = self._of_endpoint.get(endpoint)
        if known is None:
            known = EndpointMetrics(
                in_flight=self.in_flight.labels(endpoint),
                ttft=self.ttft.labels(self.model_name, endpoint),
                e2e=self.e2e.labels(self.model_name, endpoint),
            )
            self._of_endpoint[endpoint] = known
        return known

    def _add_request_metrics(self) -> None:
        self.requests = self._add_counter(
            "http_requests",
            "requests answered, by endpoint and outcome ('ok' or an error code)",
            ("endpoint", "code"),
        )
        self.in_flight = self._add_gauge(
            "requests_in_flight", "requests this process is working on", ("endpoint",)
        )
        self.ttft = self._add_histogram(
            "ttft_seconds",
            "arrival of the request to its first token",
            (MODEL, "endpoint"),
            buckets=STAGE_BUCKETS,
        )
        self.gaps = self._add_gaps(self.model_name)
        self.e2e = self._add_histogram(
            "e2e_seconds",
            "arrival of the request to the end of its answer",
            (MODEL, "endpoint"),
            buckets=STAGE_BUCKETS,
        )
        self.prompt_tokens = self._add_counter(
            "prompt_tokens", "prompt tokens of answered requests"
        )
        self.cached_tokens = self._add_counter(
            "cached_prompt_tokens", "of these, tokens that prefill did not compute for the request"
        )
        self.completion_tokens = self._add_counter(
            "completion_tokens", "tokens generated for answered requests"
        )
        self.prompt_length = self._add_histogram(
            "request_prompt_tokens", "prompt length of a request", buckets=TOKEN_BUCKETS
        )
        self.completion_length = self._add_histogram(
            "request_completion_tokens", "answer length of a request", buckets=TOKEN_BUCKETS
        )
        self.disconnects = self._add_counter(
            "client_disconnects", "requests whose client left before the answer's end", ("phase",)
        )
        self.keepalives = self._add_counter(
            "keepalives", "SSE comments sent while a request waited"
        )
        self.ignored = self._add_counter(
            "ignored_parameters", "unknown request fields that had no effect"
        )
        self.rate_limited = self._add_counter(
            "tenant_rate_limited",
            "requests refused with 429: their tenant's tokens_per_minute are used up",
        )
        self.trace_spans = self._add_counter(
            "trace_spans",
            "spans of --enable-trace: exported, dropped (the queue was full) or failed (the "
            "collector)",
            ("result",),
        )

    def _add_state_metrics(self) -> None:
        self.ready = self._add_gauge("ready", "1 when a request sent now would be accepted")
        self.state = self._add_gauge(
            "state",
            "1 for the state in force: starting, loading, ready, draining or dead",
            ("state",),
        )
        self.load_progress = self._add_gauge(
            "load_progress_ratio", "share of the model's weights that are in memory, 0 to 1"
        )
        self.ranks_alive = self._add_gauge("ranks_alive", "DP ranks of this engine that live")

    def _add_check_metrics(self) -> None:
        self._check_outcomes = self._add_counts(
            _counter(
                "grammar_checks",
                "checks of schemas and grammars by outcome: checked, moved (to the lane of large "
                "ones, with a second "
                "outcome), too_slow, known_slow, over_budget, queue_full",
                ("outcome",),
            )
        )
        self._check_cpu_secs = self._add_counts(
            _counter(
                "grammar_check_cpu_seconds",
                "CPU time of checks of schemas and grammars by lane: small, large",
                ("lane",),
            )
        )
        self._waiting_checks = self._add_counts(
            _gauge(
                "grammar_checks_waiting",
                "checks of schemas and grammars that wait for their turn, by lane: small, large",
                ("lane",),
            )
        )

    def watch_checks(self, checks: CheckQueue) -> None:
        """Show what this queue counts."""
        self._check_outcomes.read = lambda: {
            outcome.value: count for outcome, count in checks.outcomes.items()
        }
        self._check_cpu_secs.read = lambda: checks.cpu_secs
        self._waiting_checks.read = lambda: checks.waiting

    def _add_counts(self, spec: Spec) -> _CountsCollector:
        counts = _CountsCollector(spec)
        self.registry.register(counts)
        self.table[spec] = counts
        return counts

    def _add_gaps(self, model: str) -> _GapCollector:
        gaps = _GapCollector(
            _histogram("itl_seconds", "mean gap between tokens of one delivery", (MODEL,)), model
        )
        self.registry.register(gaps)
        self.table[gaps.spec] = gaps
        return gaps

    def _add_build_info(self, version: str, mode: str) -> None:
        labels = ("version", "python", "mode", "model")
        build = self._add(prometheus.Gauge, "build_info", "version and mode, value 1", labels)
        build.labels(version, platform.python_version(), mode, self.model_name).set(1)

    def _add_route_refusals(self) -> None:
        self.kv_routes_refused = self._add_counter(
            "kv_routes_refused", ROUTES_REFUSED_HELP, ("code",)
        )
        for code in ROUTE_REFUSALS:
            self.kv_routes_refused.labels(code)

    def _add_counter(
        self, name: str, help: str, labels: tuple[str, ...] = ()
    ) -> prometheus.Counter:
        return self._add(prometheus.Counter, name, help, labels)

    def _add_gauge(self, name: str, help: str, labels: tuple[str, ...] = ()) -> prometheus.Gauge:
        return self._add(prometheus.Gauge, name, help, labels)

    def _add_histogram(
        self, name: str, help: str, labels: tuple[str, ...] = (), *, buckets: Sequence[float]
    ) -> prometheus.Histogram:
        return self._add(prometheus.Histogram, name, help, labels, buckets=buckets)

    def _add(
        self, kind: type[M], name: str, help: str, labels: tuple[str, ...] = (), **more: Any
    ) -> M:
        """A metric that the front writes, with its row of the table."""
        made = kind(PREFIX + name, help, labels, registry=self.registry, **more)
        self.table[Spec(kind.__name__.lower(), name, help, labels)] = made
        return made

    def _native(self) -> Iterator[Metric]:
        for metric in self.table.values():
            yield from metric.collect()
        yield from self._ranks.collect()

    def report(self, stats: StatsMessage) -> None:
        """Set the last report of a rank; empty tables when it died."""
        self._ranks.reports[stats.dp_rank] = stats

    def text(self) -> bytes:
        return prometheus.generate_latest(self.registry)


FRONT = tuple(EngineMetrics().table)


def exported_name(spec: Spec) -> str:
    """The name as it appears in /metrics."""
    return PREFIX + spec.name + ("_total" if spec.kind == "counter" else "")


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
            out.append(f"| `{exported_name(s)}` | {s.kind} | {labels} | {s.help} |")
        out.append("")
    return "\n".join([*out, metric_aliases.markdown()])


if __name__ == "__main__":
    print(markdown())
