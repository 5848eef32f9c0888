"""`baton up` itself: it starts, answers, stops, and leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.processes.cluster import Cluster, family


def assert_gone(processes: list[psutil.Process], secs: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=secs)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], (
        f"still there after {secs:g} s: {alive}"
    )


def test_ctrl_c_stops_everything_at_once_and_exits_with_0() -> None:
    with Cluster.up() as cluster:
        processes = family(cluster.process.pid)
        assert len(processes) >= 6, processes  # up, router, two fronts, two ranks
        assert cluster.interrupt() == 0
        assert "was killed" not in "".join(cluster.output)
        assert_gone(processes, 5)
        assert not (cluster.folder / "state.json").exists()


@pytest.mark.slow
def test_node_that_does_not_end_is_killed_and_named() -> None:
    with Cluster.up() as cluster:
        processes = family(cluster.process.pid)
        psutil.Process(cluster.node("decode")["pid"]).suspend()
        assert cluster.interrupt() == 0
        assert "decode 0 did not end within 10 s and was killed; its log: " in "".join(
            cluster.output
        )
        assert_gone(processes, 5)


@pytest.mark.slow
def test_hung_node_is_restarted() -> None:
    with Cluster.up("--hang-timeout-secs", "4") as cluster:
        hung = psutil.Process(cluster.node("decode")["pid"])
        hung.suspend()
        cluster.await_restart("decode")
        assert_gone([hung], 5)
        said = "".join(cluster.output)
        assert "for 4 s (--hang-timeout-secs) and is killed" in said
        assert cluster.complete("Baton is", max_tokens=2)


@pytest.mark.slow
def test_killed_up_leaves_nothing_behind() -> None:
    with Cluster.up() as cluster:
        processes = family(cluster.process.pid)
        cluster.process.send_signal(signal.SIGKILL)
        cluster.process.wait(10)
        assert_gone(processes, 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [["--workers", "1"], ["--prefill", "2", "--decode", "2", "--dp-size", "2"]]
)
def test_smoke_passes_for_other_shapes(flags: list[str], tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "baton_ops.cli",
        "up",
        "--smoke",
        "--port",
        "0",
        "--log-dir",
        str(tmp_path),
        *flags,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "11 of 11 checks passed" in done.stdout
    # The demo model is trained on this call and this reasoning.
    assert 'get_weather({"city": "Paris"})' in done.stdout
    assert "The user asks for the weather in Paris." in done.stdout


@pytest.mark.slow
def test_drill_shows_three_promises(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "baton_ops.cli", "up", "--drill", "--port", "0"]
    command += ["--log-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 promises kept" in done.stdout
    assert done.stdout.count("  kept  ") == 3, done.stdout
