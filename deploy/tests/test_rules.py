"""Recording rules and alerts: they parse, their unit tests pass and can fail, and they name what really exists."""

from __future__ import annotations

import math
import re
import subprocess
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import yaml
from prometheus_client.utils import floatToGoString

from baton.sched.metrics.collector import SchedStats
from baton.sched.metrics.histogram import GAP_BUCKETS, STAGE_BUCKETS, Histogram
from baton.server.observability import metrics
from baton.server.worker.messages import StatsMessage
from deploy.monitoring.generate import (
    COMPONENT,
    METRICS_PAGE,
    MONITORING,
    metric_of,
    metric_rows,
    outputs,
)
from deploy.tests import prometheus

RULES = MONITORING / "rules"
FILES = sorted(RULES.glob("*.yml"))
UNIT_TESTS = sorted((RULES / "tests").glob("*.yml"))
RUNBOOKS = METRICS_PAGE.parent / "runbooks.md"
RUNBOOK_PARTS = ("Meaning", "First commands", "Likely causes", "Do not", "Confirm")
TARGET_LABELS = {"namespace", "component", "instance"}
"""Labels that prometheus.yml and the PodMonitors give to targets."""
RULE_LABELS = {"role", "signal", "alertname", "alertstate"}
OF_PROMETHEUS = {"up", "ALERTS"}
SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{([^{}]*)\}")
GROUPING = re.compile(r"\b(?:by|on)\s*\(([^()]*)\)")


ALL_RULES: list[dict[str, Any]] = [
    rule
    for path in FILES
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in ALL_RULES if "alert" in rule}


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [prometheus.require("promtool"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def engine_page() -> bytes:
    """GET /metrics of an engine whose rank reports every metric there is."""
    made = metrics.EngineMetrics("1", "decode", "demo", compat_names="all")
    reported: dict[str, dict[str, Any]] = {"gauge": {}, "counter": {}, "histogram": {}}
    for spec in metrics.RANK:
        labels = ",".join(f'{label}="x"' for label in spec.labels if label != metrics.MODEL)
        name = spec.name + ("_total" if spec.kind == "counter" else "")
        value = 1.0 if spec.kind != "histogram" else Histogram(STAGE_BUCKETS)
        reported[spec.kind][f"{name}{{{labels}}}" if labels else name] = value
    made.report(StatsMessage(0, *reported.values()))
    return made.text()


def test_promtool_objects_to_no_engine_metric_but_those_of_peers() -> None:
    command = [prometheus.require("promtool"), "check", "metrics"]
    done = subprocess.run(command, input=engine_page(), capture_output=True, timeout=300)
    complaints = done.stdout.decode() + done.stderr.decode()
    refused = {line.split()[0] for line in complaints.splitlines() if line.strip()}
    peers = re.compile(r"sglang:|sglang_priority_|vllm:")
    assert [name for name in refused if not peers.match(name)] == [], complaints


def test_rules_parse() -> None:
    done = promtool("check", "rules", *FILES)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", UNIT_TESTS, ids=lambda path: path.stem)
def test_unit_tests_of_rules_pass(path: Path) -> None:
    done = promtool("test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_unit_test_in_which_one_fleet_is_well() -> None:
    cases = yaml.safe_load((RULES / "tests" / "alerts.yml").read_text())["tests"]
    assert {case["name"] for case in cases} == set(ALERTS)
    for case in cases:
        series = [entry["series"] for entry in case["input_series"]]
        metrics_of = {
            fleet: {text.partition("{")[0] for text in series if f'namespace="{fleet}"' in text}
            for fleet in ("bad", "good")
        }
        assert metrics_of["bad"] == metrics_of["good"], case["name"]
        expected = [
            sample["labels"]
            for check in case["promql_expr_test"]
            for sample in check["exp_samples"]
        ]
        assert expected == [f'{{namespace="bad",alertname="{case["name"]}"}}']


def test_unit_test_of_an_alert_fails_without_it(tmp_path: Path) -> None:
    recording, alerts = (
        yaml.safe_load((RULES / f"{name}.yml").read_text()) for name in ("recording", "alerts")
    )
    cases = yaml.safe_load((RULES / "tests" / "alerts.yml").read_text())
    for group in alerts["groups"]:
        for rule in group["rules"]:
            rule["expr"] = "vector(0) > 1"
    for name, content in (("recording.yml", recording), ("alerts.yml", alerts)):
        (tmp_path / name).write_text(yaml.safe_dump(content))
    cases["rule_files"] = ["recording.yml", "alerts.yml"]
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(cases))
    done = promtool("test", "rules", tmp_path / "tests.yml")
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count("exp: {") == len(cases["tests"])


# ---- names ----


def unknown_names(expression: str) -> list[str]:
    """Metrics and labels in a PromQL expression that are neither of docs/metrics.md nor of a recording rule."""
    known = metric_rows()
    recorded = {rule["record"] for rule in ALL_RULES if "record" in rule}
    bare = re.sub(r'"[^"]*"', '""', expression)
    named = set(re.findall(r"\b(?:baton:[\w:]+|baton_\w+)", bare))
    wrong = [name for name in named - recorded if metric_of(name, known) not in known]
    for name, selector in SELECTOR.findall(bare):
        kind, labels = known.get(metric_of(name, known), ("", frozenset()))
        allowed = (
            set(labels)
            | TARGET_LABELS
            | (RULE_LABELS if name in recorded | OF_PROMETHEUS else set())
        )
        allowed |= {"le"} if name.endswith("_bucket") and kind == "histogram" else set()
        wrong += [
            f"{name}{{{label}}}"
            for label in re.findall(r"(\w+)\s*[=!]", selector)
            if label not in allowed
        ]
    labels_of_all = (
        {label for _, labels in known.values() for label in labels}
        | TARGET_LABELS
        | RULE_LABELS
        | {"le"}
    )
    grouped = {label.strip() for group in GROUPING.findall(bare) for label in group.split(",")} - {
        ""
    }
    return sorted([*wrong, *(grouped - labels_of_all)])


def test_rules_use_only_metrics_and_labels_that_exist() -> None:
    assert {
        name: wrong
        for r in ALL_RULES
        if (wrong := unknown_names(r["expr"]))
        for name in [r.get("alert", r.get("record"))]
    } == {}


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ("sum(rate(baton_kv_pulls_totl[5m]))", ["baton_kv_pulls_totl"]),
        ('baton_kv_pulls_total{transprt="tcp"}', ["baton_kv_pulls_total{transprt}"]),
        ("sum by (transprt) (baton_kv_pulls_total)", ["transprt"]),
        ("baton:wanted_replica", ["baton:wanted_replica"]),
        ('baton_kv_pulls_total{transport="x_y{",component="decode"}', []),
    ],
)
def test_unknown_names_are_found(expression: str, wrong: list[str]) -> None:
    assert unknown_names(expression) == wrong


