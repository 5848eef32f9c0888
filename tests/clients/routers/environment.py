"""Routers of other projects in front of our nodes."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.clients.environments import python_of
from tests.support.processes.cluster import STOP_SECS, Cluster, eventually, get
from tests.support.processes.ports import reserve_port

READY_SECS = 90.0


@contextlib.contextmanager
def gateway(name: str, module: str, flags: list[str], workers: int, log: Path) -> Iterator[str]:
    """A peer's router, from ready with that many healthy workers until SIGTERM; gives its URL."""
    port = reserve_port()
    command = [str(python_of(name)), "-m", module, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(reserve_port()), "--log-level", "warn", *flags]
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
