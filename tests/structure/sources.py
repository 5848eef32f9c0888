"""Source files, their import graphs, and their code and doc comments."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

PYTHON = ("engine/baton", "engine/baton_ops")
"""Python packages, lower one first."""
CRATES = {
    "router": "router/src",
    "router-core": "router/core/src",
    "kv_transfer": "kv_transfer/src",
    "kernels": "engine/kernels/src",
    "native": "engine/native/src",
    "text": "engine/text/src",
}
Graph = dict[str, set[str]]


@functools.cache
def files(folder: str, *endings: str) -> tuple[str, ...]:
    """Tracked and new files below a folder, as paths from the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", folder]
    listed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    return tuple(
        sorted({path for path in listed if path.endswith(endings) and (ROOT / path).is_file()})
    )


@functools.cache
def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@functools.cache
def tree(path: str) -> ast.Module:
    return ast.parse(text(path))


@functools.cache
def rust_code(path: str) -> str:
    """The file without its inline test module."""
    return re.split(
        r"^#\[cfg\(test\)\]\n(?:#\[.*\]\n)*mod \w+ \{", text(path), maxsplit=1, flags=re.MULTILINE
    )[0]


def product_rust(folder: str) -> list[str]:
    """Rust files without those that are compiled for tests only."""
    every = files(folder, ".rs")
    tests = set()
    for path in every:
        for name in re.findall(
            r"#\[cfg\(test\)\]\n(?:#\[.*\]\n)*(?:pub(?:\(\w+\))? )?mod (\w+);", text(path)
        ):
            stem = (
                path.rsplit("/", 1)[0]
                if path.endswith(("/mod.rs", "/lib.rs"))
                else path.removesuffix(".rs")
            )
            tests |= {f"{stem}/{name}.rs", f"{stem}/{name}/mod.rs"}
    return [path for path in every if path not in tests and not path.endswith("tests.rs")]


# ---------------------------------------------------------------------- Python imports


def python_files() -> list[str]:
    """Files of all Python packages."""
    return [path for package in PYTHON for path in files(package, ".py")]


def python_modules() -> dict[str, str]:
    """Module name → path."""
    named = {}
    for path in python_files():
        name = path.removeprefix("engine/").removesuffix(".py").replace("/", ".")
        named[name.removesuffix(".__init__")] = path
    return named


def python_imports() -> Graph:
    """Imports between modules of the packages, those inside functions and for type checking included."""
    modules = python_modules()
    return {name: set(_imported(name, path, modules)) - {name} for name, path in modules.items()}


def _imported(name: str, path: str, modules: dict[str, str]) -> Iterator[str]:
    package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    [
                        *package.split(".")[: len(package.split(".")) + 1 - node.level],
                        *base.split("."),
                    ]
                ).strip(".")
            for alias in node.names:
                found = f"{base}.{alias.name}"
                yield from (
                    target for target in [found if found in modules else base] if target in modules
                )


# ---------------------------------------------------------------------- imports between files

ROOTS = ("__init__", "mod", "lib")
"""Files that stand for the folder they lie in."""


@functools.cache
def file_imports() -> Graph:
    """Imports between files, of Python and of each crate."""
    modules = python_modules()
    graph = {
        modules[name]: {modules[other] for other in imported}
        for name, imported in python_imports().items()
    }
    for folder in CRATES.values():
        graph |= rust_imports(folder)
    return graph


def entry(path: str, folder: str) -> str:
    """The folder or file directly below `folder` that a path leads to, without its ending."""
    return path.removeprefix(f"{folder}/").split("/")[0].removesuffix(".py").removesuffix(".rs")


# ---------------------------------------------------------------------- Rust imports


def rust_modules(folder: str) -> dict[str, str]:
    """Module path without the crate ("a::b"; the root is "") → file. main.rs uses the crate like any other program."""
    named = {}
    for path in product_rust(folder):
        parts = path.removeprefix(folder + "/").removesuffix(".rs").split("/")
        if parts[-1] in ("mod", "lib"):
            parts.pop()
        named["::".join(parts)] = path
    return named


def rust_imports(folder: str) -> Graph:
    """Uses between the modules of a crate, by `use` and by paths in expressions.

    `mod` declarations and `pub use` of a child are no uses; a use of a name that a module exports again is one of the
    module that defines it.
    """
    modules = rust_modules(folder)
    code_of = {name: re.sub(r"//.*", "", rust_code(path)) for name, path in modules.items()}
    exported = {
        f"{name}::{alias}".strip(":"): target
        for name, code in code_of.items()
        for alias, target in _exports(code, name, modules)
    }
    graph: Graph = {}
    for name, path in modules.items():
        code = PUBLIC_USE.sub("", code_of[name])
        above = {
            target
            for _, target in _exports(code_of[name], name, modules)
            if not f"::{target}".startswith(f"::{name}".rstrip(":") + "::")
        }
        targets = above.union(_paths(code, name))
        used = {_home(target, modules, exported) for target in targets}
        graph[path] = {modules[home] for home in used if home is not None} - {path}
    return graph


