"""Order of the modules of a crate: which module uses which, and the uses against `rust_order.txt`.

Cargo keeps the order of crates. Inside a crate the compiler accepts any use; this file reads them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.structure.sources import CRATES, product_rust, rust_code

ORDER_FILE = Path(__file__).with_name("rust_order.txt")
"""`folder: module module …`, lowest first: each uses only those before it.

`mod` and `lib` come last, and may use all others, unless they are listed.
"""
ROOTS = ("mod", "lib")
PUBLIC_USE = re.compile(r"\bpub(?:\([a-z]+\))?\s+use\s+([^;]+);")

Graph = dict[str, set[str]]


def orders() -> dict[str, list[str]]:
    """Folder → its entries, lowest first."""
    lines = ORDER_FILE.read_text(encoding="utf-8").replace("\n ", " ").splitlines()
    split = (line.split(": ") for line in lines)
    return {folder: entries.split() for folder, entries in split}


def against_order(folder: str, order: list[str], graph: Graph) -> Iterator[str]:
    """Uses of an entry above one's own, and entries without a place in the order."""
    inside = {path for path in graph if path.startswith(f"{folder}/")}
    entries = {entry(path, folder) for path in inside}
    yield from (f"{folder}: {name} is not listed" for name in entries - {*order, *ROOTS})
    yield from (f"{folder}: {name} does not exist" for name in {*order} - entries)
    listed = [*order, *sorted(entries.difference(order))]
    for path in sorted(inside):
        for other in sorted(graph[path] & inside):
            if listed.index(entry(other, folder)) > listed.index(entry(path, folder)):
                yield f"{path} -> {other}"


def entry(path: str, folder: str) -> str:
    """The folder or file directly below `folder` that a path leads to, without its ending."""
    return path.removeprefix(f"{folder}/").split("/")[0].removesuffix(".rs")


def merged(graph: Graph, folder: str) -> Graph:
    """The same graph between the entries of a folder."""
    groups: Graph = {}
    for path, targets in graph.items():
        own = entry(path, folder)
        groups.setdefault(own, set()).update({entry(other, folder) for other in targets} - {own})
    return groups


def all_uses() -> Graph:
    graph: Graph = {}
    for folder in CRATES:
        graph |= uses_of_crate(folder)
    return graph


@functools.cache
def uses_of_crate(folder: str) -> Graph:
    """Uses between the modules of a crate, by `use` and by paths in expressions.

    `mod` declarations and `pub use` of a child are no uses; a use of a name that a module exports
    again is one of the module that defines it.
    """
    modules = _modules(folder)
    code_of = {name: re.sub(r"//.*", "", rust_code(path)) for name, path in modules.items()}
    exported = {
        f"{name}::{alias}".strip(":"): target
        for name, code in code_of.items()
        for alias, target in _exports(code, name, modules)
    }
    graph: Graph = {}
    for name, path in modules.items():
        children = f"::{name}".rstrip(":") + "::"
        targets = {target for _, target in _exports(code_of[name], name, modules)}
        targets = {target for target in targets if not f"::{target}".startswith(children)}
        targets.update(_paths(PUBLIC_USE.sub("", code_of[name]), name))
        homes = {_home(target, modules, exported) for target in targets}
        graph[path] = {modules[home] for home in homes if home is not None} - {path}
    return graph


def _modules(folder: str) -> dict[str, str]:
    """Module path without the crate ("a::b"; the root is "") → file."""
    named = {}
    for path in product_rust(folder):
        parts = path.removeprefix(f"{folder}/").removesuffix(".rs").split("/")
        if parts[-1] in ROOTS:
            parts.pop()
        named["::".join(parts)] = path
    return named


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
    without_uses = re.sub(r"\buse\s+[^;]+;", "", code)
    yield from _absolute(re.findall(r"\b((?:crate|super|self)(?:::\w+)+)", without_uses), name)


def _absolute(paths: list[str], name: str) -> Iterator[str]:
    """Paths from the root of the crate; those into other crates are left out."""
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
    head, brace, rest = use.partition("{")
    if not brace:
        return [re.sub(r"(::\w+)as[A-Z_]\w*$", r"\1", use)]
    parts = [""]
    depth = 0
    for char in rest.removesuffix("}"):
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [path for part in parts if part for path in expanded(head + part)]


def _home(path: str, modules: dict[str, str], exported: dict[str, str]) -> str | None:
    """The module that a path leads into."""
    parts = path.split("::")
    for length in range(len(parts), 0, -1):
        start = "::".join(parts[:length])
        if start in exported and exported[start] != start:
            return _home(exported[start], modules, exported)
        if start in modules:
            return start
    return "" if "" in modules else None
