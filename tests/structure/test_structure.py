"""Nothing new breaks a rule of structure and language, and the list of what still does only shrinks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.structure import rules
from tests.structure.allowed import PATH, allowed, grown, outdated
from tests.structure.figures import percentile, table
from tests.structure.rules import (
    BARE,
    RULES,
    RULES_FILE,
    articles_before_tests,
    dialect_words,
    offenses,
    one_word_percent,
    spoken_files,
    upward_imports_of_a_package,
    uses_of_word,
)
from tests.structure.second_floor import SECOND_FLOOR
from tests.structure.shape import matches_on_bool, packed_statements, tuple_assignments
from tests.structure.sources import cyclic, expanded, files, functions, rust_imports

WRITE = f"`python -m tests.structure write` rewrites {PATH.name}"


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], int]:
    return offenses()


@pytest.mark.parametrize("rule", RULES)
def test_nothing_new_breaks_a_rule(rule: str, found: dict[tuple[str, str], int]) -> None:
    limits = allowed()
    worse = [
        f"{what}: {count}, allowed {limits.get((of, what), 0)}"
        for (of, what), count in found.items()
        if of == rule and count > limits.get((of, what), 0)
    ]
    assert not worse, f"{rule}: {RULES[rule][1]}\n" + "\n".join(sorted(worse))


def test_entries_follow_what_was_mended(found: dict[tuple[str, str], int]) -> None:
    lower = outdated(allowed(), found)
    assert not lower, f"breaks its rule less than allowed ({WRITE}):\n" + "\n".join(lower)


def test_count_below_its_entry_is_outdated() -> None:
    limits = {
        ("private-word", "docs:second"): 3,
        ("private-word", "docs:first"): 1,
    }
    found = {("private-word", "docs:second"): 2}
    assert outdated(limits, found) == [
        "private-word docs:first: 0, allowed 1",
        "private-word docs:second: 2, allowed 3",
    ]


def test_renamed_file_keeps_the_sum_and_a_new_exception_does_not() -> None:
    limits = {("bare-opening", "old.py"): 2}
    assert grown(limits, {("bare-opening", "new.py"): 2}) == []
    assert grown(limits, {("bare-opening", "old.py"): 2, ("bare-opening", "new.py"): 1}) == [
        "bare-opening: 3, allowed 2"
    ]


def test_words_of_every_source_are_checked() -> None:
    checked = {path for paths in spoken_files().values() for path in paths}
    assert set(files(".", ".py", ".rs", ".sh", ".go")) - checked == {RULES_FILE}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("each page lock is held", 1),
        ("def _page_lock(self): ...", 1),
        ("class PageLocks:", 1),
        ("a page locker", 0),
        ("homepage_lock", 0),
    ],
)
def test_words_are_found_in_prose_and_in_parts_of_names(source: str, count: int) -> None:
    assert uses_of_word("page lock", source) == count


@pytest.mark.parametrize(
    ("source", "count"),
    [("HTTPPage", 1), ("KvPageList", 1), ("page_ids", 1), ("Pages", 1), ("homepage", 0)],
)
def test_camel_case_is_divided_into_words(source: str, count: int) -> None:
    assert uses_of_word("page", source) == count


def test_articles_in_front_of_test_names_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(articles_before_tests())
    sources = {
        "tests/test_x.py": "def test_" + "a_page(): ...\ndef test_apages(): ...",
        "x.rs": "fn " + "the_page() {}\nfn then() {}",
    }
    monkeypatch.setattr(
        rules,
        "files",
        lambda folder, ending: [
            path for path in sources if path.endswith(ending) and (folder in path or folder == ".")
        ],
    )
    monkeypatch.setattr(rules, "text", sources.__getitem__)
    assert list(articles_before_tests()) == [("tests/test_x.py", 1), ("x.rs", 1)]


def test_words_of_an_api_are_found_in_string_literals(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not list(dialect_words())
    source = r"""
