"""The real front process with fake ranks, for tests: `with fake_engine("--dp-size", "2") as engine: engine.url`."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

FAKE_RANK = Path(__file__).with_name("fake_rank.py")
REPO = Path(__file__).parents[3]


@dataclass
class FakeEngine:
    process: subprocess.Popen[str]
    log_file: Path
    ready: dict[str, Any] = field(default_factory=dict)

    @property
    def log(self) -> str:
        """Output of the front and its ranks on stderr so far."""
        return self.log_file.read_text()

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    def ledger(self, rank: int = 0) -> dict[str, Any]:
        return dict(httpx.get(self.url + "/debug/ledger").json()["ranks"][rank])

    def last_submit(self, rank: int = 0) -> dict[str, Any]:
        return dict(self.ledger(rank)["submits"][-1])

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=60)


def spawn(
    *flags: str,
    script: dict[str, Any] | None = None,
    keepalive_secs: float = 15.0,
    grace_secs: float = 5.0,
    wrapper: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> FakeEngine:
    """Start without waiting; the caller ends it. `wrapper`: command that runs the engine's as its last arguments."""
    constants = {"keepalive_secs": keepalive_secs, "grace_secs": grace_secs}
    env = {**os.environ, **(env or {})}
    env |= {"FAKE_RANK": json.dumps(script or {}), "FRONT_CONSTANTS": json.dumps(constants)}
    env["PYTHONPATH"] = os.pathsep.join(
        [str(REPO / "engine"), str(REPO), env.get("PYTHONPATH", "")]
    )
    command = [
        *wrapper,
        sys.executable,
        "-m",
        "tests.support.processes.front",
        "--port",
        "0",
        *flags,
    ]
    handle, log_file = tempfile.mkstemp(prefix="front-", suffix=".log")
    with open(handle, "w") as log:
        process = subprocess.Popen(
            command, env=env, cwd=REPO, stdout=subprocess.PIPE, stderr=log, text=True
        )
    return FakeEngine(process, Path(log_file))


@contextlib.contextmanager
def fake_engine(*flags: str, **options: Any) -> Iterator[FakeEngine]:
    """A ready engine; ended after use if it still runs."""
    engine = spawn(*flags, **options)
    try:
        assert engine.process.stdout is not None
        line = engine.process.stdout.readline()
        assert line.startswith("READY "), engine.log
        engine.ready = json.loads(line.removeprefix("READY "))
        yield engine
    finally:
        end(engine)


def end(engine: FakeEngine) -> None:
    """Whatever state it is in: no process, pipe or file stays."""
    if engine.process.poll() is None:
        engine.process.terminate()
        try:
            engine.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            engine.process.kill()
            engine.process.wait()
    assert engine.process.stdout is not None
    engine.process.stdout.close()
    engine.log_file.unlink()


@functools.cache
def _models() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tiny-models-")


def model(**options: Any) -> str:
    """A fresh model directory without weights, removed when the tests end."""
    from tests.support.models import tiny_model

    return str(tiny_model.make(Path(tempfile.mkdtemp(dir=_models().name)), **options))


if __name__ == "__main__":
    from baton.config import parse_config
    from baton.server.http import request_handler
    from baton.server.launch.engine import run_engine
    from baton.server.response import generation

    constants = json.loads(os.environ["FRONT_CONSTANTS"])
    request_handler.KEEPALIVE_SECS = constants["keepalive_secs"]
    generation.DEADLINE_GRACE_SECS = constants["grace_secs"]

    sys.exit(run_engine(parse_config(sys.argv[1:]), (sys.executable, str(FAKE_RANK))))


def script_fields(**options: Any) -> dict[str, Any]:
    """Fields of a body that are instructions to the fake rank."""
    return {"cache_salt": json.dumps(options)}
