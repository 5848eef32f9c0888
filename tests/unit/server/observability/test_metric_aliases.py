"""Other engines' names for our numbers: every alias has a source, and says what the source says."""

from __future__ import annotations

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from baton.sched.metrics.histogram import STAGE_BUCKETS, Histogram
from baton.server.observability import metric_aliases
from baton.server.observability.metrics import FRONT, RANK, EngineMetrics
from baton.server.worker.messages import StatsMessage


def families(which: str) -> dict[str, Metric]:
    made = EngineMetrics("v", "null", "tiny", page_size=4, compat_names=which)
    waited = Histogram(STAGE_BUCKETS)
    waited.observe(0.01)
    waited.observe(3.0)
    for rank in (0, 1):
        gauges = {
            f'requests{{state="{state}"}}': 1.0 + i
            for i, state in enumerate(("waiting", "opening", "running"))
        }
        gauges |= {
            f'kv_pages{{state="{s}"}}': n
            for s, n in (("free", 5), ("cached", 2), ("held", 3), ("in_transfer", 1))
        }
        gauges |= {
            "kv_usage_ratio": 0.25,
            "new_token_ratio": 0.7,
            "generated_tokens_per_second": 12.5,
        }
        counters = {
            "retractions_total": 4.0,
            'priority_starvation_total{class="a"}': 2.0,
            'priority_preemption_total{class="a",by="b",reason="slots"}': 3.0,
            'priority_preemption_total{class="a",by="c",reason="priority"}': 1.0,
            'priority_preemption_total{class="a",by="a",reason="memory"}': 9.0,
            'request_retraction_reasons_total{reason="slots"}': 3.0,
            'request_retraction_reasons_total{reason="memory"}': 10.0,
        }
        histograms = {
            f'priority_waiting_time_seconds{{class="{cls}"}}': waited for cls in ("a", "b")
        }
        made.report(StatsMessage(rank, gauges, counters, histograms))
    for endpoint, seconds in (("chat", 0.5), ("completions", 0.25), ("health", 9.0)):
        made.ttft.labels("tiny", endpoint).observe(seconds)
        made.requests.labels(endpoint, "ok").inc(2)
    made.requests.labels("chat", "timeout").inc()
    made.prompt_tokens.inc(80)
    made.cached_tokens.inc(20)
    return {f.name: f for f in text_string_to_metric_families(made.text().decode())}


def values(family: Metric) -> list[float]:
    return [s.value for s in family.samples]


def test_every_alias_has_a_source_and_a_name_of_its_own() -> None:
    ours = {spec.name: spec for spec in (*FRONT, *RANK)}
    aliases = metric_aliases.chosen("all")
    for alias in aliases:
        spec = ours[alias.source]
        assert set(alias.where) | set(alias.keep) <= set(spec.labels), alias.name
        assert (spec.kind == "histogram") == (alias.kind == "histogram"), alias.name
    assert len({alias.name for alias in aliases}) == len(aliases)


@pytest.mark.parametrize(
    ("which", "prefixes"), [("none", 1), ("sglang", 3), ("vllm", 2), ("all", 4)]
)
def test_flag_chooses_the_names(which: str, prefixes: int) -> None:
    found = {name for name in families(which) if not name.startswith("baton_")}
    assert {f.name for f in metric_aliases.ALWAYS} <= found
    groups = {name.split(":")[0].split("_")[0] + (":" if ":" in name else "_") for name in found - {
        alias.name for alias in metric_aliases.ALWAYS}} | {"always"}  # fmt: skip
    assert len(groups) == prefixes


def test_sglang_names() -> None:
    found = families("sglang")
    assert found["sglang:num_queue_reqs"].samples[0].labels == {
        "model_name": "tiny",
        "dp_rank": "0",
    }
    assert values(found["sglang:num_queue_reqs"]) == [3.0, 3.0]
    assert values(found["sglang:num_used_tokens"]) == [16.0, 16.0]
    assert values(found["sglang:max_total_num_tokens"]) == [44.0, 44.0]
    assert values(found["sglang:gen_throughput"]) == [12.5, 12.5]
    assert values(found["sglang:cache_hit_rate"]) == [0.25]
    assert values(found["sglang:num_requests"]) == [5.0]
    assert found["sglang:num_requests"].type == "counter"
    starved = found["sglang_priority_starvation_count"].samples[0]
    assert (starved.name, starved.labels["priority"], starved.value) == (
        "sglang_priority_starvation_count",
        "a",
        2.0,
    )
    assert values(found["sglang_priority_preemption_count"]) == [4.0, 4.0]
    reasons = {
        s.labels["reason"]: s.value for s in found["sglang_request_retraction_reasons"].samples
    }
    assert reasons == {"slots": 3.0, "memory": 10.0}
    geometry = found["sglang:cache_config_info"].samples[1].labels
    assert (geometry["page_size"], geometry["num_pages"], geometry["dp_rank"]) == ("4", "11", "1")


def test_vllm_names() -> None:
    found = families("vllm")
    assert found["vllm:num_requests_running"].samples[1].labels == {
        "model_name": "tiny",
        "engine": "1",
    }
    assert values(found["vllm:num_requests_waiting"]) == [3.0, 3.0]
    assert (
        values(found["vllm:kv_cache_usage_perc"])
        == values(found["vllm:gpu_cache_usage_perc"])
        == [0.25, 0.25]
    )
    assert values(found["vllm:num_preemptions"]) == [13.0, 13.0]
    assert values(found["vllm:request_success"]) == [4.0]
    assert found["vllm:cache_config_info"].samples[0].labels["num_gpu_blocks"] == "11"


def test_histograms_add_up_over_the_labels_that_are_left_out() -> None:
    found = families("all")
    for name in ("sglang:time_to_first_token_seconds", "vllm:time_to_first_token_seconds"):
        samples = {
            s.name.removeprefix(name) + s.labels.get("le", ""): s.value for s in found[name].samples
        }
        assert (samples["_count"], samples["_sum"], samples["_bucket+Inf"]) == (2.0, 0.75, 2.0), (
            "health is no answer"
        )
        assert samples["_bucket0.001"] == 0.0
    waits = [
        s for s in found["vllm:request_queue_time_seconds"].samples if s.name.endswith("_count")
    ]
    assert [(s.labels["engine"], s.value) for s in waits] == [("0", 4.0), ("1", 4.0)]
    by_class = found["sglang_priority_waiting_time_seconds"].samples
    assert {s.labels["priority"] for s in by_class} == {"a", "b"}


def test_dead_rank_leaves_nothing() -> None:
    made = EngineMetrics(compat_names="all")
    made.report(
        StatsMessage(0, {'kv_pages{state="free"}': 1.0, 'requests{state="waiting"}': 1.0}, {})
    )
    made.report(StatsMessage(0, {}, {}))
    assert 'dp_rank="0"' not in made.text().decode()
    assert list(text_string_to_metric_families(made.text().decode()))


def test_latencies_have_the_model_label_of_sglang_and_vllm() -> None:
    found = families("vllm")
    peer = {s.labels["model_name"] for s in found["vllm:time_to_first_token_seconds"].samples}
    for name in ("ttft_seconds", "itl_seconds", "priority_waiting_time_seconds"):
        samples = found[f"baton_{name}"].samples
        assert {s.labels["model_name"] for s in samples} == peer == {"tiny"}, name
    latencies = [
        spec for spec in (*FRONT, *RANK) if spec.kind == "histogram" and "_seconds" in spec.name
    ]
    assert [spec.name for spec in latencies if "model_name" not in spec.labels] == []