// "[DONE]" in a comment
const END: &[u8] = b"data: [DONE]\n\n";
const USAGE: &str = "\"prompt_tokens\":1";
const RAW: &str = r#"{"choices":[]}"#;
const METRIC: &str = "baton_counted_prompt_tokens_total";
#[cfg(test)]
mod tests {
    const STREAM: &str = "data: {\"finish_reason\":null}";
}
"""
    path = written(tmp_path / "a.rs", source)
    monkeypatch.setattr(rules, "product_rust", lambda folder: [path])
    assert list(dialect_words()) == [
        (f"{path}:[DONE]", 1),
        (f"{path}:prompt_tokens", 1),
        (f"{path}:choices", 1),
    ]


def test_cycles_are_found_and_chains_are_not() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}
    assert cyclic(graph) == [{"a", "b", "c"}]


def test_imports_against_the_order_of_a_package_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not list(upward_imports_of_a_package())
    folder = "engine/baton/server"
    order = [name for name in SECOND_FLOOR[folder] if name != "logs"]
    monkeypatch.setitem(SECOND_FLOOR, folder, (*reversed(order), "moved"))
    found = [what for what, _ in upward_imports_of_a_package()]
    assert f"{folder}: logs is not listed" in found
    assert f"{folder}: moved does not exist" in found
    assert f"{folder}/request/sampling/params.py -> {folder}/fields.py" in found


def test_use_of_a_name_exported_again_leads_to_its_module() -> None:
    uses = rust_imports("router/core/src")["router/core/src/kv/index.rs"]
    assert "router/core/src/kv/replica.rs" in uses  # `use super::CacheUpdate`


def test_use_trees_are_expanded() -> None:
    assert expanded("crate::a::{b,c::{D,E}}") == ["crate::a::b", "crate::a::c::D", "crate::a::c::E"]


def test_functions_are_measured() -> None:
    assert dict(functions("tests/structure/sources.py"))["text"] == 2
    assert {"next_due", "set"} <= dict(functions("kv_transfer/src/node/timers.rs")).keys()


@pytest.mark.parametrize(
    ("line", "is_bare"),
    [("Of its headers", True), ("Time until", False), ("Item of a list", False)],
)
def test_bare_openings_differ_from_nouns(line: str, is_bare: bool) -> None:
    assert bool(BARE.match(line)) is is_bare


@pytest.mark.parametrize(
    ("name", "line", "count"),
    [
        ("a.py", "first, second = 1, other", 1),
        ("a.py", "self.first, second = 1, f(2, 3)", 1),
        ("a.py", "first, second = second, first", 0),
        ("a.py", "first, second = pair()", 0),
        ("a.py", "pair = 1, 2", 0),
        ("a.rs", "let (first, mut second) = (f(1, 2), [3, 4]);", 1),
        ("a.rs", "let (first, second): (u8, u8) = (1, 2);", 1),
        ("a.rs", "    (first, second) = (1, 2);", 1),
        ("a.rs", "let (first, second) = (second, first);", 0),
        ("a.rs", "let (first, second) = pair(1, 2);", 0),
        ("a.rs", "let (Some(first), Ok(second)) = (f(), g()) else { return };", 0),
        ("a.rs", "if let (Some(first), Ok(second)) = (f(), g()) {}", 0),
        ("a.rs", 'let (open, close) = ("(", ")"); // both', 1),
    ],
)
def test_unrelated_values_of_one_assignment_are_counted(
    name: str, line: str, count: int, tmp_path: Path
) -> None:
    assert tuple_assignments(written(tmp_path / name, line)) == count


@pytest.mark.parametrize(
    ("name", "source", "count"),
    [
        ("a.rs", "match a.is_some() {\n    true => 1,\n    false => 2,\n}", 1),
        ("a.rs", "match flag {\n    false if late => 1,\n    _ => 2,\n}", 1),
        ("a.rs", "match (a, b) {\n    (true, _) => 1,\n    _ => 2,\n}", 0),
        ("a.py", "match flag:\n    case True:\n        pass\n", 1),
        ("a.py", "match flag:\n    case None:\n        pass\n", 0),
    ],
)
def test_matches_on_a_bool_are_counted(name: str, source: str, count: int, tmp_path: Path) -> None:
    assert matches_on_bool(written(tmp_path / name, source)) == count


@pytest.mark.parametrize(
    ("name", "line", "count"),
    [
        ("a.py", "a = 1; b = 2", 1),
        ("a.py", "if a: b = 2", 1),
        ("a.py", "def a() -> None: ...", 0),
        ("a.rs", "let a = 1; let b = 2;", 1),
        ("a.rs", "let a = [0; N]; // one; two", 0),
        ("a.rs", "|a| { b(a); }", 0),
    ],
)
def test_statements_that_share_a_line_are_counted(
    name: str, line: str, count: int, tmp_path: Path
) -> None:
    assert packed_statements(written(tmp_path / name, line)) == count


def written(path: Path, source: str) -> str:
    path.write_text(source, encoding="utf-8")
    return str(path)


def test_percentiles_are_values_of_the_list() -> None:
    sizes = list(range(1, 101))
    assert [percentile(sizes, percent) for percent in (50, 95, 99, 100)] == [50, 95, 99, 100]
    assert percentile([], 50) == 0


def test_figures_name_every_crate() -> None:
    assert {"router/src", "kv_transfer/src", "engine/baton/sched"} <= set(table().split())


def test_names_of_one_word_are_counted() -> None:
    assert one_word_percent(["run", "_take", "select_worker", "_release_pages"]) == 50
    assert one_word_percent([]) == 0
