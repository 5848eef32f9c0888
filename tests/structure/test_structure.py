"""Order of Rust modules and of crates, imports between Python files, and the figures themselves."""

from __future__ import annotations

import graphlib
import re
from pathlib import Path

import grimp
import pytest

from tests.structure import figures
from tests.structure.rust_modules import (
    against_order,
    all_uses,
    expanded,
    merged,
    orders,
    uses_of_crate,
)
from tests.structure.sources import CRATES, files, functions, text


def cycle_of(graph: dict[str, set[str]]) -> list[str]:
    """Nodes of one cycle, or none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return []


def test_cycle_is_found_and_a_chain_is_none() -> None:
    assert cycle_of({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert set(cycle_of({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == {"b", "c"}


def test_python_files_do_not_import_each_other_in_a_circle() -> None:
    """Imports inside functions and for type checking count."""
    graph = grimp.build_graph("baton", "baton_ops", cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert "baton.sched.scheduler" in imports["baton.runtime.engine_loop"]
    assert cycle_of(imports) == []


@pytest.mark.parametrize("folder", CRATES)
def test_modules_of_a_crate_do_not_use_each_other_in_a_circle(folder: str) -> None:
    uses = uses_of_crate(folder)
    assert cycle_of(uses) == []
    assert cycle_of(merged(uses, folder)) == []


@pytest.mark.parametrize("folder", orders())
def test_modules_use_only_those_before_them(folder: str) -> None:
    """`rust_order.txt` has the order: move what both need into the lower one, or pass it in."""
    assert list(against_order(folder, orders()[folder], all_uses())) == []


def test_uses_against_an_order_are_found() -> None:
    graph = {"src/low.rs": {"src/high/mod.rs"}, "src/high/mod.rs": set(), "src/lib.rs": set()}
    assert list(against_order("src", ["low", "high"], graph)) == ["src/low.rs -> src/high/mod.rs"]
    assert list(against_order("src", ["high", "low"], graph)) == []
    assert list(against_order("src", ["high", "moved"], graph)) == [
        "src: low is not listed",
        "src: moved does not exist",
    ]


def test_use_of_a_name_exported_again_leads_to_its_module() -> None:
    uses = uses_of_crate("router/core/src")["router/core/src/kv/index.rs"]
    assert "router/core/src/kv/replica.rs" in uses  # `use super::CacheUpdate`


def test_use_trees_are_expanded() -> None:
    assert expanded("crate::a::{b,c::{D,E}}") == ["crate::a::b", "crate::a::c::D", "crate::a::c::E"]


CRATES_BELOW = {
    "router/core": set(),
    "kv_transfer": set(),
    "engine/drafts": set(),
    "engine/kernels": set(),
    "engine/text": set(),
    "router": {"router-core", "baton-text"},
    "engine/native": {
        "baton-drafts",
        "baton-router",
        "baton-text",
        "kernels",
        "kv_transfer",
    },
}
"""Crate → crates of this workspace that it depends on."""
OWN_CRATES = {
    "baton-drafts",
    "baton-router",
    "baton-text",
    "kernels",
    "kv_transfer",
    "router-core",
}
INPUT_AND_OUTPUT = {"axum", "hyper", "hyper-util", "kube", "pyo3", "socket2", "tokio", "tower"}


def dependencies(crate: str) -> set[str]:
    """Names in the dependencies of a crate, without those of tests."""
    section = text(f"{crate}/Cargo.toml").split("\n[dependencies]\n")[1].split("\n[")[0]
    return set(re.findall(r"^([\w-]+)(?:\.workspace)? =", section, re.MULTILINE))


@pytest.mark.parametrize("crate", CRATES_BELOW)
def test_crates_depend_on_those_below_them(crate: str) -> None:
    """Cargo refuses a use of any other."""
    assert dependencies(crate) & OWN_CRATES == CRATES_BELOW[crate]


@pytest.mark.parametrize("crate", ["router/core", "engine/text", "engine/drafts", "engine/kernels"])
def test_deciding_crates_depend_on_no_library_of_input_and_output(crate: str) -> None:
    assert dependencies("router") >= {"axum", "hyper", "tokio"}
    assert dependencies(crate) & INPUT_AND_OUTPUT == set()


def tags_of_code_blocks(source: str) -> list[str]:
    """Tag of each fenced block in the doc comments of a Rust file."""
    tags = []
    fence = ""
    for line in source.splitlines():
        comment = re.match(r"\s*//[/!]\s*(`{3,})?(.*)", line)
        if comment is None:
            fence = ""
        elif comment[1] and not fence:
            fence = comment[1]
            tags.append(comment[2])
        elif comment[1] == fence and not comment[2]:
            fence = ""
    return tags


def test_tags_of_code_blocks_are_found() -> None:
    source = "//! ```text\n//! a\n//! ```\nfn f() {}\n    /// ```\n    /// b();\n    /// ```\n"
    assert tags_of_code_blocks(source) == ["text", ""]
    assert tags_of_code_blocks("/// ````text\n/// ```\n/// ````\n/// ```rust\n") == ["text", "rust"]


@pytest.mark.parametrize("crate", CRATES_BELOW)
def test_doc_comments_have_no_code_that_documentation_tests_would_run(crate: str) -> None:
    """Because there is none, `cargo test` has no rustdoc read all crates to find that out."""
    assert "\ndoctest = false\n" in text(f"{crate}/Cargo.toml")
    tags = {path: tags_of_code_blocks(text(path)) for path in files(f"{crate}/src", ".rs")}
    assert {path: found for path, found in tags.items() if set(found) - {"text", "json"}} == {}


def test_functions_are_measured() -> None:
    assert dict(functions("tests/structure/sources.py"))["text"] == 2
    assert {"next_due", "set"} <= dict(functions("kv_transfer/src/node/timers.rs")).keys()


def test_percentiles_are_values_of_the_list() -> None:
    lengths = list(range(1, 101))
    found = [figures.percentile(lengths, percent) for percent in (50, 95, 99, 100)]
    assert found == [50, 95, 99, 100]
    assert figures.percentile([], 50) == 0


def test_figures_are_committed_for_each_package_and_crate() -> None:
    assert {*figures.packages(), *CRATES} <= figures.read().keys()


LARGE = {"functions": 1000, "p50": 8, "p95": 40, "p99": 60, "longest": 100, "long lines": 200}


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, []),
        ({"p95": 43, "long lines": 210}, []),
        ({"p95": 44}, ["area: p95 44, committed 40"]),
        ({"p50": 7, "p99": 67}, ["area: p99 67, committed 60"]),
        ({"long lines": 211}, ["area: long lines 211, committed 200"]),
        ({"functions": 90, "p95": 80, "p99": 100}, []),
        ({"functions": 90, "p50": 10}, ["area: p50 10, committed 8"]),
    ],
)
def test_growth_beyond_slack_is_reported(changed: dict[str, int], found: list[str]) -> None:
    assert figures.steps_backwards({"area": LARGE | changed}, {"area": LARGE}) == found


def test_new_package_has_no_figure_to_keep() -> None:
    assert figures.steps_backwards({"new": LARGE}, {}) == []


def test_long_lines_of_pages_are_prose(tmp_path: Path) -> None:
    long = "word " * 30
    page = tmp_path / "page.md"
    page.write_text(f"{long}\n\n| {long} |\n\n```\n{long}\n```\n\n# {long}\n", encoding="utf-8")
    assert figures.long_lines(str(page)) == 1
