"""A tensor-parallel group for tests: the first rank in this process, the others in helpers that are started once.

    with helpers.engine(path, tp_size=2) as engine: answer(engine, prompts, greedy(8))

A helper (`python -m tests.support.tp_team`) follows as the real process does
(server.worker.tensor_parallel.process.follow), engine after engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq

from baton.config import EngineConfig, build
from baton.layers import collectives
from baton.runtime.build import LoadedModel
from baton.runtime.engine_loop import EngineLoop
from baton.server.worker.tensor_parallel import channel
from baton.server.worker.tensor_parallel.process import run_leader, run_worker
from tests.support.engine_run import FLAGS
from tests.support.front import REPO


def show_nothing(loaded: int, total: int) -> None:
    """Ignore progress of loading."""


class Helpers:
    """Up to `count` followers."""

    def __init__(self, count: int) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.tp_team"],
                cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for _ in range(count)
        ]  # fmt: skip
        self.said: list[str] = []
        """How the followers of the last engine ended: 'stopped', or an error."""

    @contextlib.contextmanager
    def engine(
        self,
        path: Path | str,
        tp_size: int,
        *,
        touch: Callable[[LoadedModel], None] = lambda _: None,
        **flags: object,
    ) -> Iterator[EngineLoop]:
        """An engine of `tp_size` ranks. `touch` sees the first rank's part before the engine is made of it."""
        config = build({"model_path": str(path), "tp_size": tp_size, **FLAGS, **flags})
        with tempfile.TemporaryDirectory() as folder:
            followers = self._processes[: tp_size - 1]
            for tp_rank, process in enumerate(followers, 1):
                job = {
                    "config": dataclasses.asdict(config),
                    "tp_rank": tp_rank,
                    "folder": folder,
                    "dp_rank": 0,
                }
                assert process.stdin is not None
                process.stdin.write(json.dumps(job) + "\n")
                process.stdin.flush()
            context: zmq.Context[Any] = zmq.Context()
            try:
                team = channel.TpGroup(0, tp_size, Path(folder), 0)
                loaded, orders = run_leader(config, team, context, show_nothing)
                touch(loaded)
                engine = loaded.engine()
                try:
                    yield engine
                finally:
                    engine.close()
                    orders.stop()
            finally:
                collectives.leave()
                context.destroy(linger=1000)
                self.said = [
                    str(json.loads(p.stdout.readline())) for p in followers if p.stdout is not None
                ]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


def main() -> None:
    context: zmq.Context[Any] = zmq.Context()
    for line in sys.stdin:
        job = json.loads(line)
        config = EngineConfig(**job["config"])
        try:
            team = channel.TpGroup(job["tp_rank"], config.tp_size, Path(job["folder"]), 0)
            run_worker(config, team, context, None, show_nothing)
            said = "stopped"
        except Exception as err:  # noqa: BLE001 - the test asks for it
            collectives.leave()
            said = f"{type(err).__name__}: {err}"
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
