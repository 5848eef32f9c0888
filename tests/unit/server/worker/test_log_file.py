"""The file that never makes its writer wait: order, rotation, drops, refusals."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.server.worker import log_file
from baton.server.worker.log_file import LogFile, path_of_rank
from tests.support.file_kinds import KINDS, put_kind


def test_lines_come_in_order_and_the_log_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for start in (0, 3):
        file = LogFile("--decision-log", str(path), json.dumps, 10**6)
        for number in range(start, start + 3):
            file.put({"step": number})
        file.close()
        assert file.dropped == 0
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(6))


def test_log_starts_a_new_file_at_its_limit_and_keeps_one(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    file = LogFile("--decision-log", str(path), str, 40)
    for number in range(10):
        file.put(f"{number:09d}")
    file.close()
    assert path.with_name("steps.1").read_text().split() == [f"{n:09d}" for n in range(4, 8)]
    assert path.read_text().split() == [f"{n:09d}" for n in range(8, 10)]


def test_trace_ends_at_its_limit_and_replaces_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("an older trace")
    file = LogFile("--scheduler-trace", str(path), str, 40, must_be_whole=True)
    for number in range(10):
        file.put(f"{number:09d}")
    file.close()
    assert path.read_text().split() == [f"{n:09d}" for n in range(4)]
    assert not path.with_name("trace.1").exists()


@pytest.mark.parametrize("whole", [False, True])
def test_lines_the_disk_cannot_take_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    monkeypatch.setattr(log_file, "QUEUED_LINES", 3)
    busy, go = threading.Event(), threading.Event()

    def slow(item: str) -> str:
        busy.set()
        assert go.wait(30)
        return item

    path = tmp_path / "log"
    file = LogFile("--decision-log", str(path), slow, 10**6, must_be_whole=whole)
    file.put("0")
    assert busy.wait(30)
    for number in range(1, 6):
        file.put(str(number))
    assert file.dropped == 2
    go.set()
    while file._queue.qsize():
        pass
    file.put("6")
    file.close()
    assert path.read_text().split() == (
        ["0", "1", "2", "3"] if whole else ["0", "1", "2", "3", "6"]
    )
    assert file.dropped == (3 if whole else 2), "a trace with a gap is not continued"


def test_file_that_cannot_be_opened_is_a_mistake_in_the_flags(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--decision-log .*No such file or directory; give a file in a directory"
    ):
        LogFile("--decision-log", str(tmp_path / "no" / "log"), str, 1)


@pytest.mark.parametrize("kind", ["directory", "pipe", "socket", "device"])
def test_other_kinds_of_files_are_no_logs(tmp_path: Path, kind: str) -> None:
    """A pipe would be waited for, and a device be renamed when it is full."""
    put_kind(tmp_path / "log", kind)
    with pytest.raises(ConfigError, match=KINDS[kind]):
        LogFile("--schedule-log", str(tmp_path / "log"), str, 1000)


def test_each_rank_has_its_own_file() -> None:
    assert path_of_rank("x", 0, 1) == "x"
    assert path_of_rank("x", 1, 2) == "x.rank1"
