"""Names in prose: what pages, docstrings and comments name, and whether it exists."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from tests.structure.sources import files, python_files, python_modules, text, tree

STRING_OR_COMMENT = re.compile(
    r"""
    \"\"\"(?:\\.|[^\\])*?\"\"\" | '''(?:\\.|[^\\])*?'''
    | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'
    | (\#[^\n]*)
    """,
    re.VERBOSE | re.DOTALL,
)
"""String literals of Python, so that a `#` in one begins no comment, and comments (group 1)."""
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
CAMEL = re.compile(r"(?<![\w/.-])[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)+\b(?!-)")
QUOTED = re.compile(r"`([^`\n]+)`")
DOTTED = re.compile(r"(?![A-Z]+\.)[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
"""Names joined by dots; FILE.suffix is a placeholder."""
BARE_PATH = re.compile(
    r"(?<![\w./`-])(?:baton|baton_ops|config|cache|sched|layers|models|disagg|runtime|server|[A-Z][a-z]\w+)"
    r"(?:\.[A-Za-z_]\w*)+(?![\w/(])"
)

FILE_ENDINGS = (".py", ".rs", ".js", ".go", ".h", ".json", ".yml", ".env", ".jinja")
"""Endings of file names, which other tests resolve."""
OUTSIDE = frozenset(
    {
        # products and methods
        "AutoFP8",
        "CuTe",
        "FlashAttention",
        "ModelOpt",
        "OpenAPI",
        "OpenMP",
        "OpenTelemetry",
        "CorsLayer",
        "SetRequestIdLayer",
        "PyO3",
        "SentencePiece",
        "ModelBehaviorError",  # of openai-agents
        # classes of clients
        "LiteLLMModel",
        "LiteLlm",
        "OpenAIChatCompletion",
        "OpenAIChatCompletionClient",
        "OpenAIChatGenerator",
        "OpenAILike",
        "OpenAIModel",
        "OpenAIResponses",
        "SiLU",
        "YaRN",
        "ZeroMQ",
        "ntptime",
        "zeromq",
        # processors, and Kubernetes' kinds and reasons
        "AuthenticAMD",
        "CrashLoopBackOff",
        "FailedScheduling",
        "HygonGenuine",
        "StatefulSets",
        "k8s_openapi",
        # flashinfer, torch, SGLang, transformers, vLLM
        "PrefillPlan",
        "expandable_segments",
        "io_struct",
        "RotaryEmbeddingConfigMixin",
        "TokenizersBackend",
        "_from_pretrained",
        "convert_rope_params_to_dict",
        "tie_weights",
        "_get_and_verify_max_len",
    }
)
"""Names that prose may use although no code here has them."""


def pages() -> list[str]:
    """Pages whose names are checked."""
    return [*files("docs", ".md"), "deploy/README.md", "README.md", "CONTRIBUTING.md"]


def rust_files() -> list[str]:
    """Rust files whose comments are checked."""
    return [*files("router", ".rs"), *files("kv_transfer", ".rs"), *files("engine", ".rs")]


def page_prose(path: str) -> str:
    """A page without its code blocks."""
    return re.sub(r"^ *```.*?^ *```", "", text(path), flags=re.MULTILINE | re.DOTALL)


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """All statements below a node. `ast.walk` visits ten times as many nodes: expressions too."""
    for block in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, block, ()):
            if isinstance(child, ast.stmt):
                yield child
            yield from statements(child)


@functools.cache
def documentation(path: str) -> tuple[tuple[int, int, str], ...]:
    """(first line, last line, text) of each docstring, those below assignments included.

    The syntax tree is not kept: with those of all files, the garbage collector would take 3 s.
    """
    return tuple(
        (node.lineno, node.end_lineno or node.lineno, node.value.value)
        for node in statements(ast.parse(text(path)))
        if isinstance(node, ast.Expr)
        if isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
    )


@functools.cache
def python_comments(path: str) -> tuple[tuple[int, str], ...]:
    """(line, text) of each comment. The module tokenize would take 6 s for all files."""
    source = text(path)
    found = []
    line = 1
    counted = 0
    for match in STRING_OR_COMMENT.finditer(source):
        if match[1] is None:
            continue
        line += source.count("\n", counted, match.start())
        counted = match.start()
        found.append((line, match[1]))
    return tuple(found)


def rust_comments(path: str) -> Iterator[str]:
    """Comments that stand on lines of their own."""
    yield from re.findall(r"^\s*//[/!]?(.*)$", text(path), flags=re.MULTILINE)


@functools.cache
def prose(path: str) -> str:
    """Prose of a file: the text of a page, or the docstrings and comments of a source file."""
    if path.endswith(".md"):
        return page_prose(path)
    if path.endswith(".rs"):
        return "\n".join(rust_comments(path))
    documented = [found for _, _, found in documentation(path)]
    return "\n".join([*documented, *(found for _, found in python_comments(path))])


def code(path: str) -> str:
    """A source file without its docstrings and comments; string literals stay."""
    if path.endswith(".rs"):
        return re.sub(r"^\s*//.*$", "", text(path), flags=re.MULTILINE)
    if not path.endswith(".py"):
        return text(path)
    lines = text(path).split("\n")
    for first, last, _ in documentation(path):
        lines[first - 1 : last] = [""] * (last - first + 1)
    for line, comment in python_comments(path):
        lines[line - 1] = lines[line - 1].removesuffix(comment)
    return "\n".join(lines)


@functools.cache
def identifiers(path: str) -> frozenset[str]:
    return frozenset(IDENTIFIER.findall(code(path)))


@functools.cache
def known_names() -> frozenset[str]:
    """Every identifier of the repository's code, scripts and manifests."""
    folders = ("engine", "router", "kv_transfer", "tests", "tools", "deploy")
    endings = (".py", ".rs", ".js", ".html", ".css", ".yaml", ".sh", ".go", ".json", ".toml")
    paths = [path for folder in folders for path in files(folder, *endings)]
    own = "tests/unit/repository/prose_names.py"
    return frozenset().union(*(identifiers(path) for path in paths if path != own))


def unknown_types(path: str) -> set[str]:
    """CamelCase words of a file's prose that no code has. In pages, only words in backticks count."""
    spoken = prose(path)
    if path.endswith(".md"):
        spoken = "\n".join(QUOTED.findall(spoken))
    return set(CAMEL.findall(spoken)) - known_names() - OUTSIDE


@functools.cache
def modules_by_ending() -> dict[str, list[str]]:
    """Each ending of a module's dotted name (`sched.planner`, `planner`) → files of such modules."""
    endings: dict[str, list[str]] = {}
    for name, path in python_modules().items():
        parts = name.split(".")
        for at in range(len(parts)):
            endings.setdefault(".".join(parts[at:]), []).append(path)
    return endings


@functools.cache
def native_names() -> frozenset[str]:
    """Names of the extension `baton._native`, which Rust defines."""
    return frozenset().union(*(identifiers(path) for path in files("engine/native", ".rs")))


@functools.cache
def files_of_classes() -> dict[str, list[str]]:
    """Name of each class of the engine → files that define one of this name."""
    homes: dict[str, list[str]] = {}
    for path in python_files():
        for name in re.findall(r"^ *class (\w+)", code(path), re.MULTILINE):
            homes.setdefault(name, []).append(path)
    return homes


def is_python_path(dotted: str) -> bool | None:
    """True if `pkg.module.name` or `Class.name` resolves; None if it begins with neither a package nor a class."""
    parts = dotted.split(".")
    endings = modules_by_ending()
    if parts[:2] == ["baton", "_native"]:
        return set(parts[2:]) <= native_names()
    for length in range(len(parts), 0, -1):
        homes = endings.get(".".join(parts[:length]))
        if homes:
            rest = set(parts[length:])
            return any(rest <= identifiers(home) for home in homes)
    homes = files_of_classes().get(parts[0])
    return None if homes is None else any(set(parts) <= identifiers(home) for home in homes)


@functools.cache
def code_text() -> str:
    """Code of the products, in which dotted names of attributes and files appear as strings."""
    return "\n".join(code(path) for path in [*python_files(), *rust_files()])


def is_written_in_code(name: str) -> bool:
    return f'"{name}' in code_text()


def dotted_names(path: str) -> Iterator[str]:
    """Dotted names in backticks; in Python also bare ones that begin with a package or a type."""
    for quoted in QUOTED.findall(prose(path)):
        yield quoted.removesuffix("()")
    if path.endswith(".py"):
        yield from BARE_PATH.findall(prose(path))


def unresolved_paths(path: str) -> set[str]:
    """Dotted names whose module or class lacks the name, or of which a part exists nowhere."""
    unresolved = set()
    for name in dotted_names(path):
        if not DOTTED.fullmatch(name) or name.endswith(FILE_ENDINGS) or is_written_in_code(name):
            continue
        is_resolved = is_python_path(name)
        if is_resolved is None:
            is_resolved = set(name.split(".")) <= known_names() | OUTSIDE
        if not is_resolved:
            unresolved.add(name)
    return unresolved


def unknown_identifiers(path: str) -> set[str]:
    """Single names in backticks of a source file's prose that no code has."""
    quoted = {name.removesuffix("()") for name in QUOTED.findall(prose(path))}
    return {name for name in quoted if IDENTIFIER.fullmatch(name)} - known_names() - OUTSIDE


def unlisted_entries(path: str) -> set[str]:
    """Names in the first column of a package's table of contents that are not entries of it."""
    folder = path.rsplit("/", 1)[0]
    entries = {name.removeprefix(f"{folder}/").split("/")[0] for name in files(folder, "")}
    entries = {name.removesuffix(".py") for name in entries}
    rows = re.findall(r"^\|([^|]*`[^|]*)\|", ast.get_docstring(tree(path)) or "", re.MULTILINE)
    named = {name.removesuffix("/") for row in rows for name in QUOTED.findall(row)}
    return {name for name in named if re.fullmatch(r"[a-z_]\w*", name)} - entries


def missing_files(path: str) -> set[str]:
    """Source files that a file names and that do not exist."""
    named = set(re.findall(r"(?<![\w.*])\w+\.(?:rs|py|js)\b(?!\()", text(path)))
    return named - {name.rsplit("/", 1)[-1] for name in files(".", ".rs", ".py", ".js")}


def package_files() -> list[str]:
    """`__init__.py` of each package."""
    return [path for path in python_files() if path.endswith("/__init__.py")]
