"""Our numbers under the names of SGLang 0.5.7 and vLLM, for autoscalers, dashboards and endpoint
pickers.

An alias names one of our own metrics and which of its samples are added up; nothing is measured for
it. Three names that autoscalers of SGLang deployments read are always there, the others with
--metrics-compat. The last four of SGLANG are names of proposals for it, which scheduling dashboards
use. What we have no equal of is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class Alias:
    name: str
    kind: str
    help: str
    source: str
    """Our metric, without prefix and `_total`."""
    where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Label → values that count; other labels are summed over."""
    keep: dict[str, str] = field(default_factory=dict)
    """Our label → its name here, beside model_name and the rank's."""
    per: str = ""
    """Divide by the sum of this metric of ours."""
    in_tokens: bool = False
    """The source counts pages."""


_GENERATION = {"endpoint": ("chat", "completions", "generate", "responses", "messages")}
_USED = {"state": ("held", "in_transfer")}
_WAITING = {"state": ("waiting", "opening")}
_RUNNING = {"state": ("running",)}
_LEASED = {"state": ("leased",)}
_OPENING = {"state": ("opening",)}
_TRANSFER = {"state": ("transfer",)}

ALWAYS = (
    Alias("sglang:num_queue_reqs", "gauge", "requests waiting", "requests", _WAITING),
    Alias("sglang:num_running_reqs", "gauge", "requests decoding", "requests", _RUNNING),
    Alias("sglang:token_usage", "gauge", "same value as baton_kv_usage_ratio", "kv_usage_ratio"),
)
SGLANG = (
    Alias(
        "sglang:num_used_tokens",
        "gauge",
        "KV slots in use, by pages",
        "kv_pages",
        _USED,
        in_tokens=True,
    ),
    Alias("sglang:max_total_num_tokens", "gauge", "KV slots", "kv_pages", in_tokens=True),
    Alias(
        "sglang:gen_throughput",
        "gauge",
        "tokens generated per second, last second",
        "generated_tokens_per_second",
    ),
    Alias(
        "sglang:cache_hit_rate",
        "gauge",
        "cached share of all prompt tokens since the start",
        "cached_prompt_tokens",
        per="prompt_tokens",
    ),
    Alias(
        "sglang:new_token_ratio", "gauge", "same value as baton_new_token_ratio", "new_token_ratio"
    ),
    Alias(
        "sglang:num_prefill_inflight_queue_reqs",
        "gauge",
        "P: prompts D has not taken",
        "requests",
        _LEASED,
    ),
    Alias(
        "sglang:num_decode_prealloc_queue_reqs",
        "gauge",
        "D: prompts without pages",
        "requests",
        _OPENING,
    ),
    Alias(
        "sglang:num_decode_transfer_queue_reqs",
        "gauge",
        "D: prompts on their way",
        "requests",
        _TRANSFER,
    ),
    Alias("sglang:prompt_tokens", "counter", "prompt tokens of answered requests", "prompt_tokens"),
    Alias(
        "sglang:generation_tokens",
        "counter",
        "tokens generated for answered requests",
        "completion_tokens",
    ),
    Alias("sglang:cached_tokens", "counter", "cached prompt tokens", "cached_prompt_tokens"),
    Alias("sglang:num_requests", "counter", "requests answered", "http_requests", _GENERATION),
    Alias(
        "sglang:num_aborted_requests", "counter", "requests whose client left", "client_disconnects"
    ),
    Alias(
        "sglang:num_retracted_requests", "counter", "requests sent back for memory", "retractions"
    ),
    Alias(
        "sglang:num_transfer_failed_reqs",
        "counter",
        "KV transfers that failed",
        "kv_transfer_failures",
    ),
    Alias(
        "sglang:time_to_first_token_seconds",
        "histogram",
        "arrival to first token",
        "ttft_seconds",
        _GENERATION,
    ),
    Alias(
        "sglang:inter_token_latency_seconds",
        "histogram",
        "mean gap of tokens of a delivery",
        "itl_seconds",
    ),
    Alias(
        "sglang:e2e_request_latency_seconds",
        "histogram",
        "arrival to end",
        "e2e_seconds",
        _GENERATION,
    ),
    Alias(
        "sglang:queue_time_seconds",
        "histogram",
        "arrival to admission",
        "priority_waiting_time_seconds",
    ),
    Alias(
        "sglang_priority_starvation_count",
        "gauge",
        "requests that starved",
        "priority_starvation",
        keep={"class": "priority"},
    ),
    Alias(
        "sglang_priority_preemption_count",
        "gauge",
        "requests preempted for others",
        "priority_preemption",
        {"reason": ("priority", "slots")},
        keep={"class": "priority"},
    ),
    Alias(
        "sglang_priority_waiting_time_seconds",
        "histogram",
        "arrival to admission",
        "priority_waiting_time_seconds",
        keep={"class": "priority"},
    ),
    Alias(
        "sglang_request_retraction_reasons",
        "gauge",
        "requests sent back, by reason",
        "request_retraction_reasons",
        keep={"reason": "reason"},
    ),
)
VLLM = (
    Alias("vllm:num_requests_running", "gauge", "requests decoding", "requests", _RUNNING),
    Alias("vllm:num_requests_waiting", "gauge", "requests waiting", "requests", _WAITING),
    Alias(
        "vllm:kv_cache_usage_perc", "gauge", "share of KV pages in use, 0 to 1", "kv_usage_ratio"
    ),
    Alias("vllm:gpu_cache_usage_perc", "gauge", "the same under its older name", "kv_usage_ratio"),
    Alias(
        "vllm:num_preemptions",
        "counter",
        "requests sent back to the queue",
        "request_retraction_reasons",
    ),
    Alias("vllm:prompt_tokens", "counter", "prompt tokens of answered requests", "prompt_tokens"),
    Alias(
        "vllm:generation_tokens",
        "counter",
        "tokens generated for answered requests",
        "completion_tokens",
    ),
    Alias("vllm:prefix_cache_queries", "counter", "prompt tokens looked up", "prompt_tokens"),
    Alias("vllm:prefix_cache_hits", "counter", "prompt tokens found", "cached_prompt_tokens"),
    Alias("vllm:spec_decode_num_drafts", "counter", "rows with drafts", "spec_decode_num_drafts"),
    Alias(
        "vllm:spec_decode_num_draft_tokens",
        "counter",
        "tokens drafted",
        "spec_decode_num_draft_tokens",
    ),
    Alias(
        "vllm:spec_decode_num_accepted_tokens",
        "counter",
        "drafted tokens that were drawn",
        "spec_decode_num_accepted_tokens",
    ),
    Alias(
        "vllm:request_success",
        "counter",
        "requests answered",
        "http_requests",
        {**_GENERATION, "code": ("ok",)},
    ),
    Alias(
        "vllm:time_to_first_token_seconds",
        "histogram",
        "arrival to first token",
        "ttft_seconds",
        _GENERATION,
    ),
    Alias(
        "vllm:inter_token_latency_seconds",
        "histogram",
        "mean gap of tokens of a delivery",
        "itl_seconds",
    ),
    Alias(
        "vllm:time_per_output_token_seconds",
        "histogram",
        "the same under its older name",
        "itl_seconds",
    ),
    Alias(
        "vllm:e2e_request_latency_seconds",
        "histogram",
        "arrival to end",
        "e2e_seconds",
        _GENERATION,
    ),
    Alias(
        "vllm:request_queue_time_seconds",
        "histogram",
        "arrival to admission",
        "priority_waiting_time_seconds",
    ),
)
CACHE_CONFIG = {
    "sglang": ("sglang:cache_config", "page_size", "num_pages"),
    "vllm": ("vllm:cache_config", "block_size", "num_gpu_blocks"),
}
"""Info metrics with the pool's geometry: name and the labels of tokens per page and pages."""


