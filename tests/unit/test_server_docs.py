"""docs/flags.md and docs/metrics.md are what the code generates."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from baton import config
from baton.server import metrics, up

DOCS = Path(__file__).parents[2] / "docs"


def test_flags_table_is_current() -> None:
    assert config.markdown() in (DOCS / "flags.md").read_text(), "run: python -m baton.config"


def test_up_flags_page_is_generated_from_its_config() -> None:
    page = (DOCS / "flags.md").read_text()
    assert config.markdown(up.UpConfig) in page, "run: python -m baton.server.up"


def test_metrics_tables_are_current() -> None:
    assert metrics.markdown().strip() in (DOCS / "metrics.md").read_text(), "run: python -m baton.server.metrics"


def test_every_metric_of_the_front_is_exported_under_its_documented_name() -> None:
    made = metrics.Metrics("v", "null", "m")
    made.report(0, {'requests{state="waiting"}': 1, 'requests{state="running"}': 2, "kv_usage_ratio": 0.5}, {})
    exported = {f"# TYPE {name} " for name in map(metrics.exported_name, (*metrics.FRONT, *metrics.COMPAT))}
    text = made.text().decode()
    assert [line for line in exported if line not in text] == []
    assert list(text_string_to_metric_families(text))


def test_what_ranks_report_passes_through_with_the_rank_as_label() -> None:
    made = metrics.Metrics()
    for rank in (0, 1):
        made.report(rank, {'kv_pages{state="free"}': 3 + rank, "novel": 1}, {"engine_steps_total": 9})
    text = made.text().decode()
    assert 'baton_kv_pages{dp_rank="1",state="free"} 4.0' in text
    assert 'baton_engine_steps_total{dp_rank="0"} 9.0' in text
    assert "# HELP baton_novel reported by the rank" in text
    made.report(1, {}, {})
    assert 'dp_rank="1"' not in made.text().decode(), "a dead rank's last values do not stay"


def test_bucket_families() -> None:
    assert metrics.STAGE_BUCKETS[0] == 0.001
    assert 600 <= metrics.STAGE_BUCKETS[-1] < 1000
    assert metrics.ITL_BUCKETS[0] == 0.0005
    assert 2 <= metrics.ITL_BUCKETS[-1] < 3.3
