"""The real front process with fake ranks, for tests: `with fake_engine("--dp-size", "2") as engine: engine.url`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

FAKE_RANK = Path(__file__).with_name("fake_rank.py")
REPO = Path(__file__).parents[2]


@dataclass
class FakeEngine:
    process: subprocess.Popen[str]
    ready: dict[str, Any] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    def ledger(self, rank: int = 0) -> dict[str, Any]:
        return dict(httpx.get(self.url + "/debug/ledger").json()["ranks"][rank])

    def last_submit(self, rank: int = 0) -> dict[str, Any]:
        return dict(self.ledger(rank)["submits"][-1])

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=20)


def spawn(*flags: str, script: dict[str, Any] | None = None) -> FakeEngine:
    """Start without waiting. stderr is collected in `log`."""
    env = {**os.environ, "FAKE_RANK": json.dumps(script or {})}
    env["PYTHONPATH"] = os.pathsep.join([str(REPO / "engine"), str(REPO), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.support.front", "--port", "0", *flags]
    process = subprocess.Popen(command, env=env, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    engine = FakeEngine(process)
    threading.Thread(target=_collect, args=(engine,), daemon=True).start()
    return engine


def _collect(engine: FakeEngine) -> None:
    assert engine.process.stderr is not None
    engine.log.extend(iter(engine.process.stderr.readline, ""))


@contextlib.contextmanager
def fake_engine(*flags: str, script: dict[str, Any] | None = None) -> Iterator[FakeEngine]:
    """A ready engine; killed at the end if it still runs."""
    engine = spawn(*flags, script=script)
    try:
        assert engine.process.stdout is not None
        line = engine.process.stdout.readline()
        assert line.startswith("READY "), "".join(engine.log)
        engine.ready = json.loads(line.removeprefix("READY "))
        yield engine
    finally:
        if engine.process.poll() is None:
            engine.process.terminate()
            try:
                engine.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                engine.process.kill()
                engine.process.wait()
        assert engine.process.stdout is not None
        engine.process.stdout.close()


def model(**options: Any) -> str:
    """A fresh model directory without weights."""
    from tests.support import tiny_model

    return str(tiny_model.make(Path(tempfile.mkdtemp(prefix="tiny-model-")), **options))


if __name__ == "__main__":
    from baton.config import parse
    from baton.server.launch import run_engine

    sys.exit(run_engine(parse(sys.argv[1:]), (sys.executable, str(FAKE_RANK))))
