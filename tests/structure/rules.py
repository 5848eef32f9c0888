"""The rules. Each yields (what breaks it, by how much); what is not yielded keeps it."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from tests.structure.second_floor import SECOND_FLOOR
from tests.structure.shape import (
    code_lines,
    matches_on_bool,
    packed_statements,
    tuple_assignments,
)
from tests.structure.sources import (
    CRATES,
    ROOTS,
    cyclic,
    entry,
    file_imports,
    files,
    first_doc_lines,
    functions,
    merged,
    product_rust,
    public_types,
    python_files,
    python_imports,
    python_modules,
    rust_code,
    rust_imports,
    text,
)

MAX_ONE_WORD_PERCENT = 30
MAX_ONE_WORD_FUNCTIONS_PERCENT = 40
MAX_DOC_COLUMNS = 100
MAX_TUPLE_ASSIGNMENTS_PER_KLOC = 1

PACKAGE_ORDER = {
    "baton": ("errors", "config", "cache", "sched", "layers", "models", "disagg", "runtime", "server"),
    "baton_ops": ("clients", "sim", "launch", "bench", "doctor", "top", "drain", "chat", "cli"),
}  # fmt: skip
"""Both Python packages with their parts, lowest first: each imports only those before it."""
ROUTER_ORDER = (
    "clock", "error", "config", "observability", "transport", "request", "response", "workers", "dispatch",
    "server", "lib", "main",
)  # fmt: skip
"""Modules of the router, lowest first: each uses only those before it."""

BRITISH_VERB = (
    "[a-z]*(tokeni|prioriti|utili|normali|optimi|initiali|synchroni|seriali|vectori|quanti|summari|recogni|organi|minimi)"
    "s(e|ing|ation)[a-z]*"
)
BRITISH_NOUN = "[a-z]*(colo|neighbo|behavio|favo|hono)ur[a-z]*"
WORDS = {
    "nobody": "no worker, no request", "whoever": "the component", "somebody": "the component", "told": "reported",
    "gone on": "resumed", "let go": "released", "of late": "recently", "anew": "again",
    "what came of": "outcome", "door": "admission controller", "story": "timeline", "stories": "timelines",
    "patience": "timeout", "rehears[a-z]*": "warm-up", "rung": "capture size", "heir": "resume fingerprint",
    "newcomer": "startup gate", "obey[a-z]*": "apply", "ageing": "aging", "parked": "pending, retained",
    "sicken": "mark unhealthy", "farewell": "shutdown", "tell end": "emit the finish", "tells?_[a-z]+": "report",
    "deciders?": "policy set", "teams?": "TP ranks", "followers?": "executor ranks", "news": "events, update",
    "weathers": "scenarios", "rides?": "run",
    BRITISH_VERB: "-ize", BRITISH_NOUN: "-or",
}  # fmt: skip
"""Words of this project alone, spellings that differ from the flags', and what to write instead.

