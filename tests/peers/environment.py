"""Programs of other projects in their environments under .venv-peers (made by setup.sh)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.cluster import STOP_SECS, Cluster, eventually, get

REPO = Path(__file__).parents[2]
READY_SECS = 90.0


def python_of(name: str) -> Path:
    """The interpreter of environment `name`; skips the test when it could not be installed."""
    folder = REPO / ".venv-peers" / name
    if not (folder / ".installed").exists():
        log = folder.with_name(f"{name}.log")
        why = "run tests/peers/setup.sh"
        if log.exists():
            why = f"it could not be installed: {log.read_text(errors='replace').strip()[-300:]}"
        pytest.skip(f"{name}: {why}")
    return folder / "bin" / "python"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def gateway(name: str, module: str, flags: list[str], workers: int, log: Path) -> Iterator[str]:
    """A peer's router, from ready with that many healthy workers until SIGTERM; gives its URL."""
    port = free_port()
    command = [str(python_of(name)), "-m", module, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), "--log-level", "warn", *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None, f"{name} ended:\n{log.read_text()[-3000:]}"
        state: dict[str, Any] = json.loads(get(f"{url}/readiness") or "{}")
        return state.get("status") == "ready" and state.get("healthy_workers") == workers

    try:
        try:
            eventually(f"{name} has {workers} healthy workers", is_ready, READY_SECS)
        except AssertionError as err:
            raise AssertionError(f"{err}\n{log.read_text()[-3000:]}") from err
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_SECS)


def pair_flags(cluster: Cluster) -> list[str]:
    """The peers share these flags: one prefill node with its bootstrap port, one decode node."""
    prefill = cluster.node("prefill")
    where = [
        "--prefill",
        prefill["url"],
        str(prefill["bootstrap_port"]),
        "--decode",
        cluster.node("decode")["url"],
    ]
    return ["--pd-disaggregation", *where]


def run_script(name: str, script: str, *args: str) -> Any:
    """Run a script of this folder in that environment; what it printed, as JSON."""
    command = [str(python_of(name)), str(Path(__file__).with_name(script)), *args]
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "OPENAI", "LITELLM"))
    }
    environment = {
        **clean,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }  # litellm fetches its price list otherwise
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