PUBLIC_USE = re.compile(r"\bpub(?:\([a-z]+\))?\s+use\s+([^;]+);")


def _exports(code: str, name: str, modules: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(name, path of what it stands for) of each name of the crate that a module exports again."""
    for use in PUBLIC_USE.findall(code):
        for path in expanded(re.sub(r"\s+", "", use)):
            is_child = f"{name}::{path.split('::')[0]}".strip(":") in modules
            relative = f"self::{path}" if is_child else path
            yield from ((path.split("::")[-1], target) for target in _absolute([relative], name))


def _paths(code: str, name: str) -> Iterator[str]:
    for use in re.findall(r"\buse\s+([^;]+);", code):
        yield from _absolute(expanded(re.sub(r"\s+", "", use)), name)
    found = re.findall(r"\b((?:crate|super|self)(?:::\w+)+)", re.sub(r"\buse\s+[^;]+;", "", code))
    yield from _absolute(found, name)


def _absolute(paths: list[str], name: str) -> Iterator[str]:
    for path in paths:
        parts = path.split("::")
        here = name.split("::") if name else []
        if parts[0] == "crate":
            yield "::".join(parts[1:])
        elif parts[0] in ("self", "super"):
            while parts and parts[0] in ("self", "super"):
                here = here[:-1] if parts.pop(0) == "super" else here
            yield "::".join([*here, *parts])


def expanded(use: str) -> list[str]:
    """The paths of a use tree: `a::{b,c::{d,e}}` is a::b, a::c::d, a::c::e."""
    open_at = use.find("{")
    if open_at < 0:
        return [re.sub(r"as\w+$", "", use) if re.search(r"::\w+as[A-Z_]\w*$", use) else use]
    head, inner, depth, start, parts = use[:open_at], use[open_at + 1 : -1], 0, 0, []
    for at, char in enumerate(inner + ","):
        depth += (char == "{") - (char == "}")
        if char == "," and not depth:
            parts.append(inner[start:at])
            start = at + 1
    return [path for part in parts if part for path in expanded(head + part)]


def _home(path: str, modules: dict[str, str], exported: dict[str, str]) -> str | None:
    """The module that a path leads into."""
    parts = path.split("::")
    for n in range(len(parts), 0, -1):
        start = "::".join(parts[:n])
        if start in exported and exported[start] != start:
            return _home(exported[start], modules, exported)
        if start in modules:
            return start
    return "" if "" in modules else None


# ---------------------------------------------------------------------- graphs


def cyclic(graph: Graph) -> list[set[str]]:
    """Groups of nodes that reach each other, of two or more (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = set()
            while not group or node not in group:
                group.add(stack.pop())
            if len(group) > 1:
                found.append(group)

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def merged(graph: Graph, group_of: dict[str, str]) -> Graph:
    """The same graph between groups of nodes."""
    groups: Graph = {group: set() for group in group_of.values()}
    for node, targets in graph.items():
        groups[group_of[node]] |= {group_of[target] for target in targets} - {group_of[node]}
    return groups


# ---------------------------------------------------------------------- code and comments


def functions(path: str) -> Iterator[tuple[str, int]]:
    """(name, lines) of each function."""
    if path.endswith(".py"):
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1
        return
    lines = rust_code(path).split("\n")
    for at, line in enumerate(lines):
        head = re.match(
            r"(\s*)(?:pub(?:\([a-z]+\))? )?(?:const )?(?:async )?(?:unsafe )?fn (\w+)", line
        )
        if head and not line.rstrip().endswith((";", "}")):
            ends = (n for n in range(at, len(lines)) if lines[n] == head[1] + "}")
            yield head[2], next(ends, at) - at + 1


def first_doc_lines(path: str) -> Iterator[str]:
    """First line of each doc comment."""
    if path.endswith(".py"):
        for node in ast.walk(tree(path)):
            for child in (
                getattr(node, "body", []) if isinstance(getattr(node, "body", None), list) else []
            ):
                if (
                    isinstance(child, ast.Expr)
                    and isinstance(child.value, ast.Constant)
                    and isinstance(child.value.value, str)
                ):
                    yield child.value.value.strip().split("\n")[0]
        return
    before = ""
    for line in text(path).split("\n"):
        mark = re.match(r"\s*(///|//!) ?(.*)", line)
        kind = mark[1] if mark else ""
        if mark and kind != before:
            yield mark[2]
        before = kind


def public_types(path: str) -> list[str]:
    if path.endswith(".py"):
        return [
            node.name
            for node in tree(path).body
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        ]
    return re.findall(
        r"^\s*pub(?:\([a-z]+\))? (?:struct|enum|trait|union) (\w+)",
        rust_code(path),
        flags=re.MULTILINE,
    )
