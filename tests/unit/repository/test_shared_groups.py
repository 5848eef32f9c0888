"""Tests of a group run on one worker of `pytest -n`, which starts once what they share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT, SHARED_GROUPS, group_of

CLUSTERS = ("tests/e2e/api/test_a.py", "tests/e2e/engines/test_b.py")
SINGLE = ("tests/unit/test_c.py", "tests/unit/test_d.py")
MODULE = """
import os
import pytest

@pytest.mark.parametrize("number", range(6))
def test(number):
    with open({results!r}, "a") as results:
        print({name!r}, os.environ["PYTEST_XDIST_WORKER"], file=results)
"""


def test_first_match_is_the_group() -> None:
    assert {group_of(Path(name)) for name in CLUSTERS} == {"shared clusters"}
    assert group_of(Path("tests/e2e/engines/test_real_weights.py")) == "real weights"
    assert group_of(Path(SINGLE[0])) == SINGLE[0]


def test_folders_of_groups_exist() -> None:
    folders = [folder for group in SHARED_GROUPS.values() for folder in group]
    assert [folder for folder in folders if not (ROOT / folder).exists()] == []


def test_group_is_not_divided_among_workers(tmp_path: Path) -> None:
    results = tmp_path / "results"
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import pytest_xdist_make_scheduler\n"
    )
    for name in (*CLUSTERS, *SINGLE):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(MODULE.format(results=str(results), name=name))
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", "tests"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**env, "PYTHONPATH": f"{ROOT}:{ROOT / 'engine'}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    workers: dict[str, set[str]] = {}
    for line in results.read_text().splitlines():
        name, worker = line.split()
        workers.setdefault(group_of(Path(name)), set()).add(worker)
    assert workers.keys() == {"shared clusters", *SINGLE}
    assert all(len(found) == 1 for found in workers.values()), workers
    assert len(set().union(*workers.values())) == 2, "with one worker there is nothing to divide"