A space also stands for the `_` of an identifier; CamelCase is read as snake_case.
"""
OUTSIDE = (
    "PARKED",
    'tag = "news"',
    '"told"',
    "`told`",
    "utilisation_ratio",
    "`utilisation`",
    "`tokenise`",
    "`tokenise_ms`",
    "`tokenised_ms`",
    "`tokenised`",
)
"""Names on the wire and in old files, which other versions still read or write."""
RULES_FILE = "tests/structure/rules.py"
"""The list of words itself."""

DIALECT_WORDS = (
    "[DONE]", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", ": baton ", "baton_resume",
    "x-baton-emit-tokens", "chatcmpl-", "cmpl-", "gnt-", "meta_info", "input_token_logprobs", "choices", "/generate",
    "/v1/chat/completions", "/v1/completions",
)  # fmt: skip
"""Parts of what an API says, which only the text layer writes and reads: engine/text/src/dialect."""
STRING_LITERAL = re.compile(r'r#"(.*?)"#|"((?:[^"\\]|\\.)*)"', re.DOTALL)

BARE = re.compile(r"(Of|What|Who|Whose|Whoever|Whether|It|Its|Nobody|One)\b")

Offenses = Iterator[tuple[str, int]]


def product_files() -> list[str]:
    return [
        *python_files(),
        *(path for folder in CRATES.values() for path in product_rust(folder)),
    ]


def import_cycles() -> Offenses:
    """Files, and packages, that import each other."""
    modules, imports = python_modules(), python_imports()
    graphs = [imports, merged(imports, {name: ".".join(name.split(".")[:2]) for name in modules})]
    for folder in CRATES.values():
        uses = rust_imports(folder)
        group_of = {
            path: f"{folder}/{path.removeprefix(folder + '/').split('/')[0]}" for path in uses
        }
        graphs += [uses, merged(uses, group_of)]
    for graph in graphs:
        for group in cyclic(graph):
            yield from ((name, 1) for name in group)


def upward_imports() -> Offenses:
    """Modules that import a package above their own, by PACKAGE_ORDER and ROUTER_ORDER."""
    for name, imported in python_imports().items():
        floor = _floor(name)
        yield from ((f"{name} -> {other}", 1) for other in imported if _floor(other) > floor)
    for path, used in rust_imports(CRATES["router"]).items():
        floor = _router_floor(path)
        yield from ((f"{path} -> {other}", 1) for other in used if _router_floor(other) > floor)


def _floor(module: str) -> tuple[int, int]:
    """Position of the package, and of the part of it that holds the module."""
    package, _, rest = module.partition(".")
    part = rest.partition(".")[0]
    floor = list(PACKAGE_ORDER).index(package)
    # A package itself holds names that all its parts may use.
    return floor, PACKAGE_ORDER[package].index(part) if part else -1


def _python_order() -> list[str]:
    return [f"{package}.{part}" for package, parts in PACKAGE_ORDER.items() for part in parts]


def _router_floor(path: str) -> int:
    return ROUTER_ORDER.index(
        path.removeprefix(CRATES["router"] + "/").split("/")[0].removesuffix(".rs")
    )


def upward_imports_of_a_package() -> Offenses:
    """Imports against the order of SECOND_FLOOR, and entries without a place in it."""
    imports = file_imports()
    for folder, order in SECOND_FLOOR.items():
        inside = {path for path in imports if path.startswith(f"{folder}/")}
        entries = {entry(path, folder) for path in inside}
        yield from ((f"{folder}: {name} is not listed", 1) for name in entries - {*order, *ROOTS})
        yield from ((f"{folder}: {name} does not exist", 1) for name in {*order} - entries)
        listed = [*order, *sorted(entries.difference(order))]
        place = {name: index for index, name in enumerate(listed)}
        for path in inside:
            for other in imports[path] & inside:
                if place[entry(other, folder)] > place[entry(path, folder)]:
                    yield f"{path} -> {other}", 1


def packages() -> dict[str, list[str]]:
    named: dict[str, list[str]] = {}
    for path in python_files():
        named.setdefault("/".join(path.split("/")[:3]).removesuffix(".py"), []).append(path)
    return named | {folder: product_rust(folder) for folder in CRATES.values()}


def one_word_types() -> Offenses:
    """Packages where too large a share [%] of the public types has a name of one word."""
    for package, paths in packages().items():
        names = [name for path in paths for name in public_types(path)]
        short = [name for name in names if len(re.findall(r"[A-Z]+[a-z0-9]*", name)) < 2]
        if len(short) > 3 and 100 * len(short) > MAX_ONE_WORD_PERCENT * len(names):
            yield package, 100 * len(short) // len(names)


def one_word_functions() -> Offenses:
    """Packages where too large a share [%] of the functions and methods has a name of one word."""
    for package, paths in packages().items():
        words = [name for path in paths for name, _ in functions(path) if not name.startswith("__")]
        percent = one_word_percent(words)
        if len(words) > 3 and percent > MAX_ONE_WORD_FUNCTIONS_PERCENT:
            yield package, percent


def one_word_percent(names: Sequence[str]) -> int:
    """Share of names without an underscore inside [%], rounded; 0 of none."""
    one_word = sum("_" not in name.strip("_") for name in names)
    return round(100 * one_word / max(len(names), 1))


def types_of_one_name() -> Offenses:
    """Public types of one package that share a name, and how many do."""
    for package, paths in packages().items():
        for name, count in Counter(name for path in paths for name in public_types(path)).items():
            if count > 1:
                yield f"{package}:{name}", count


def tuple_assigning_packages() -> Offenses:
    """Packages with too many assignments `a, b = x, y` per thousand lines of code."""
    for package, paths in packages().items():
        count = sum(map(tuple_assignments, paths))
        if 1000 * count > MAX_TUPLE_ASSIGNMENTS_PER_KLOC * sum(map(code_lines, paths)):
            yield package, count


def bool_matches() -> Offenses:
    for path in product_files():
        if count := matches_on_bool(path):
            yield path, count


def statements_on_one_line() -> Offenses:
    for path in product_files():
        if count := packed_statements(path):
            yield path, count


def bare_openings() -> Offenses:
    """Doc comments that begin without their subject, per file."""
    for path in product_files():
        if count := sum(bool(BARE.match(line)) for line in first_doc_lines(path)):
            yield path, count


def spoken_files() -> dict[str, Sequence[str]]:
    """Area → files whose words count: products, tests, tools and pages. Fixtures and recorded data are left out."""
    product = set(product_files())
    return {
        **packages(),
        "Rust tests": [path for path in files(".", ".rs") if path not in product],
        "tests": [path for path in files("tests", ".py", ".sh") if path != RULES_FILE],
        "tools": [*files("tools", ".py"), *files(".ci", ".sh", "run"), "Makefile"],
        "pages": files("router/ui", ".js", ".html", ".css"),
        "docs": [*files("docs", ".md"), "README.md", "CONTRIBUTING.md"],
        "deploy": [*files("deploy", ".md", ".yaml", ".py", ".sh", ".go")],
    }


CAMEL_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
"""Places inside a CamelCase name where a word ends."""


def private_words() -> Offenses:
    """Uses of a word outside the field's vocabulary, in names, prose and file names, per area."""
    for area, paths in spoken_files().items():
        every = "\n".join([*paths, *map(text, paths)])
        for name in OUTSIDE:
            every = every.replace(name, "")
        for word in WORDS:
            if count := uses_of_word(word, every):
                yield f"{area}:{word}", count