def chosen(which: str) -> tuple[Alias, ...]:
    """The aliases exported under --metrics-compat `which`."""
    sglang = SGLANG if which in ("sglang", "all") else ()
    return (*ALWAYS, *sglang, *(VLLM if which in ("vllm", "all") else ()))


_FAMILIES = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


@dataclass(frozen=True, slots=True)
class CompatCollector(Collector):
    """`native` gives our own metrics, as they are now; `prefix` is what their names begin with."""

    which: str
    model: str
    page_size: int
    prefix: str
    native: Callable[[], Iterable[Metric]]

    def collect(self) -> Iterator[Metric]:
        ours = {family.name.removeprefix(self.prefix): family for family in self.native()}
        for alias in chosen(self.which):
            if alias.source in ours:
                yield self._render(alias, ours)
        for engine, (name, size_label, count_label) in CACHE_CONFIG.items():
            if self.which in (engine, "all") and "kv_pages" in ours:
                yield self._geometry(engine, name, size_label, count_label, ours["kv_pages"])

    def _render(self, alias: Alias, ours: dict[str, Metric]) -> Metric:
        source = ours[alias.source]
        rank_label = "engine" if alias.name.startswith("vllm:") else "dp_rank"
        of_rank = any("dp_rank" in s.labels for s in source.samples)
        labels = ["model_name", *([rank_label] if of_rank else ()), *alias.keep.values()]
        scale = float(self.page_size) if alias.in_tokens else 1.0
        if alias.per:
            whole = sum(s.value for s in ours[alias.per].samples)
            scale = 1 / whole if whole else 0.0
        sums: defaultdict[tuple[str, ...], defaultdict[str, float]] = defaultdict(
            lambda: defaultdict(float)
        )
        for s in source.samples:
            if any(s.labels.get(label) not in allowed for label, allowed in alias.where.items()):
                continue
            of = [s.labels["dp_rank"]] if of_rank else []
            key = (self.model, *of, *(s.labels[label] for label in alias.keep))
            # What is added up is the value, or a histogram's buckets (by le) and its sum.
            part = s.labels.get("le") or s.name.removeprefix(self.prefix + alias.source)
            sums[key][part] += s.value * scale
        made: Any = _FAMILIES[alias.kind](alias.name, alias.help, labels=labels)
        for key, table in sorted(sums.items()):
            if alias.kind == "histogram":
                buckets = [(le, n) for le, n in table.items() if not le.startswith("_")]
                made.add_metric(key, buckets, table["_sum"])
            else:
                made.add_metric(key, sum(table.values()))
        metric: Metric = made
        return metric

    def _geometry(
        self, engine: str, name: str, size_label: str, count_label: str, pages: Metric
    ) -> Metric:
        rank_label = "engine" if engine == "vllm" else "dp_rank"
        made = GaugeMetricFamily(
            name + "_info",
            "KV pool: tokens per page and pages, value 1",
            labels=["model_name", rank_label, size_label, count_label],
        )
        total: defaultdict[str, float] = defaultdict(float)
        for s in pages.samples:
            total[s.labels["dp_rank"]] += s.value
        for dp_rank, count in sorted(total.items()):
            made.add_metric([self.model, dp_rank, str(self.page_size), str(int(count))], 1)
        return made


def exported_name(alias: Alias) -> str:
    return alias.name + ("_total" if alias.kind == "counter" else "")


def markdown() -> str:
    """The table of docs/metrics.md."""
    out = ["### Compatibility names (`--metrics-compat`)", ""]
    out += ["| metric | type | switched on by | from | meaning |", "|---|---|---|---|---|"]
    for group, by in ((ALWAYS, "always"), (SGLANG, "`sglang`, `all`"), (VLLM, "`vllm`, `all`")):
        for a in group:
            out.append(
                f"| `{exported_name(a)}` | {a.kind} | {by} | `baton_{a.source}` | {a.help} |"
            )
    for engine, (name, size_label, count_label) in CACHE_CONFIG.items():
        labels = f"labels `{size_label}`, `{count_label}`"
        out.append(
            f"| `{name}_info` | gauge | `{engine}`, `all` | `baton_kv_pages` | {labels}, value 1 |"
        )
    return "\n".join(out)
