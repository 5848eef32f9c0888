"""Regular files are read; a directory, pipe, socket or device in their place is named, without waiting for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.config.files import is_given, read_regular_file, refuse_unwritable_kinds
from tests.support.file_kinds import KINDS, put_kind


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_are_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    put_kind(path, kind)
    with pytest.raises(OSError, match=KINDS[kind]) as refused:
        read_regular_file(path)
    assert not isinstance(refused.value, FileNotFoundError)
    assert is_given(path)
    if kind == "dangling":
        refuse_unwritable_kinds(path)  # a file would be made where it leads
        return
    with pytest.raises(OSError, match="not a regular file"):
        refuse_unwritable_kinds(path)


def test_files_and_links_to_them_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    assert read_regular_file(tmp_path / "link") == b"text"
    with pytest.raises(FileNotFoundError):
        read_regular_file(tmp_path / "absent")
    assert not is_given(tmp_path / "absent")
    for name in ("file", "link", "absent"):
        refuse_unwritable_kinds(tmp_path / name)
