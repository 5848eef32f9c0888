"""Figures of the sources per package and crate, to compare one tree with another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tests.structure.rules import packages
from tests.structure.shape import code_lines, tuple_assignments
from tests.structure.sources import (
    CRATES,
    Graph,
    cyclic,
    functions,
    merged,
    python_imports,
    rust_imports,
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
    """One line per package and crate, and one for the engine as a whole."""
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
    one_word = sum("_" not in name.strip("_") for name in words)
    yield f"{lines:,}"
    yield f"{len(sizes):,}"
    yield str(percentile(sizes, 50))
    yield str(percentile(sizes, 95))
    yield str(percentile(sizes, 99))
    yield str(percentile(sizes, 100))
    yield str(sum(size > LONG_FUNCTION_LINES for size in sizes))
    yield str(tuples)
    yield f"{1000 * tuples / lines:.1f}"
    yield f"{100 * one_word / max(len(words), 1):.0f} %"


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
    """(package, its folders and files that reach each other) of each package and module."""
    imports = {name.replace(".", "/"): _paths(names) for name, names in python_imports().items()}
    found = _components(imports, depth=2)
    for folder in CRATES.values():
        depth = folder.count("/") + 1
        uses = {
            _without_suffix(path): _without_suffixes(used)
            for path, used in rust_imports(folder).items()
        }
        found += _components(uses, depth=depth)
        found += _components(uses, depth=depth + 1)
    return found


def _paths(modules: set[str]) -> set[str]:
    return {module.replace(".", "/") for module in modules}


def _without_suffix(path: str) -> str:
    return path.removesuffix(".rs").removesuffix("/mod")


def _without_suffixes(paths: set[str]) -> set[str]:
    return {_without_suffix(path) for path in paths}


def _components(graph: Graph, *, depth: int) -> list[tuple[str, set[str]]]:
    """Components among the entries of each folder that lies `depth` folders deep."""
    entries: dict[str, dict[str, str]] = {}
    for node in graph:
        parts = node.split("/")
        if len(parts) > depth:
            entries.setdefault("/".join(parts[:depth]), {})[node] = parts[depth]
    return [
        (folder, group)
        for folder, group_of in sorted(entries.items())
        for group in cyclic(merged(_within(graph, group_of), group_of))
    ]


def _within(graph: Graph, nodes: dict[str, str]) -> Graph:
    return {node: {target for target in graph[node] if target in nodes} for node in nodes}
