"""Write what is derived in deploy/: Grafana dashboards from dashboards.yaml, a PrometheusRule from rules/*.yml.

    python -m deploy.monitoring.generate

The results are committed; a test writes them again and compares.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

MONITORING = Path(__file__).parent
COMPONENT = MONITORING.parent / "kubernetes" / "components" / "monitoring"
METRICS_PAGE = MONITORING.parents[1] / "docs" / "metrics.md"
RULES = ("recording", "alerts")
NAME = re.compile(r"\bbaton_\w+")
"""Names of exported metrics; those of recording rules have a colon after the prefix."""
QUANTILES = (0.5, 0.95, 0.99)
COLUMNS, WIDTH, HEIGHT = 3, 8, 8
"""Panels in a row, and the size of a panel in units of Grafana's grid, which is 24 wide."""


@functools.cache
def metric_rows() -> dict[str, tuple[str, frozenset[str]]]:
    """Metrics of docs/metrics.md by name: type and labels. Those of a rank have the label dp_rank too."""
    rows = {}
    own: frozenset[str] = frozenset()
    for line in METRICS_PAGE.read_text().splitlines():
        if line.startswith("#"):
            own = frozenset({"dp_rank"}) if "dp_rank" in line else frozenset()
        elif line.startswith("| `baton_"):
            name, kind, labels = (cell.strip() for cell in line.strip("|").split(" | ", 3)[:3])
            rows[name.strip("`")] = (kind, own | set(re.findall(r"`(\w+)`", labels)))
    return rows


def metric_of(name: str, known: Mapping[str, object]) -> str:
    """The metric to which a series belongs: histograms have the series _bucket, _sum and _count."""
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    return name if name in known else base


def dashboard_source() -> dict[str, Any]:
    source: dict[str, Any] = yaml.safe_load((MONITORING / "dashboards.yaml").read_text())
    return source


def queries(panel: Mapping[str, Any]) -> dict[str, str]:
    """PromQL by legend."""
    shown = dict(panel.get("show", {}))
    if name := panel.get("quantiles"):
        by = panel.get("by", [])
        selector = ",".join(["NS", *filter(None, [panel.get("of")])])
        legend = " ".join(f"{{{{{label}}}}}" for label in by)
        for quantile in QUANTILES:
            inner = f"sum by ({', '.join(['le', *by])}) (rate({name}_bucket{{{selector}}}[RATE]))"
            shown[f"p{quantile * 100:g} {legend}".strip()] = (
                f"histogram_quantile({quantile:g}, {inner})"
            )
    return {
        legend: re.sub(r"\bNS\b", 'namespace=~"$namespace"', text).replace(
            "[RATE]", "[$__rate_interval]"
        )
        for legend, text in shown.items()
    }


def _panels(panels: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    known = metric_rows()
    datasource = {"type": "prometheus", "uid": "${datasource}"}
    for number, panel in enumerate(panels):
        asked = queries(panel)
        names = sorted(
            {metric_of(name, known) for text in asked.values() for name in NAME.findall(text)}
        )
        about = [f"Metrics (docs/metrics.md): {', '.join(names)}."] if names else []
        if when := panel.get("when"):
            about.append(f"Empty until {when}.")
        kind = panel.get("type", "timeseries")
        custom = {"stacking": {"mode": "normal"}, "fillOpacity": 30} if panel.get("stack") else {}
        legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
        yield {
            "id": number + 1,
            "type": kind,
            "title": panel["title"],
            "description": "\n\n".join(about),
            "datasource": datasource,
            "gridPos": {
                "h": HEIGHT,
                "w": WIDTH,
                "x": number % COLUMNS * WIDTH,
                "y": number // COLUMNS * HEIGHT,
            },
            "fieldConfig": {
                "defaults": {"unit": panel["unit"], "min": 0, "custom": custom},
                "overrides": [],
            },
            "options": {"legend": legend, "tooltip": {"mode": "multi"}}
            if kind == "timeseries"
            else {},
            "targets": [
                {
                    "refId": chr(ord("A") + at),
                    "datasource": datasource,
                    "expr": text,
                    "legendFormat": legend,
                }
                for at, (legend, text) in enumerate(asked.items())
            ],
        }


def dashboard(source: Mapping[str, Any]) -> dict[str, Any]:
    """A dashboard in Grafana's JSON model. Its variables have no value of the machine where it was made."""
    namespaces = "label_values(baton_router_build_info, namespace)"
    return {
        "uid": f"baton-{source['name']}",
        "title": source["title"],
        "tags": ["baton"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                    "current": {},
                },
                {
                    "name": "namespace",
                    "label": "Fleet",
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "${datasource}"},
                    "query": {"query": namespaces, "refId": "namespaces"},
                    "refresh": 2,
                    "includeAll": True,
                    "allValue": ".*",
                    "current": {},
                },
            ]
        },
        "links": [
            {
                "title": "Baton",
                "type": "dashboards",
                "tags": ["baton"],
                "asDropdown": True,
                "includeVars": True,
            }
        ],
        "panels": list(_panels(source["panels"])),
    }


def prometheus_rule() -> dict[str, Any]:
    """All rules as the object that prometheus-operator reads."""
    groups = [
        g
        for name in RULES
        for g in yaml.safe_load((MONITORING / "rules" / f"{name}.yml").read_text())["groups"]
    ]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "baton", "labels": {"app.kubernetes.io/name": "baton"}},
        "spec": {"groups": groups},
    }


class _Dumper(yaml.SafeDumper):
    """Expressions of several lines stay readable."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_Dumper.add_representer(str, _text)


def outputs() -> dict[Path, str]:
    """All derived files with their content."""
    written = {
        MONITORING / "dashboards" / f"{source['name']}.json": json.dumps(
            dashboard(source), indent=1
        )
        + "\n"
        for source in dashboard_source()["dashboards"]
    }
    text = yaml.dump(prometheus_rule(), Dumper=_Dumper, sort_keys=False, width=1000)
    note = (
        "# Written by deploy/monitoring/generate.py from deploy/monitoring/rules: change those.\n"
    )
    return written | {COMPONENT / "rules.yaml": note + text}


def main() -> None:
    for path, text in outputs().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path)


if __name__ == "__main__":
    main()