def bucket_bounds(name: str) -> set[str]:
    """Values of the label `le` of a histogram, as /metrics has them."""
    front = metrics.EngineMetrics()
    bounds = {
        metrics.exported_name(spec): made._upper_bounds
        for spec, made in front.table.items()
        if isinstance(made, prometheus_client.Histogram)
    }
    bounds[metrics.exported_name(front.gaps.spec)] = GAP_BUCKETS
    kept = SchedStats(1.0, lambda _: "")
    for by_label in (kept.waiting_time, kept.pull_durations):
        by_label["any"].observe(0.0)
    bounds |= {
        metrics.PREFIX + key.partition("{")[0]: made.bounds
        for key, made in kept.histograms().items()
    }
    if name in bounds:
        return {floatToGoString(bound) for bound in bounds[name] if bound < math.inf}
    text = METRICS_PAGE.read_text()
    said = re.search(
        r"share (\d+) buckets, factor ([\d.]+) from ([\d.]+) s to \d+ s, rounded to four\s+digits",
        text,
    )
    assert said is not None, (
        "docs/metrics.md no longer says which buckets a router's histograms have"
    )
    exact = [float(said[3]) * float(said[2]) ** i for i in range(int(said[1]))]
    return {f"{round(bound, 3 - math.floor(math.log10(bound))):g}" for bound in exact}


def test_latency_thresholds_are_bounds_of_buckets() -> None:
    thresholds = [
        found
        for rule in ALL_RULES
        for found in re.findall(r'(\w+)_bucket\{[^}]*le="([^"]+)"', rule["expr"])
    ]
    assert {name for name, _ in thresholds} == {
        "baton_router_ttft_seconds", "baton_itl_seconds", "baton_kv_pull_duration_seconds",
    }  # fmt: skip
    for name, bound in thresholds:
        assert bound in bucket_bounds(name), f"{name} has no bucket up to {bound}"


# ---- what a person reads ----


def test_each_alert_says_how_urgent_it_is_and_where_its_runbook_is() -> None:
    for name, rule in ALERTS.items():
        assert rule["labels"]["severity"] in ("page", "ticket"), name
        assert rule["annotations"]["summary"].endswith("."), name
        assert rule["annotations"]["runbook_url"].endswith(f"/docs/runbooks.md#{name.lower()}"), (
            name
        )


def test_each_alert_has_a_section_of_the_runbooks() -> None:
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", RUNBOOKS.read_text(), re.M | re.S))
    assert list(sections) == list(ALERTS)
    for name, text in sections.items():
        parts = re.findall(r"^\*\*([\w ]+)\.\*\*", text, re.M)
        assert tuple(parts) == RUNBOOK_PARTS, name
        commands = re.search(r"```sh\n(.*?)```", text, re.S)
        assert commands is not None, name
        assert len(commands[1].replace("\\\n", "").splitlines()) == 3, name


def test_derived_files_are_current() -> None:
    for path, text in outputs().items():
        assert path.exists(), f"{path}: run python -m deploy.monitoring.generate"
        assert path.read_text() == text, f"{path}: run python -m deploy.monitoring.generate"
    committed = {*(MONITORING / "dashboards").glob("*.json"), COMPONENT / "rules.yaml"}
    assert committed == set(outputs())


def test_commands_of_runbooks_ask_for_what_exists() -> None:
    asked = re.findall(r"ask '(.*?)'(?:\n|`)", RUNBOOKS.read_text())
    assert len(asked) > len(ALERTS)
    assert {text: wrong for text in asked if (wrong := unknown_names(text))} == {}
