"""Shape of the code: packed lines, matches on a bool, lines of code."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from tests.structure.sources import rust_code, text, tree

RUST_TOKEN = re.compile(
    r"//[^\n]*"
    r"|/\*.*?\*/"
    r'|\bb?r(?P<marks>#*)".*?"(?P=marks)'
    r'|"(?:\\.|[^"\\])*"'
    r"|'(?:\\u\{\w+\}|\\.|[^'\\\n])'",
    flags=re.DOTALL,
)
"""Comments and literals of Rust, which may hold any brackets and semicolons."""
RUST_TUPLE_ASSIGNMENT = re.compile(r"(?:\blet |^\s*)(?=\()", flags=re.MULTILINE)
RUST_MATCH_ON_BOOL = re.compile(r"\bmatch\b[^{};]*\{\s*(?:true|false)\s*(?:=>|if\b)")
STATEMENT_START = re.compile(r"\s*[A-Za-z_*&(#]")


@functools.cache
def bare_rust(path: str) -> str:
    """Code of a Rust file with empty strings and without comments."""

    def blank(token: re.Match[str]) -> str:
        if token[0].startswith("/"):
            return ""
        return "''" if token[0].startswith("'") else '""'

    return RUST_TOKEN.sub(blank, rust_code(path))


def code_lines(path: str) -> int:
    """Lines that are neither empty nor comments nor docstrings."""
    if path.endswith(".rs"):
        lines = rust_code(path).split("\n")
        return sum(bool(line.strip()) and not line.lstrip().startswith("//") for line in lines)
    documented = {line for start, end in _docstring_lines(path) for line in range(start, end + 1)}
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in documented
        for number, line in enumerate(text(path).split("\n"), start=1)
    )


def _docstring_lines(path: str) -> Iterator[tuple[int, int]]:
    """First and last line of each string that is a statement."""
    for node in ast.walk(tree(path)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            yield node.lineno, node.end_lineno or node.lineno


# ---------------------------------------------------------------------- tuple assignments


def tuple_assignments(path: str) -> int:
    """Assignments of a literal tuple to as many targets: `a, b = x, y`. Swaps are not counted."""
    return _rust_tuple_assignments(path) if path.endswith(".rs") else _python_tuples(path)


def _python_tuples(path: str) -> int:
    pairs = [
        (target, node.value)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Assign)
        for target in node.targets
    ]
    return sum(
        _are_elements_unrelated(
            [ast.unparse(element) for element in target.elts],
            [ast.unparse(element) for element in value.elts],
        )
        for target, value in pairs
        if isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List))
    )


def _rust_tuple_assignments(path: str) -> int:
    """`let (a, b) = (x, y);` and `(a, b) = (x, y);`. `let … else` and `if let` match a pattern."""
    code = bare_rust(path)
    count = 0
    for head in RUST_TUPLE_ASSIGNMENT.finditer(code):
        targets_end = _closing(code, head.end())
        between = re.compile(r"(?:\s*:[^=;]*)?\s*=\s*(?=\()").match(code, targets_end)
        if between is None:
            continue
        values_end = _closing(code, between.end())
        if not code[values_end:].lstrip().startswith(";"):
            continue
        targets = _elements(code[head.end() + 1 : targets_end - 1])
        values = _elements(code[between.end() + 1 : values_end - 1])
        count += _are_elements_unrelated(targets, values)
    return count


def _are_elements_unrelated(targets: list[str], values: list[str]) -> bool:
    return len(targets) == len(values) >= 2 and sorted(targets) != sorted(values)


def _closing(code: str, start: int) -> int:
    """Index after the bracket that closes the one at start."""
    depth = 0
    for index in range(start, len(code)):
        depth += (code[index] in "([{") - (code[index] in ")]}")
        if depth == 0:
            return index + 1
    return len(code)


def _elements(inside: str) -> list[str]:
    """Elements of a tuple, given what stands between its brackets."""
    elements = [""]
    depth = 0
    for char in inside:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += char
    return [element.strip() for element in elements if element.strip()]


# ---------------------------------------------------------------------- matches and statements


def matches_on_bool(path: str) -> int:
    """Matches whose first pattern is true or false: an `if` says the same."""
    if path.endswith(".rs"):
        return len(RUST_MATCH_ON_BOOL.findall(bare_rust(path)))
    return sum(
        isinstance(node, ast.Match)
        and isinstance(node.cases[0].pattern, ast.MatchSingleton)
        and node.cases[0].pattern.value is not None
        for node in ast.walk(tree(path))
    )


def packed_statements(path: str) -> int:
    """Statements that begin on the line on which the statement before them ends."""
    if path.endswith(".rs"):
        return sum(_following_statements(line) for line in bare_rust(path).split("\n"))
    count = 0
    for node in ast.walk(tree(path)):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if not isinstance(block, list):
                continue
            previous_end = node.lineno if field == "body" and hasattr(node, "lineno") else 0
            for statement in block:
                count += statement.lineno == previous_end and not _is_ellipsis(statement)
                previous_end = statement.end_lineno
    return count


def _is_ellipsis(statement: ast.stmt) -> bool:
    """True for the `...` of a method that a protocol only declares."""
    return isinstance(statement, ast.Expr) and ast.unparse(statement) == "..."


def _following_statements(line: str) -> int:
    """Statements of a line of Rust that follow a semicolon. `[0; 4]` is an array."""
    count = 0
    square = 0
    for index, char in enumerate(line):
        square += (char == "[") - (char == "]")
        if char == ";" and square <= 0:
            count += bool(STATEMENT_START.match(line[index + 1 :]))
    return count
