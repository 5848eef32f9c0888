"""The docs say what the code says: error codes, reason codes, links, and the places that the pages name."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from baton import config, errors
from baton.sched.state.load_report import LoadReport
from baton_ops import drain
from baton_ops.bench.main import LOAD_GENERATORS, TRACE
from tests.perf.bench_serving import ROUNDS

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("engine", "router", "kv_transfer", "tests", "tools", "deploy")
SOURCES = [
    path.as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.*")
    if path.suffix in (".rs", ".py")
]
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")


def table_rows(text: str, header: str) -> list[list[str]]:
    """Cells of the table whose header row begins with `header`, without backticks."""
    lines = text[text.index(header) :].splitlines()[2:]
    table = lines[: next(i for i, line in enumerate([*lines, ""]) if not line.startswith("|"))]
    return [[cell.strip().strip("`") for cell in line.strip("|").split(" | ")] for line in table]


def screaming(variant: str) -> str:
    """Name of an enum's variant on the wire: OpenOk → OPEN_OK."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", variant).upper()


def test_error_table_lists_every_engine_error_with_status_and_type() -> None:
    rows = {
        code: (int(status), kind)
        for code, status, kind, _ in table_rows(PROTOCOL, "| code | status |")
    }
    assert {code: rows.get(code) for code in errors._all(errors.EngineError)} == {
        code: (cls.status, cls.type) for code, cls in errors._all(errors.EngineError).items()
    }


def test_error_table_lists_exactly_the_codes_of_engine_and_router() -> None:
    source = (ROOT / "router" / "src" / "error.rs").read_text(encoding="utf-8")
    router = set(re.findall(r'=> \("(\w+)", \d+\)', source))
    rows = {code for code, *_ in table_rows(PROTOCOL, "| code | status |")}
    assert rows == router | set(errors._all(errors.EngineError))


def test_load_table_is_what_a_rank_reports() -> None:
    rows = [names for names, _ in table_rows(PROTOCOL, "| field of `load` |")]
    assert {name.strip("` ") for names in rows for name in names.split(",")} == set(
        LoadReport.__dataclass_fields__
    )


def test_reason_code_table_is_the_transfer_crates() -> None:
    source = (ROOT / "kv_transfer" / "src" / "reason_code.rs").read_text(encoding="utf-8")
    enum = source[source.index("pub enum ReasonCode {") :].split("\n}\n")[0]
    never = set(
        re.findall(
            r"ReasonCode::(\w+)", source[source.index("!matches!(") :].split("\n        )\n")[0]
        )
    )
    codes = {
        screaming(name): name not in never
        for name in re.findall(r"^    ([A-Z]\w+),$", enum, re.MULTILINE)
    }
    rows = {
        code: retry.startswith("yes")
        for code, _, retry in table_rows(PROTOCOL, "| code | meaning | worth a retry")
    }
    assert rows == codes


def test_protocol_messages_are_the_transfer_crates() -> None:
    source = (ROOT / "kv_transfer" / "src" / "protocol" / "mod.rs").read_text(encoding="utf-8")
    names = {
        name
        for cell, *_ in table_rows(PROTOCOL, "| message | direction |")
        for name in cell.split(", ")
    }
    messages = source[source.index("pub enum Msg {") :].split("\n}\n")[0]
    variant = (
        r'^    (?:#\[serde\(rename = "([A-Z_]+)"\)\]\n    #\[strum.*\]\n    )?([A-Z]\w+)[ ({,]'
    )
    assert names == {
        wire or screaming(name) for wire, name in re.findall(variant, messages, re.MULTILINE)
    }


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "deploy" / "README.md"], ids=lambda page: page.parent.name + page.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        file = (page.parent / path) if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {
                re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings
            }, target


def test_places_in_the_code_map_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    places = re.findall(r"`((?:router|kv_transfer|engine)/[\w./]*)`", text)
    assert len(places) > 10
    assert [place for place in places if not (ROOT / place).exists()] == []


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "deploy" / "README.md"], ids=lambda page: page.parent.name + page.name
)
def test_source_files_that_pages_name_exist(page: Path) -> None:
    """Pages may leave out leading folders: `capture.py` and `runner/capture.py` both name a file that ends so."""
    named = re.findall(r"`([\w./-]+\.(?:rs|py))(?::\w+)?`", page.read_text(encoding="utf-8"))
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in SOURCES)] == []


