"""Figures of the sources per package and crate, to compare one tree with another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tests.structure.rules import one_word_percent, packages
from tests.structure.shape import code_lines, tuple_assignments
from tests.structure.sources import (
    CRATES,
    PYTHON,
    Graph,
    cyclic,
    entry,
    file_imports,
    functions,
    merged,
)

LONG_FUNCTION_LINES = 60
COLUMNS = (
    "code lines",
    "functions",
    "median",
    "p95",
    "p99",
    "longest",
    f"over {LONG_FUNCTION_LINES}",
    "tuples",
    "per kloc",
    "one word",
)
LEGEND = f"""\
code lines   lines that are neither empty nor comments nor docstrings; without tests
functions    their number, and their lines: median, 95th, 99th percentile, longest
over {LONG_FUNCTION_LINES}      functions of more than {LONG_FUNCTION_LINES} lines
tuples       assignments of unrelated values, `a, b = x, y`; swaps are not counted
per kloc     the same per 1,000 code lines
one word     functions whose name has one word [%]; names like __init__ are left out"""


def table() -> str:
    """Table of the figures: a line per package and crate, and a line for the engine as a whole."""
    named = {name: paths for name, paths in packages().items() if _is_more_than_a_version(paths)}
    engine = [path for paths in named.values() for path in paths if path.endswith(".py")]
    rows = [(name, *_row(paths)) for name, paths in [*named.items(), ("all Python", engine)]]
    width = max(len(row[0]) for row in rows)
    lines = [" " * width + "".join(f"{column:>11}" for column in COLUMNS)]
    lines += [f"{row[0]:<{width}}" + "".join(f"{cell:>11}" for cell in row[1:]) for row in rows]
    return "\n".join([*lines, "", LEGEND, "", second_floor()])


def _is_more_than_a_version(paths: Sequence[str]) -> bool:
    return sum(map(code_lines, paths)) > 1


def _row(paths: Sequence[str]) -> Iterator[str]:
    lines = sum(map(code_lines, paths))
    named = [function for path in paths for function in functions(path)]
    sizes = sorted(size for _, size in named)
    tuples = sum(map(tuple_assignments, paths))
    words = [name for name, _ in named if not name.startswith("__")]
    yield f"{lines:,}"
    yield f"{len(sizes):,}"
    yield str(percentile(sizes, 50))
    yield str(percentile(sizes, 95))
    yield str(percentile(sizes, 99))
    yield str(percentile(sizes, 100))
    yield str(sum(size > LONG_FUNCTION_LINES for size in sizes))
    yield str(tuples)
    yield f"{1000 * tuples / lines:.1f}"
    yield f"{one_word_percent(words)} %"


def percentile(ordered: Sequence[int], percent: int) -> int:
    """The smallest value that at least this share of the values does not exceed; 0 of none."""
    rank = math.ceil(len(ordered) * percent / 100)
    return ordered[max(rank, 1) - 1] if ordered else 0


def second_floor() -> str:
    """Folders and files directly below a package or module that import each other in a circle."""
    groups = second_floor_components()
    lines = [f"second-floor components: {len(groups)}"]
    lines += [f"  {package}: {', '.join(sorted(group))}" for package, group in groups]
    return "\n".join(lines)


def second_floor_components() -> list[tuple[str, set[str]]]:
    """(folder, its entries that reach each other) of each folder below a package or module."""
    imports = file_imports()
    above = tuple(f"{folder}/" for folder in (*PYTHON, *CRATES.values()))
    folders = {
        path.rsplit("/", depth)[0] for path in imports for depth in range(1, path.count("/"))
    }
    return [
        (folder, group)
        for folder in sorted(folders)
        if folder.startswith(above)
        for group in cyclic(_entries(imports, folder))
    ]


def _entries(imports: Graph, folder: str) -> Graph:
    """Imports between the entries of a folder."""
    inside = {path for path in imports if path.startswith(f"{folder}/")}
    names = {path: entry(path, folder) for path in inside}
    return merged({path: imports[path] & inside for path in inside}, names)
