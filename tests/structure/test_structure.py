"""Nothing new breaks a rule of structure and language, and the list of what still does only shrinks."""

from __future__ import annotations

import pytest

from tests.structure.allowed import PATH, allowed
from tests.structure.rules import BARE, RULES, offenses
from tests.structure.sources import cyclic, expanded, functions

WRITE = f"`python -m tests.structure` writes {PATH.name} anew"


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


def test_what_was_mended_is_off_the_list(found: dict[tuple[str, str], int]) -> None:
    mended = sorted(f"{rule} {what}" for rule, what in allowed().keys() - found.keys())
    assert not mended, f"keeps its rule now ({WRITE}):\n" + "\n".join(mended)


def test_cycles_are_found_and_chains_are_not() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}
    assert cyclic(graph) == [{"a", "b", "c"}]


def test_use_trees_areexpanded() -> None:
    assert expanded("crate::a::{b,c::{D,E}}") == ["crate::a::b", "crate::a::c::D", "crate::a::c::E"]


def test_functions_are_measured() -> None:
    assert dict(functions("tests/structure/sources.py"))["text"] == 2
    assert {"next", "set"} <= dict(functions("kv_transfer/src/node/timers.rs")).keys()


@pytest.mark.parametrize(
    ("line", "is_bare"), [("Of its headers", True), ("Time until", False), ("Item of a list", False)]
)
def test_bare_openings_are_told_from_nouns(line: str, is_bare: bool) -> None:
    assert bool(BARE.match(line)) is is_bare
