"""Tests of one file share its fixtures: `make test` runs them in one process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
FILE = """
import pathlib
import pytest

@pytest.mark.parametrize("n", range(20))
def test_nothing(n, worker_id):
    with pathlib.Path(__file__).with_suffix(".workers").open("a") as workers:
        workers.write(worker_id + "\\n")
"""


def test_tests_of_a_file_run_in_one_process(tmp_path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    options = set(re.findall(r"--dist \w+", makefile))
    assert len(options) == 1, "all targets distribute tests in one way"
    files = [tmp_path / f"test_{name}.py" for name in "abcd"]
    for file in files:
        file.write_text(FILE)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", *options.pop().split(), tmp_path]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    workers = [set(file.with_suffix(".workers").read_text().split()) for file in files]
    assert [len(some) for some in workers] == [1, 1, 1, 1]
    assert len(set.union(*workers)) == 2, "both processes got a file"
