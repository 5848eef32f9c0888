"""`baton up` itself: it starts, answers, stops, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.parse
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.processes.cluster import Cluster, family


def assert_gone(processes: list[psutil.Process], secs: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=secs)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], (
        f"still there after {secs:g} s: {alive}"
    )


SIMULATED = ("--simulate", "reference")
"""For tests of processes and keys: the ranks of these engines import no torch."""


def test_ctrl_c_stops_everything_at_once_and_exits_with_0() -> None:
    with Cluster.up(*SIMULATED) as cluster:
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


def test_commands_find_the_control_key_and_clients_need_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BATON_API_KEY", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with Cluster.up("--workers", "1", *SIMULATED, makes_control_key=True) as cluster:
        url = cluster.url
        key = cluster.state["router"]["control_key"]
        worker = cluster.node("worker")["url"]
        assert cluster.complete("a", max_tokens=1) is not None, "without a key"
        for path in ("/workers", "/ui/feed", "/get_loads"):
            assert httpx.get(url + path).status_code == 401
        assert httpx.post(f"{url}/workers", json={"url": worker}).status_code == 401
        right = {"authorization": f"Bearer {key}"}
        assert httpx.get(f"{url}/workers", headers=right).status_code == 200
        for page in ("/ui/", "/health", "/v1/models"):
            assert httpx.get(url + page).status_code == 200
        place = f"{url}/workers/{urllib.parse.quote(worker, safe='')}"
        for command in (
            ["top", "--once", "--router", url],
            ["doctor", url],
            ["drain", place, "--force"],
            ["drain", place, "--undo"],
        ):
            done = baton(*command)
            assert done.returncode in ((0, 1) if command[0] == "doctor" else (0,)), done
            port = worker.rpartition(":")[2]
            assert port in done.stdout + done.stderr, done
        listed = baton(*["top", "--once", "--router", url], XDG_RUNTIME_DIR=str(tmp_path / "x"))
        assert listed.returncode != 0, "another user has no key"
        argv = [
            Path(f"/proc/{process.pid}/cmdline").read_text()
            for process in family(cluster.process.pid)
        ]
        assert not any(key in words for words in argv)


def baton(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "baton_ops.cli", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **env},
    )


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
