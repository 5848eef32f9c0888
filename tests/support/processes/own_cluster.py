"""A router and engines as processes of a test's own, each of which can be killed and started again where the test says.

The router reads its workers from a discovery file, so that a node may come back at another address.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.server.logs import read_ready
from tests.support.processes.cluster import Cluster, eventually, get

READY_SECS = 120.0
_ROUTER_LISTENS = "listening on http://"


@dataclass
class Member:
    """A process of the cluster."""

    name: str
    role: str
    flags: Sequence[str]
    log: Path
    process: subprocess.Popen[bytes]
    ready: dict[str, Any]

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def bootstrap_port(self) -> int:
        return int(self.ready.get("bootstrap_port") or 0)

    def kill(self) -> None:
        """SIGKILL, front and ranks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class OwnCluster(Cluster):
    """Asks and checks as Cluster does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.members: dict[str, Member] = {}
        self._discovery = folder / "workers.json"
        self._starts = 0

    @classmethod
    @contextlib.contextmanager
    def empty(cls) -> Iterator[OwnCluster]:
        with tempfile.TemporaryDirectory(prefix="baton-own-") as name:
            cluster = cls(Path(name))
            try:
                yield cluster
            except BaseException:
                cluster.print_logs()
                raise
            finally:
                for member in cluster.members.values():
                    member.kill()

    @property
    def state(self) -> dict[str, Any]:
        nodes = [
            {"role": member.role, "url": member.url, "pid": member.process.pid, "name": name}
            for name, member in self.members.items()
            if member.role != "router"
        ]
        router = self.members["router"]
        return {"router": {"url": router.url, "pid": router.process.pid}, "nodes": nodes}

    def start_engines(self, engines: dict[str, tuple[str, Sequence[str]]]) -> None:
        """Start engines by name, (role, flags) each, all at once, and wait until they are ready."""
        for name, (role, flags) in engines.items():
            self.members[name] = self._spawn_engine(name, role, flags, port=0, bootstrap_port=0)
        for name in engines:
            self._await_ready(self.members[name])
        self._write_discovery()

    def start_router(self, *flags: str, port: int = 0) -> None:
        command = [
            "router", "--host", "127.0.0.1", "--port", str(port), "--pd-disaggregation",
            "--discovery-file", str(self._discovery), *flags,
        ]  # fmt: skip
        member = self._spawn("router", "router", command, flags)
        self.members["router"] = member
        eventually("the router listens", lambda: self._read_address(member), 30)
        workers = len(self.members) - 1
        eventually("the router has all workers", lambda: len(self.ready()) == workers, 60)

    def restart(self, name: str, *, same_address: bool) -> None:
        """Start a member again, whose process has ended."""
        old = self.members[name]
        port = old.port if same_address else 0
        if old.role == "router":
            self.start_router(*old.flags, port=port)
            return
        bootstrap_port = old.bootstrap_port if same_address else 0
        member = self._spawn_engine(name, old.role, old.flags, port, bootstrap_port)
        self.members[name] = member
        self._await_ready(member)
        self._write_discovery()

    def print_logs(self) -> None:
        for log in sorted(self.folder.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}")

    def _spawn_engine(
        self, name: str, role: str, flags: Sequence[str], port: int, bootstrap_port: int
    ) -> Member:
        command = [
            "engine", "--port", str(port), "--disaggregation-mode", role, "--log-level", "warning",
        ]  # fmt: skip
        if role == "prefill":
            command += ["--disaggregation-bootstrap-port", str(bootstrap_port)]
        return self._spawn(name, role, [*command, *flags], flags)

    def _spawn(self, name: str, role: str, command: Sequence[str], flags: Sequence[str]) -> Member:
        self._starts += 1
        log = self.folder / f"{self._starts:03d}-{name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "baton_ops.cli", *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Member(name, role, flags, log, process, {})

    def _await_ready(self, member: Member) -> None:
        def announced() -> bool:
            assert member.process.poll() is None, member.log.read_text(errors="replace")
            for line in member.log.read_text(errors="replace").splitlines():
                if (ready := read_ready(line)) is not None:
                    member.ready = ready
                    return True
            return False

        eventually(f"{member.name} is ready", announced, READY_SECS)

    def _read_address(self, member: Member) -> bool:
        text = member.log.read_text(errors="replace")
        assert member.process.poll() is None, text
        _, found, rest = text.partition(_ROUTER_LISTENS)
        if found:
            member.ready = {"url": f"http://{rest.split()[0]}"}
        return bool(found)

    def _write_discovery(self) -> None:
        workers = [
            {"url": member.url, "role": member.role}
            | ({"bootstrap_port": member.bootstrap_port} if member.role == "prefill" else {})
            for member in self.members.values()
            if member.role != "router"
        ]
        new = self._discovery.with_suffix(".new")
        new.write_text(json.dumps(workers))
        new.replace(self._discovery)


def rooms_of(url: str) -> list[dict[str, Any]]:
    """Live rooms of an engine."""
    ranks = json.loads(get(f"{url}/debug/rooms") or '{"ranks": []}')["ranks"]
    return [room for rank in ranks for room in rank["rooms"]["live"]]


def seconds_until(what: str, look: Any, secs: float = 120.0) -> float:
    """How long it took until `look` was true."""
    started = time.monotonic()
    eventually(what, look, secs)
    return time.monotonic() - started
