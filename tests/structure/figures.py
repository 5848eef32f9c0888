"""Lengths of functions and lines per package and crate, and their trend against committed figures.

A figure is no ceiling: code is never cut to fit one. `steps_backwards` reports what got worse by
more than 5 % and more than `SLACK`, so that no single function decides, not even in a small
package.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

from tests.structure.sources import CRATES, files, functions, product_rust, python_files, text

COMMITTED = Path(__file__).with_name("figures.json")
HOW_TO_ACCEPT = (
    "These figures got worse by more than 5 %. Where the change is worth it, "
    "`python -m tests.structure accept` writes the new ones; the commit says why."
)
MAX_COLUMNS = 100
MAX_GROWTH = 1.05
SLACK = {"p50": 1, "p95": 3, "p99": 6, "longest": 15, "long lines": 5}
"""Growth that is never reported, in lines: a few functions or lines more in a small package."""
MIN_FUNCTIONS = {"p50": 1, "p95": 100, "p99": 500, "longest": 500}
"""Functions of a package from which a figure is compared: below, one or two of them decide it."""

Figures = dict[str, int]


def measure() -> dict[str, Figures]:
    """Figures of each package and crate, and of all Python and all Rust; of other files, long
    lines.
    """
    areas = packages() | {folder: list(product_rust(folder)) for folder in CRATES}
    areas["all Python"] = python_files()
    areas["all Rust"] = [path for folder in CRATES for path in product_rust(folder)]
    product = {*areas["all Python"], *areas["all Rust"]}
    every = [*files(".", ".py"), *files(".", ".rs")]
    others = [path for path in every if path not in product]
    measured = {name: figures_of(paths) for name, paths in areas.items()}
    measured["tests and tools"] = {"long lines": sum(map(long_lines, others))}
    measured["pages"] = {"long lines": sum(map(long_lines, files(".", ".md")))}
    return measured


def packages() -> dict[str, list[str]]:
    """Folder → files of the packages of the engine, and of the commands as a whole."""
    named: dict[str, list[str]] = {}
    for path in python_files():
        parts = path.split("/")
        is_package = parts[1] == "baton" and len(parts) > 3
        named.setdefault("/".join(parts[: 3 if is_package else 2]), []).append(path)
    return named


def figures_of(paths: Sequence[str]) -> Figures:
    lengths = sorted(length for path in paths for _, length in functions(path))
    return {
        "functions": len(lengths),
        "p50": percentile(lengths, 50),
        "p95": percentile(lengths, 95),
        "p99": percentile(lengths, 99),
        "longest": percentile(lengths, 100),
        "long lines": sum(map(long_lines, paths)),
    }


def percentile(ordered: Sequence[int], percent: int) -> int:
    """The smallest value that at least this share of the values does not exceed; 0 of none."""
    rank = math.ceil(len(ordered) * percent / 100)
    return ordered[max(rank, 1) - 1] if ordered else 0


def long_lines(path: str) -> int:
    """Lines over 100 columns.

    Tables, headings and code of a page are left out: they do not wrap.
    """
    lines = text(path)
    if path.endswith(".md"):
        lines = re.sub(r"^ *```.*?^ *```", "", lines, flags=re.MULTILINE | re.DOTALL)
        lines = re.sub(r"^( *[|#]|    ).*", "", lines, flags=re.MULTILINE)
    return sum(len(line) > MAX_COLUMNS for line in lines.split("\n"))


def steps_backwards(measured: dict[str, Figures], committed: dict[str, Figures]) -> list[str]:
    """A sentence for each figure that got worse by more than 5 % and more than its slack."""
    return [
        f"{name}: {figure} {now[figure]}, committed {before[figure]}"
        for name, now in measured.items()
        if (before := committed.get(name))
        for figure, slack in SLACK.items()
        if figure in now and figure in before
        if figure == "long lines" or now["functions"] >= MIN_FUNCTIONS[figure]
        if now[figure] > max(before[figure] * MAX_GROWTH, before[figure] + slack)
    ]


def table(measured: dict[str, Figures], committed: dict[str, Figures]) -> str:
    """A line per area; a figure that differs from the committed one has the difference behind
    it.
    """
    columns = ("functions", *SLACK)
    width = max(map(len, measured))
    lines = [" " * width + "".join(f"{column:>14}" for column in columns)]
    for name, now in measured.items():
        before = committed.get(name, now)
        cells = (_cell(now.get(column), before.get(column)) for column in columns)
        lines.append(f"{name:<{width}}" + "".join(f"{cell:>14}" for cell in cells))
    lines.append("p50, p95, p99, longest: lines of functions; long lines: over 100 columns")
    return "\n".join(lines)


def _cell(now: int | None, before: int | None) -> str:
    if now is None:
        return "-"
    return f"{now:,}" if before in (None, now) else f"({now - before:+,}) {now:,}"


def read() -> dict[str, Figures]:
    committed: dict[str, Figures] = json.loads(COMMITTED.read_text(encoding="utf-8"))
    return committed


def write(measured: dict[str, Figures]) -> None:
    """One line per area, so that branches that change different packages merge."""
    rows = (f"  {json.dumps(name)}: {json.dumps(figures)}" for name, figures in measured.items())
    COMMITTED.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