def test_engine_flags_in_the_docs_exist() -> None:
    """Every --flag that the pages name is an engine flag, a flag of `baton up`, or in the router's source."""
    fields_of = {f.name: f for f in dataclasses.fields(config.EngineConfig)}
    known = {config.flag_name(name) for name in fields_of} | {
        n for f in fields_of.values() for n in f.metadata["also"]
    }
    known |= {config.flag_name(name) for name in drain.DrainConfig.__dataclass_fields__}
    ops = ROOT / "engine" / "baton_ops"
    flags_of_up = [ops / name for name in ("launch/cluster_plan.py", "doctor/main.py", "top.py")]
    up = "".join(path.read_text(encoding="utf-8") for path in flags_of_up)
    simulated = [ops / "sim/main.py", ROOT / "engine/baton/config/simulated.py"]
    sim = "".join(path.read_text(encoding="utf-8") for path in simulated)
    router = "".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "router" / "src" / "config").rglob("*.rs")
    )
    refused = (ROOT / "router" / "src" / "config" / "unsupported_flags.rs").read_text(
        encoding="utf-8"
    )
    fields = set(re.findall(r"^    (?:pub )?(\w+):", up + sim, re.MULTILINE)) | set(
        re.findall(r"pub (\w+):", router)
    )
    known |= {"--" + name.replace("_", "-") for name in fields} | {
        "--help",
        "--help-all",
        "--out",
        "--steps",
        "--threads",
        "--seed",
    }
    known |= {f"--{name.replace('_', '-')}" for name in (*ROUNDS, *TRACE)}
    known |= set(re.findall(r"--[a-z-]+", " ".join(LOAD_GENERATORS.values())))
    known |= {"--url", "--hold-turns", "--chat", "--arms", "--fronts", "--bench", "--memory"}
    known |= {
        "--release",
        "--example",
        "--order",
        "--nocapture",
    }  # cargo's, an example's, a test run's
    known |= {"--short"}  # of tests/fault/promises
    known |= {"--http2-prior-knowledge"}  # curl's
    known |= {"--target", "--torch-backend", "--version"}  # docker's, uv's, baton's own
    kubectl = {
        "--as",
        "--field-selector",
        "--prefix",
        "--raw",
        "--since",
        "--sort-by",
        "--tail",
        "--timeout",
    }
    known |= kubectl
    known |= {
        "--jsonl",
        "--shapes",
        "--quick",
        "--cpu",
        "--into",
        "--baseline",
        "--pace",
        "--cells",
        "--peer",
        "--mixture",
    }  # tests/perf/bench_gpu.py, bench_front, bench_experts.py, tests/gpu
    lines = re.findall(r"^([a-z0-9 -]+): ", refused, re.MULTILINE)
    known |= {f"--{name}" for line in lines for name in line.split()} | {
        "--vllm-pd-disaggregation"
    }  # an alias
    for page in PAGES:
        if page.name in ("flags.md", "clients.md"):  # the latter has flags of other programs
            continue
        named = set(
            re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+[a-z0-9]", page.read_text(encoding="utf-8"))
        )
        assert named - known == set(), page.name


def test_chains_of_the_architecture_page_resolve() -> None:
    """Each `file:function` of "Follow one thing" is a function that this file defines."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split("## 6. Follow one thing\n")[1].split("\n## ")[0]
    steps = re.findall(r"^\d\. `(\S+):(\w+)`", section, re.MULTILINE)
    assert len(re.findall(r"^\d\. ", section, re.MULTILINE)) == len(steps) == 39
    for path, function in steps:
        defined = rf"^ *(?:pub(?:\(\w+\))? )?(?:async )?(?:unsafe )?(?:def|fn) {function}\b"
        assert re.search(defined, (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), (
            f"{path}: no {function}"
        )
