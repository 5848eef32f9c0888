"""A server of another make, as a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import baton.models
from tests.clients.environments import clean_environment, python_of
from tests.support.processes.cluster import STOP_SECS, eventually, get
from tests.support.processes.ports import reserve_port

NAME = "transformers-serve"
MODEL = "demo"
"""Name of the model: its folder, as seen from the server's working directory."""
MODELS = Path(baton.models.__file__).parent
SCRIPT = Path(__file__).with_name("serve_transformers.py")
START_SECS = 240.0


@dataclass(frozen=True, slots=True)
class ChatServer:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_SECS)


@contextlib.contextmanager
def chat_server(log: Path, *lacking: str) -> Iterator[ChatServer]:
    """The server from ready until it is killed. `lacking`: paths that it answers with 404."""
    port = reserve_port()
    command = [str(python_of(NAME)), str(SCRIPT), MODEL, str(port), *lacking]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=MODELS,
            env=clean_environment(HF_HOME=str(log.parent)),
        )
    url = f"http://127.0.0.1:{port}"
    server = ChatServer(url, process, log)

    def is_ready() -> bool:
        assert process.poll() is None, f"{NAME} ended:\n{server.log_text()[-3000:]}"
        return get(f"{url}/health") is not None

    try:
        eventually(f"{NAME} is ready", is_ready, START_SECS)
        yield server
    finally:
        server.kill()
