"""Dashboards: every query parses and names what exists, every metric has its place, and no Grafana is named."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.monitoring.generate import MONITORING, NAME, dashboard_source, metric_of, metric_rows
from deploy.tests.test_rules import promtool, unknown_names

DASHBOARDS = sorted((MONITORING / "dashboards").glob("*.json"))
UNITS = {"s", "reqps", "ops", "none", "short", "bytes", "Bps", "percentunit"}
NAMES = {"overview", "pipeline", "kv-transfer", "cache", "capacity"}
GRID_WIDTH = 24
NAME_IN_LEGEND = re.compile(r"\{\{(\w+)\}\}")


def panels(path: Path) -> Iterator[dict[str, Any]]:
    yield from json.loads(path.read_text())["panels"]


def as_promql(expression: str) -> str:
    """The query as Grafana sends it, with all fleets chosen."""
    return expression.replace("$namespace", ".*").replace("$__rate_interval", "1m")


QUERIES = {
    f"{path.stem}: {panel['title']}: {target['legendFormat']}": as_promql(target["expr"])
    for path in DASHBOARDS
    for panel in panels(path)
    for target in panel["targets"]
}


def test_there_are_five_dashboards() -> None:
    assert {path.stem for path in DASHBOARDS} == NAMES


def test_queries_parse(tmp_path: Path) -> None:
    records = [
        {"record": f"query:{number}", "expr": text} for number, text in enumerate(QUERIES.values())
    ]
    (tmp_path / "queries.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "all", "rules": records}]})
    )
    done = promtool("check", "rules", tmp_path / "queries.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_queries_use_only_metrics_and_labels_that_exist() -> None:
    assert {where: wrong for where, text in QUERIES.items() if (wrong := unknown_names(text))} == {}


def test_wrong_metric_in_a_panel_is_the_only_thing_named() -> None:
    where, text = next(
        (where, text) for where, text in QUERIES.items() if "baton_router_workers" in text
    )
    queries = {**QUERIES, where: text.replace("baton_router_workers", "baton_router_wokers")}
    wrong = {name: found for name, query in queries.items() if (found := unknown_names(query))}
    assert set(wrong) == {where}
    assert "baton_router_wokers" in wrong[where]


def test_legends_use_labels_that_the_query_keeps() -> None:
    for where, text in QUERIES.items():
        legend = where.rpartition(": ")[2]
        for label in NAME_IN_LEGEND.findall(legend):
            grouped = "by (" in text
            assert not grouped or f"{label}," in text or f"{label})" in text, (
                f"{where} shows {label}: {text}"
            )


def test_every_metric_is_shown_or_listed_as_not_shown_once() -> None:
    known = metric_rows()
    shown = {metric_of(name, known) for text in QUERIES.values() for name in NAME.findall(text)}
    listed = [
        name
        for groups in dashboard_source()["not_shown"].values()
        for names in groups
        for name in names
    ]
    assert {name: n for name, n in Counter(listed).items() if n > 1} == {}
    assert shown & set(listed) == set()
    assert set(known) - shown - set(listed) == set(), (
        "give them a panel in dashboards.yaml, or a reason under not_shown"
    )
    assert set(listed) - set(known) == set()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_have_a_unit_and_do_not_overlap(path: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels(path):
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= GRID_WIDTH, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in panels(path)]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_data_source_is_a_variable_without_a_value(path: Path) -> None:
    board = json.loads(path.read_text())
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert [variable["current"] for variable in variables.values()] == [{}, {}]
    wanted = {"type": "prometheus", "uid": "${datasource}"}
    for panel in board["panels"]:
        assert panel["datasource"] == wanted, panel["title"]
        assert [target["datasource"] for target in panel["targets"]] == [wanted] * len(
            panel["targets"]
        )
    assert variables["namespace"]["datasource"] == wanted


def test_every_series_is_of_the_chosen_fleet() -> None:
    for where, text in QUERIES.items():
        names = (
            len(NAME.findall(text))
            + text.count("baton:")
            + text.count("up{")
            + text.count("ALERTS{")
        )
        assert text.count('namespace=~".*"') == names, where
