"""docs/flags.md and docs/metrics.md are what the code generates."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton import config
from baton.config import unsupported_flags
from baton.sched.metrics import histogram
from baton.sched.metrics.collector import SchedStats
from baton.server.observability import metric_aliases, metrics
from baton.server.worker.messages import StatsMessage, encoder, to_front_decoder
from baton_ops import chat, drain, top
from baton_ops.doctor import main as doctor
from baton_ops.launch import cluster_plan

DOCS = Path(__file__).parents[3] / "docs"


def test_flags_table_is_current() -> None:
    assert config.flags_table(config.EngineConfig) in (DOCS / "flags.md").read_text(), (
        "run: python -m baton.config"
    )


def test_table_of_refused_flags_is_current() -> None:
    assert unsupported_flags.unsupported_table() in (DOCS / "flags.md").read_text(), (
        "run: python -m baton.config.unsupported_flags"
    )


def test_up_flags_page_is_generated_from_its_config() -> None:
    page = (DOCS / "flags.md").read_text()
    assert config.flags_table(cluster_plan.UpConfig) in page, (
        "run: python -m baton_ops.launch.cluster_plan"
    )


def test_chat_flags_page_is_generated_from_its_config() -> None:
    page = (DOCS / "flags.md").read_text()
    assert config.flags_table(chat.ChatConfig) in page, "run: python -m baton_ops.chat"


def test_drain_flags_page_is_generated_from_its_config() -> None:
    page = (DOCS / "flags.md").read_text()
    assert config.flags_table(drain.DrainConfig) in page, "run: python -m baton_ops.drain"


def test_doctor_flags_page_is_generated_from_its_config() -> None:
    page = (DOCS / "flags.md").read_text()
    assert config.flags_table(doctor.DoctorConfig) in page, "run: python -m baton_ops.doctor.main"


def test_top_flags_page_is_generated_from_its_config() -> None:
    page = (DOCS / "flags.md").read_text()
    assert config.flags_table(top.TopConfig) in page, "run: python -m baton_ops.top"


def test_metrics_tables_are_current() -> None:
    assert metrics.markdown().strip() in (DOCS / "metrics.md").read_text(), (
        "run: python -m baton.server.observability.metrics"
    )


def test_every_metric_of_the_front_is_exported_under_its_documented_name() -> None:
    made = metrics.EngineMetrics("v", "null", "m")
    made.report(
        StatsMessage(
            0,
            {'requests{state="waiting"}': 1, 'requests{state="running"}': 2, "kv_usage_ratio": 0.5},
            {},
        )
    )
    exported = {f"# TYPE {name} " for name in map(metrics.exported_name, metrics.FRONT)}
    exported |= {f"# TYPE {alias.name} " for alias in metric_aliases.ALWAYS}
    text = made.text().decode()
    assert [line for line in exported if line not in text] == []
    assert list(text_string_to_metric_families(text))


def test_metrics_of_ranks_pass_through_with_the_rank_as_label() -> None:
    made = metrics.EngineMetrics()
    for rank in (0, 1):
        made.report(
            StatsMessage(
                rank, {'kv_pages{state="free"}': 3 + rank, "novel": 1}, {"engine_steps_total": 9}
            )
        )
    text = made.text().decode()
    assert 'baton_kv_pages{dp_rank="1",state="free"} 4.0' in text
    assert 'baton_engine_steps_total{dp_rank="0"} 9.0' in text
    assert "# HELP baton_novel reported by the rank" in text
    made.report(StatsMessage(1, {}, {}))
    assert 'dp_rank="1"' not in made.text().decode(), "a dead rank's last values do not stay"


def test_bucket_families() -> None:
    assert histogram.STAGE_BUCKETS[0] == 0.001
    assert 600 <= histogram.STAGE_BUCKETS[-1] < 1000
    assert histogram.GAP_BUCKETS[0] == 0.0005
    assert 2 <= histogram.GAP_BUCKETS[-1] < 3.3
    for bounds in (histogram.STAGE_BUCKETS, histogram.REQUEST_BUCKETS, histogram.SLACK_BUCKETS):
        assert list(bounds) == sorted(set(bounds))


def test_histograms_of_ranks_are_rendered_with_their_bounds() -> None:
    kept = histogram.Histogram(histogram.GAP_BUCKETS)
    for value in (0.0005, 0.0006, 0.0006, 99.0):
        kept.observe(value)
    sent = StatsMessage(1, {}, {}, {"decode_stall_seconds": kept})
    heard = to_front_decoder.decode(encoder.encode(sent))
    made = metrics.EngineMetrics()
    made.report(heard)
    families = {f.name: f for f in text_string_to_metric_families(made.text().decode())}
    samples = families["baton_decode_stall_seconds"].samples
    buckets = {s.labels["le"]: s.value for s in samples if s.name.endswith("_bucket")}
    assert {s.labels["dp_rank"] for s in samples} == {"1"}
    assert (buckets["0.0005"], buckets["0.0008"], buckets["+Inf"]) == (1, 3, 4)
    assert {s.name: s.value for s in samples if "le" not in s.labels} == {
        "baton_decode_stall_seconds_count": 4.0,
        "baton_decode_stall_seconds_sum": pytest.approx(99.0017),
    }


def test_every_name_a_scheduler_reports_has_a_row_in_the_tables() -> None:
    known = {spec.name: spec for spec in metrics.RANK}
    kept = SchedStats(10.0, lambda seq: "default")
    kept.starved["default"] = kept.starving["default"] = kept.suspensions[
        "default", "", "memory"
    ] = 1
    names = {
        name.partition("{")[0].removesuffix("_total")
        for name in {**kept.gauges(), **kept.counters()}
    }
    assert names - set(known) == set()
    kept.waiting_time["default"].observe(1.0)
    kept.pull_durations["tcp"].observe(1.0)
    histograms = {name.partition("{")[0] for name in kept.histograms()}
    of_grammars = {"grammar_compile_seconds", "grammar_mask_seconds"}
    described = {spec.name for spec in known.values() if spec.kind == "histogram"}
    assert described == histograms | of_grammars
