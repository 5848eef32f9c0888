"""Names in pages, docstrings and comments exist."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from tests.structure.sources import product_files, python_files
from tests.unit.repository import prose_names as names


def found_in(paths: Iterable[str], find: Callable[[str], set[str]]) -> dict[str, list[str]]:
    """File → names that `find` reports of it."""
    return {path: sorted(reported) for path in paths if (reported := find(path))}


def sources() -> list[str]:
    return [*python_files(), *names.rust_files()]


def test_types_that_prose_names_exist() -> None:
    assert found_in([*names.pages(), *sources()], names.unknown_types) == {}


def test_dotted_names_in_backticks_resolve() -> None:
    assert found_in([*names.pages(), *sources()], names.unresolved_paths) == {}


def test_names_in_backticks_of_source_files_exist() -> None:
    assert found_in(sources(), names.unknown_identifiers) == {}


def test_files_that_sources_name_exist() -> None:
    assert found_in(product_files(), names.missing_files) == {}


def test_tables_of_contents_of_packages_list_their_entries() -> None:
    assert found_in(names.package_files(), names.unlisted_entries) == {}


@pytest.mark.parametrize(
    ("dotted", "is_resolved"),
    [
        ("baton.sched.scheduler.Scheduler", True),
        ("sched.scheduler.Scheduler", True),
        ("sched.scheduler.NoSuchName", False),
        ("Scheduler.abort", True),
        ("Scheduler.no_such_method", False),
        ("baton._native.no_such_function", False),
        ("delta.role", None),
    ],
)
def test_paths_are_resolved_by_module_and_class(dotted: str, is_resolved: bool | None) -> None:
    assert names.is_python_path(dotted) is is_resolved


def test_names_from_comments_alone_are_unknown() -> None:
    path = "tests/unit/repository/test_prose_names.py"  # NameOfThisComment stands here only
    assert "NameOfThisComment" in names.prose(path)
    assert "NameOfThisComment" not in names.code(path).replace('"NameOfThisComment"', "")
    assert names.CAMEL.findall("a KvRank, not SGLang, `RadixCache.insert`") == [
        "KvRank",
        "RadixCache",
    ]


def test_every_outside_name_is_used() -> None:
    """An entry that no file needs any more is removed."""
    spoken = "\n".join(map(names.prose, [*names.pages(), *sources()]))
    assert [name for name in sorted(names.OUTSIDE) if name not in spoken] == []
