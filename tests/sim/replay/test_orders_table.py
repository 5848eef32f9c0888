"""The tables of measured orders in docs/scheduling are what the simulator measures today.

Regenerate: python -m tests.sim.replay.test_orders_table
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs" / "scheduling"
CONVERSATION = "mooncake_conversation_first30min"
RUNS = ((CONVERSATION, 0.7), (CONVERSATION, 0.9), ("gen_hot_system_prompt", 0.9))
Results = dict[str, dict[str, object]]
"""By order: what `baton simulate --json` says of it."""


def simulate(trace: str, load: float, orders: Sequence[str]) -> Results:
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [
            "-m",
            "baton_ops.cli",
            "simulate",
            "--schedule-policy",
            ",".join(orders),
            "--trace",
            trace,
        ]
        subprocess.run(
            [sys.executable, *command, "--load", str(load), "--json", out.name], check=True
        )
        return {
            found["policy"]: found for found in json.loads(Path(out.name).read_text())["policies"]
        }


def short(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 20 else f"{value:.0f}"


def ttft_cell(result: dict[str, object]) -> str:
    ttft = result["ttft"]
    assert isinstance(ttft, dict)
    return (
        " / ".join(short(ttft[key]) for key in ("mean", "p50", "p95", "p99"))
        + f", {ttft['max']:.0f}"
    )


def fairness_cells(result: dict[str, object]) -> list[str]:
    ttft, wait = result["ttft"], result["wait"]
    assert isinstance(ttft, dict)
    assert isinstance(wait, dict)
    return [f"{ttft['mean']:.1f}", f"{wait['max']:.0f}", f"{result['starved']}"]


def rewritten(page: str, header: str, cells: Callable[[str], list[str]]) -> str:
    """The page with the cells of the table of this header filled in, by the row's order."""
    start = page.index(header)
    end = page.index("\n\n", start)
    rows = page[start:end].splitlines()
    found = [
        f"| {' | '.join([order, *cells(order)])} |"
        for order in (row.split("|")[1].strip() for row in rows[2:])
    ]
    return page[:start] + "\n".join([*rows[:2], *found]) + page[end:]


def orders_in(page: str, header: str) -> list[str]:
    table = page[page.index(header) :].split("\n\n", 1)[0]
    return re.findall(r"^\| ([a-z-]+) \|", table, re.MULTILINE)[1:]


ORDERS_HEADER = (
    "| order | conversation, load 0.7 | conversation, load 0.9 | hot system prompt, load 0.9 |"
)
FAIRNESS_HEADER = "| order | TTFT mean [s] | longest wait [s] | requests that starved |"


def regenerated(results: Sequence[Results]) -> dict[str, str]:
    """Both pages as they should be."""
    orders = (DOCS / "orders.md").read_text(encoding="utf-8")
    metrics = (DOCS / "metrics.md").read_text(encoding="utf-8")
    return {
        "orders.md": rewritten(
            orders, ORDERS_HEADER, lambda order: [ttft_cell(found[order]) for found in results]
        ),
        "metrics.md": rewritten(
            metrics, FAIRNESS_HEADER, lambda order: fairness_cells(results[1][order])
        ),
    }


def all_results() -> list[Results]:
    names = orders_in((DOCS / "orders.md").read_text(encoding="utf-8"), ORDERS_HEADER)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda run: simulate(*run, names), RUNS))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_measured_tables_are_not_stale() -> None:
    for name, text in regenerated(all_results()).items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, (
            f"{name}: run python -m {__spec__.name}"
        )


if __name__ == "__main__":
    for name, text in regenerated(all_results()).items():
        (DOCS / name).write_text(text, encoding="utf-8")
