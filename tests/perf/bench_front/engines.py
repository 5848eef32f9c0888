"""Engines without a model, of one source tree or of two that take turns."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from baton_ops.launch.supervisor import ChildFailed, ChildProcess
from tests.perf.processes.fleet import READY_SECS, REPO, STOP_SECS

CLIENT_SECS = 600.0
CONTEXT_LENGTH = 131_072


@dataclass(frozen=True, slots=True)
class SourceTree:
    """A checkout whose engine is measured, with the native extension built in it."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class RunningEngine:
    tree: SourceTree
    pid: int
    """Process id of the front."""
    host: str
    port: int

    async def measure(self, job: dict[str, Any]) -> dict[str, float]:
        """Run the client's `job` on this engine. Raises RuntimeError with the client's last line."""
        client = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.perf.bench_front.client",
            cwd=REPO,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        target = {"pid": self.pid, "host": self.host, "port": self.port}
        text = json.dumps({**job, **target}).encode()
        try:
            out, errors = await asyncio.wait_for(client.communicate(text), CLIENT_SECS)
        finally:
            if client.returncode is None:
                client.kill()
        if client.returncode != 0:
            reason = errors.decode().strip()[-500:]
            raise RuntimeError(f"{self.tree.name}, {job['measure']}: {reason}")
        found: dict[str, float] = json.loads(out)
        return found


def device(step_ms: float) -> str:
    """A device whose every step takes as long, whatever is in it."""
    return f"reference,step_ms={step_ms:g},weights_ms=0,token_us=0,attention_ns=0,kv_read_ns=0"


@contextlib.asynccontextmanager
async def start_engines(
    trees: list[SourceTree], *, tokenizer: Path, step_ms: float, log_dir: Path
) -> AsyncIterator[list[RunningEngine]]:
    """Run one engine per tree side by side; the one that is not measured is idle."""
    flags = [
        "--simulate", device(step_ms), "--tokenizer-path", str(tokenizer), "--port", "0",
        "--served-model-name", "bench", "--context-length", str(CONTEXT_LENGTH), "--max-queued-requests", "1024",
    ]  # fmt: skip
    async with contextlib.AsyncExitStack() as stack:
        children = []
        for tree in trees:
            path = os.pathsep.join([str(tree.path / "engine"), str(tree.path)])
            argv = [sys.executable, "-m", "baton_ops.cli", "engine", *flags]
            child = ChildProcess(
                tree.name,
                lambda argv=argv: argv,
                log_dir / f"{tree.name}.log",
                {**os.environ, "PYTHONPATH": path},
            )
            stack.push_async_callback(child.stop, STOP_SECS)
            await child.start()
            children.append(child)
        engines = []
        for tree, child in zip(trees, children, strict=True):
            try:
                ready = await child.until_ready(READY_SECS)
            except ChildFailed as err:
                raise RuntimeError(f"{err}: {child.last_errors()}") from err
            url = urlsplit(ready["url"])
            engines.append(RunningEngine(tree, ready["pid"], str(url.hostname), int(url.port or 0)))
        yield engines
