"""Routers before a fleet of simulated engines, for the routing benchmarks: real processes, real HTTP, modeled steps.

The fleet is started once; each arm gets a fresh router before it, and engines with empty caches. Peers are the wheels
that tests/clients/setup.sh installs; an arm whose wheel is missing is left out and named.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from baton_ops.launch.supervisor import ChildProcess
from tests.support.processes.ports import reserve_port

REPO = Path(__file__).parents[3]
READY_SECS = 120.0
STOP_SECS = 10.0
PEERS = {"sglang-router": "sglang_router.launch_router", "smg": "smg.launch_router"}


@dataclass(frozen=True, slots=True)
class Node:
    role: str
    url: str
    bootstrap_port: int


@dataclass(frozen=True, slots=True)
class Arm:
    """A router to measure: `flags` beside those that name host, port and workers."""

    name: str
    flags: tuple[str, ...]
    peer: str | None = None

    @property
    def is_installed(self) -> bool:
        return self.peer is None or (REPO / ".venv-peers" / self.peer / ".installed").exists()


@contextlib.asynccontextmanager
async def clients(timeout_secs: float) -> AsyncIterator[aiohttp.ClientSession]:
    """A session that opens a connection per request.

    On a kept-alive one sglang-router 0.3.2 holds the first event for 41 ms (Nagle's algorithm and delayed
    acknowledgements, as it looks), which at a simulated speed above 1 would be mistaken for its choice of workers.
    """
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=timeout_secs)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session


def installed(arms: Sequence[Arm]) -> list[Arm]:
    """Those that can run; the others are named."""
    for arm in arms:
        if not arm.is_installed:
            print(
                f"{arm.name}: not installed, left out; tests/clients/setup.sh installs it",
                file=sys.stderr,
            )
    return [arm for arm in arms if arm.is_installed]


@dataclass
class Fleet:
    """Simulated engines. Use `Fleet.start`."""

    log_dir: Path
    nodes: list[Node] = field(default_factory=list)

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls, log_dir: Path, roles: dict[str, int], flags: Mapping[str, Sequence[str]]
    ) -> AsyncIterator[Fleet]:
        """`roles`: how many of `worker`, `prefill`, `decode`; `flags` for each role's engines."""
        fleet = cls(log_dir)
        async with contextlib.AsyncExitStack() as stack:
            children = []
            for role, count in roles.items():
                for number in range(count):
                    argv = [
                        sys.executable,
                        "-m",
                        "baton_ops.cli",
                        "engine",
                        "--port",
                        "0",
                        "--log-level",
                        "warning",
                    ]
                    argv += ["--disaggregation-mode", "null" if role == "worker" else role]
                    argv += ["--disaggregation-bootstrap-port", "0"] if role == "prefill" else []
                    child = _child(f"{role}-{number}", [*argv, *flags[role]], log_dir)
                    stack.push_async_callback(child.stop, STOP_SECS)
                    await child.start()
                    children.append((role, child))
            for role, child in children:
                ready = await child.until_ready(READY_SECS)
                fleet.nodes.append(Node(role, ready["url"], int(ready.get("bootstrap_port") or 0)))
            yield fleet

    def urls(self, role: str) -> list[str]:
        return [node.url for node in self.nodes if node.role == role]

    async def flush(self, session: aiohttp.ClientSession) -> None:
        """Empty every cache. Requests of the arm before may still be ending."""
        for node in self.nodes:
            for _ in range(100):
                async with session.post(f"{node.url}/flush_cache") as response:
                    if response.status == 200:
                        break
                await asyncio.sleep(0.2)
            else:
                raise RuntimeError(f"{node.url} does not become idle")

    @contextlib.asynccontextmanager
    async def router(
        self, arm: Arm, session: aiohttp.ClientSession
    ) -> AsyncIterator[tuple[str, int]]:
        """`arm`'s router before the fleet, from ready until stopped: its URL and pid."""
        port = reserve_port()
        argv = [sys.executable, "-m", "baton_ops.cli", "router"]
        if arm.peer is not None:
            python = REPO / ".venv-peers" / arm.peer / "bin" / "python"
            argv = [str(python), "-m", PEERS[arm.peer], "--prometheus-port", str(reserve_port())]
        argv += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warn", *arm.flags]
        if workers := self.urls("worker"):
            argv += ["--worker-urls", *workers]
        else:
            argv += ["--pd-disaggregation"]
            for node in self.nodes:
                argv += [f"--{node.role}", node.url] + (
                    [str(node.bootstrap_port)] if node.role == "prefill" else []
                )
        child = _child(f"router-{arm.name.replace(' ', '-')}", argv, self.log_dir)
        url = f"http://127.0.0.1:{port}"
        await child.start()
        try:
            await child.until_ready(READY_SECS, _healthy(session, url, arm, len(self.nodes)))
            yield url, child.pid
        finally:
            await child.stop(STOP_SECS)


def _child(name: str, argv: Sequence[str], log_dir: Path) -> ChildProcess:
    path = os.pathsep.join([str(REPO / "engine"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return ChildProcess(
        name, lambda: argv, log_dir / f"{name}.log", {**os.environ, "PYTHONPATH": path}
    )


async def _healthy(session: aiohttp.ClientSession, url: str, arm: Arm, nodes: int) -> None:
    """Until the router answers for every node; the caller bounds the wait."""
    while True:
        with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, ValueError):
            if arm.peer is None:
                async with session.get(f"{url}/workers") as response:
                    workers = (await response.json())["workers"]
                    if (
                        len({w["url"].partition("@")[0] for w in workers if w.get("is_healthy")})
                        == nodes
                    ):
                        return
            else:
                async with session.get(f"{url}/readiness") as response:
                    state = await response.json(content_type=None)
                    if state.get("status") == "ready" and state.get("healthy_workers", 0) >= nodes:
                        return
        await asyncio.sleep(0.1)


def machine() -> str:
    """Machine and commit, for the head of a table of results."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, {platform.machine()}, Python {platform.python_version()}, commit {commit.stdout.strip()}"
