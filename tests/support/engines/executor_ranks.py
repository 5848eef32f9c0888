"""A tensor-parallel group for tests: TP rank 0 in this process, the executor ranks in processes started once.

    with executors.engine(path, tp_size=2) as engine: answer(engine, prompts, greedy(8))

An executor rank (`python -m tests.support.engines.executor_ranks`) executes steps as the real process does
(server.worker.tensor_parallel.process.run_executor), engine after engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq

from baton.config import EngineConfig, build_config
from baton.layers import collectives
from baton.runtime.build import LoadedModel
from baton.runtime.engine_loop import EngineLoop
from baton.server.worker.tensor_parallel import channel
from baton.server.worker.tensor_parallel.process import load_first_rank, run_executor
from tests.support.engines.engine_run import FLAGS
from tests.support.processes.front import REPO


def show_nothing(loaded: int, total: int) -> None:
    """Ignore progress of loading."""


class ExecutorProcesses:
    """Processes of up to `count` executor ranks."""

    def __init__(self, count: int) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.engines.executor_ranks"],
                cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for _ in range(count)
        ]  # fmt: skip
        self.endings: list[str] = []
        """Per executor rank of the last engine: 'stopped', or its error."""

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
        config = build_config({"model_path": str(path), "tp_size": tp_size, **FLAGS, **flags})
        with tempfile.TemporaryDirectory() as folder:
            executors = self._processes[: tp_size - 1]
            for tp_rank, process in enumerate(executors, 1):
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
                group = channel.TpGroup(0, tp_size, Path(folder), 0)
                loaded, orders = load_first_rank(config, group, context, show_nothing)
                touch(loaded)
                engine = loaded.make_engine_loop()
                try:
                    yield engine
                finally:
                    engine.close()
                    orders.stop()
            finally:
                collectives.leave_group()
                context.destroy(linger=1000)
                self.endings = [
                    str(json.loads(p.stdout.readline())) for p in executors if p.stdout is not None
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
            group = channel.TpGroup(job["tp_rank"], config.tp_size, Path(job["folder"]), 0)
            run_executor(config, group, context, None, show_nothing)
            ending = "stopped"
        except Exception as err:  # noqa: BLE001 - the test asks for it
            collectives.leave_group()
            ending = f"{type(err).__name__}: {err}"
        # Frames of the error hold the group in a cycle. Its sockets close with it, and until then
        # the first rank would wait for --dist-timeout.
        gc.collect()
        print(json.dumps(ending), flush=True)


if __name__ == "__main__":
    main()
