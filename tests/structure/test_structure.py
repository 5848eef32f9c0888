"""Nothing new breaks a rule of structure and language, and the list of what still does only shrinks."""

from __future__ import annotations

import pytest

from tests.structure.allowed import PATH, allowed, grown, outdated
from tests.structure.rules import BARE, RULES, RULES_FILE, offenses, spoken_files
from tests.structure.sources import cyclic, expanded, files, functions

WRITE = f"`python -m tests.structure` rewrites {PATH.name}"


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


def test_a_count_below_its_entry_is_outdated() -> None:
    limits = {
        ("private-word", "docs:second"): 3,
        ("private-word", "docs:first"): 1,
        ("file-lines", "a.py"): 1000,
    }
    found = {("private-word", "docs:second"): 2, ("file-lines", "a.py"): 960}
    assert outdated(limits, found) == [
        "private-word docs:first: 0, allowed 1",
        "private-word docs:second: 2, allowed 3",
    ]


def test_sizes_in_lines_follow_after_five_percent() -> None:
    limits = {("file-lines", "a.py"): 1000}
    assert outdated(limits, {("file-lines", "a.py"): 949}) == ["file-lines a.py: 949, allowed 1000"]


def test_a_renamed_file_keeps_the_sum_and_a_new_exception_does_not() -> None:
    limits = {("bare-opening", "old.py"): 2}
    assert grown(limits, {("bare-opening", "new.py"): 2}) == []
    assert grown(limits, {("bare-opening", "old.py"): 2, ("bare-opening", "new.py"): 1}) == [
        "bare-opening: 3, allowed 2"
    ]


def test_words_of_every_source_are_checked() -> None:
    checked = {path for paths in spoken_files().values() for path in paths}
    assert set(files(".", ".py", ".rs", ".sh", ".go")) - checked == {RULES_FILE}


def test_cycles_are_found_and_chains_are_not() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}
    assert cyclic(graph) == [{"a", "b", "c"}]


def test_use_trees_are_expanded() -> None:
    assert expanded("crate::a::{b,c::{D,E}}") == ["crate::a::b", "crate::a::c::D", "crate::a::c::E"]


def test_functions_are_measured() -> None:
    assert dict(functions("tests/structure/sources.py"))["text"] == 2
    assert {"next", "set"} <= dict(functions("kv_transfer/src/node/timers.rs")).keys()


@pytest.mark.parametrize(
    ("line", "is_bare"),
    [("Of its headers", True), ("Time until", False), ("Item of a list", False)],
)
def test_bare_openings_differ_from_nouns(line: str, is_bare: bool) -> None:
    assert bool(BARE.match(line)) is is_bare
