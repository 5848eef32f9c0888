"""Source files of the repository, their code and their functions."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

PYTHON = ("engine/baton", "engine/baton_ops")
CRATES = (
    "router/src",
    "router/core/src",
    "kv_transfer/src",
    "engine/drafts/src",
    "engine/kernels/src",
    "engine/native/src",
    "engine/text/src",
)


@functools.cache
def files(folder: str, *endings: str) -> tuple[str, ...]:
    """Tracked and new files below a folder, as paths from the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    listed = {path for path in done.stdout.split("\n") if path.endswith(endings)}
    return tuple(sorted(path for path in listed if (ROOT / path).is_file()))


@functools.cache
def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@functools.cache
def tree(path: str) -> ast.Module:
    return ast.parse(text(path))


def python_files() -> list[str]:
    """Files of both Python packages."""
    return [path for package in PYTHON for path in files(package, ".py")]


def python_modules() -> dict[str, str]:
    """Module name → path."""
    named = {}
    for path in python_files():
        name = path.removeprefix("engine/").removesuffix(".py").replace("/", ".")
        named[name.removesuffix(".__init__")] = path
    return named


TEST_ATTRIBUTE = r"#\[cfg\(test\)\]\n(?:#\[.*\]\n)*"


@functools.cache
def rust_code(path: str) -> str:
    """The file without its inline test module."""
    return re.split(rf"^{TEST_ATTRIBUTE}mod \w+ \{{", text(path), maxsplit=1, flags=re.MULTILINE)[0]


def product_rust(folder: str) -> list[str]:
    """Rust files without those that are compiled for tests only."""
    tests = set()
    for path in files(folder, ".rs"):
        is_root = path.endswith(("/mod.rs", "/lib.rs"))
        stem = path.rsplit("/", 1)[0] if is_root else path.removesuffix(".rs")
        for name in re.findall(rf"{TEST_ATTRIBUTE}(?:pub(?:\(\w+\))? )?mod (\w+);", text(path)):
            tests |= {f"{stem}/{name}.rs", f"{stem}/{name}/mod.rs"}
    every = files(folder, ".rs")
    return [path for path in every if path not in tests and not path.endswith("tests.rs")]


def product_files() -> list[str]:
    return [*python_files(), *(path for folder in CRATES for path in product_rust(folder))]


def functions(path: str) -> Iterator[tuple[str, int]]:
    """(name, lines) of each function."""
    if path.endswith(".py"):
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1
        return
    lines = rust_code(path).split("\n")
    head = re.compile(r"(\s*)(?:pub(?:\([a-z]+\))? )?(?:const )?(?:async )?(?:unsafe )?fn (\w+)")
    for start, line in enumerate(lines):
        match = head.match(line)
        if match and not line.rstrip().endswith((";", "}")):
            ends = (end for end in range(start, len(lines)) if lines[end] == match[1] + "}")
            yield match[2], next(ends, start) - start + 1