@functools.cache
def snake_case(source: str) -> str:
    return CAMEL_CASE.sub("_", source).lower()


def uses_of_word(word: str, source: str) -> int:
    """Uses of an entry of WORDS, or of its plural, as a word of prose or as a part of a name."""
    in_names = word.replace(" ", "[ _]")
    return len(re.findall(rf"(?<![a-z]){in_names}(?![a-rt-z])", snake_case(source)))


def articles_before_tests() -> Offenses:
    """Files with test functions whose name begins with an article, and how many these are."""
    for path in [*files("tests", ".py"), *files("deploy", ".py")]:
        if count := len(re.findall(r"\bdef test_(?:a|an|the)_", text(path))):
            yield path, count
    for path in files(".", ".rs"):
        if count := len(re.findall(r"\bfn (?:a|an|the)_", text(path))):
            yield path, count


def missing_files() -> Offenses:
    """Source files named in comments and docstrings of the products that do not exist."""
    names = {path.rsplit("/", 1)[-1] for path in files(".", ".rs", ".py", ".js")}
    for path in product_files():
        for name in re.findall(r"(?<![\w.*])\w+\.(?:rs|py|js)\b(?!\()", text(path)):
            if name not in names:
                yield f"{path}:{name}", 1


def dialect_words() -> Offenses:
    """Parts of what an API says in string literals of the router, per file and word."""
    for path in product_rust(CRATES["router"]):
        literals = "\n".join(
            raw or plain for raw, plain in STRING_LITERAL.findall(uncommented(rust_code(path)))
        )
        for word in DIALECT_WORDS:
            if count := len(re.findall(rf"(?<![\w.-]){re.escape(word)}(?!\w)", literals)):
                yield f"{path}:{word}", count


def uncommented(code: str) -> str:
    return re.sub(r"^\s*//.*", "", code, flags=re.MULTILINE)


def long_doc_lines() -> Offenses:
    """Lines of prose that are too long, per page. Tables, headings and code cannot be wrapped."""
    for path in [*files("docs", ".md"), *files("deploy", ".md"), "README.md", "CONTRIBUTING.md"]:
        count, is_code = 0, False
        for line in text(path).split("\n"):
            is_code ^= line.lstrip().startswith("```")
            is_whole = (
                is_code or line.startswith("    ") or re.match(r"\s*(\||#|`[^`]+`[.,]?$)", line)
            )
            count += not is_whole and len(line) > MAX_DOC_COLUMNS
        if count:
            yield path, count


RULES: dict[str, tuple[Callable[[], Offenses], str]] = {
    "import-cycle": (
        import_cycles,
        "imports point one way: move what both need below them, or pass it in",
    ),
    "import-order": (
        upward_imports,
        f"a package imports only those before it (Python: {' < '.join(_python_order())}; "
        f"router: {' < '.join(ROUTER_ORDER)}): move what both need into the lower one",
    ),
    "second-floor": (
        upward_imports_of_a_package,
        "inside a package a file imports only entries before its own (second_floor.py): "
        "move what both need into the lower one, or pass it in",
    ),
    "one-word-types": (
        one_word_types,
        f"at most {MAX_ONE_WORD_PERCENT} % of a package's public types have one word",
    ),
    "one-word-functions": (
        one_word_functions,
        f"at most {MAX_ONE_WORD_FUNCTIONS_PERCENT} % of a package's functions and methods have one word: "
        "a function is a verb with its object",
    ),
    "same-name-types": (types_of_one_name, "two public types of a package never share a name"),
    "tuple-assignment": (
        tuple_assigning_packages,
        "one fact per line: at most "
        f"{MAX_TUPLE_ASSIGNMENTS_PER_KLOC} `a, b = x, y` per 1,000 lines of code of a package",
    ),
    "match-bool": (bool_matches, "a choice between true and false is an `if`"),
    "one-statement": (statements_on_one_line, "each statement stands on a line of its own"),
    "bare-opening": (
        bare_openings,
        "a doc comment begins with a noun phrase or an imperative verb",
    ),
    "doc-columns": (long_doc_lines, f"prose of a page wraps at {MAX_DOC_COLUMNS} columns"),
    "private-word": (private_words, "use the field's word; rules.py names one for each"),
    "test-article": (
        articles_before_tests,
        "the name of a test says condition and result, without an article in front",
    ),
    "dialect-word": (
        dialect_words,
        "the router asks baton_text's dialect for what an API says: move the words there",
    ),
    "missing-file": (missing_files, "a comment names only files that exist"),
}


def offenses() -> dict[tuple[str, str], int]:
    """(rule, what breaks it) → by how much."""
    return {(rule, what): count for rule, (find, _) in RULES.items() for what, count in find()}
