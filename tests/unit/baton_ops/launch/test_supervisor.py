"""Children of `baton up`: readiness, restarts, and that none is left behind. The children are small Python scripts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.server.launch.process_group import describe_exit
from baton_ops.launch import supervisor
from baton_ops.launch.supervisor import (
    HANG_PROBES,
    ChildFailed,
    ChildProcess,
    RestartBackoff,
    until_unresponsive,
)

READY_THEN_SLEEP = (
    "print('hello'); print('READY {\"port\": 7}', flush=True); import time; time.sleep(60)"
)
IGNORES_SIGTERM = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + READY_THEN_SLEEP
)
HAS_A_CHILD = (
    "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
    "print('READY {\"pid\": %d}' % p.pid, flush=True); p.wait()"
)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


def child(tmp_path: Path, script: str) -> ChildProcess:
    return ChildProcess(
        "node 0", lambda: [sys.executable, "-c", script], tmp_path / "node.log", os.environ
    )


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_gone(pid: int) -> bool:
    try:
        psutil.Process(pid).wait(timeout=10)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return gone(pid)
    return True


def test_backoff_doubles_to_the_limit_and_forgives_a_long_life() -> None:
    backoff = RestartBackoff()
    assert [backoff.next_pause(1.0) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert backoff.next_pause(60.0) == 0.5
    assert backoff.next_pause(0.0) == 1.0


def test_exits_are_described() -> None:
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-9) == "was killed by SIGKILL"


def test_ready_line_is_read_and_all_output_logged(tmp_path: Path) -> None:
    async def work() -> None:
        node = child(tmp_path, READY_THEN_SLEEP)
        await node.start()
        assert await node.until_ready(20) == {"port": 7}
        assert node.ready_at is not None
        assert await node.stop(10)
        assert "hello" in node.last_errors()

    run(work())


def test_child_that_ends_before_it_is_ready_says_so(tmp_path: Path) -> None:
    async def work() -> None:
        node = child(tmp_path, "import sys; sys.exit('no such model')")
        await node.start()
        with pytest.raises(ChildFailed, match="node 0 exited with code 1 before it was ready"):
            await node.until_ready(20)
        assert await node.wait() == 1
        assert "no such model" in node.last_errors()

    run(work())


def test_errors_and_progress_are_read_from_the_log_since_the_last_start(tmp_path: Path) -> None:
    text = (
        "2026-11-22T15:58:28.753000Z  INFO rank0: baton.load: loading weights: 3 of 9 tensors\\n"
        "2026-11-22T15:58:29.100000Z ERROR baton.launch: no room\\nTraceback: x\\n"
        "2026-11-22T15:59:12.986000Z  INFO rank0: kv_transfer::node: link up\\n"
    )

    async def work() -> None:
        node = child(tmp_path, f"import sys; sys.stderr.write('{text}')")
        node.log_path.write_text("2026-11-22T11:00:00.000000Z ERROR baton.launch: earlier life\n")
        await node.start()
        assert await node.wait() == 0
        assert (
            node.last_errors()
            == "2026-11-22T15:58:29.100000Z ERROR baton.launch: no room\nTraceback: x"
        )
        assert node.last_progress() == "loading weights: 3 of 9 tensors"

    run(work())


def test_child_that_is_late_is_not_waited_for(tmp_path: Path) -> None:
    async def work() -> None:
        node = child(tmp_path, "import time; time.sleep(60)")
        await node.start()
        with pytest.raises(ChildFailed, match="not ready after 0 s"):
            await node.until_ready(0.05)
        assert await node.stop(10)

    run(work())


def test_stubborn_child_is_killed_after_the_grace(tmp_path: Path) -> None:
    async def work() -> None:
        node = child(tmp_path, IGNORES_SIGTERM)
        await node.start()
        await node.until_ready(20)
        pid = node.pid
        assert not await node.stop(0.1)
        assert gone(pid)

    run(work())


def test_grandchildren_end_with_the_child(tmp_path: Path) -> None:
    async def work() -> None:
        node = child(tmp_path, HAS_A_CHILD)
        await node.start()
        grandchild = (await node.until_ready(20))["pid"]
        os.kill(node.pid, signal.SIGKILL)
        assert await node.wait() == -signal.SIGKILL
        assert wait_gone(grandchild)

    run(work())


def test_restarted_child_announces_itself_again(tmp_path: Path) -> None:
    async def work() -> None:
        node = child(tmp_path, READY_THEN_SLEEP)
        pids = set()
        for _ in range(2):
            await node.start()
            await node.until_ready(20)
            pids.add(node.pid)
            node.kill()
            assert await node.wait() == -signal.SIGKILL
        assert len(pids) == 2

    run(work())


OWN, FOREIGN = "9f86d081884c7d65", "0" * 16


class SilentServer:
    """Accepts connections; answers each with its next status, and from the first None on not at all."""

    def __init__(self, *statuses: int | None, incarnation: str = OWN) -> None:
        self._body = json.dumps({"incarnation": incarnation}).encode()
        self._statuses = list(statuses)
        self.asked = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked += 1
        with contextlib.closing(writer):
            await reader.readuntil(b"\r\n\r\n")
            status = self._statuses.pop(0) if self._statuses else None
            if status is not None:
                head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(self._body)}\r\n\r\n"
                writer.write(head.encode() + self._body)
                await writer.drain()
                return
            await reader.read()  # until the client gives up


def test_process_that_answers_nothing_is_unresponsive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any status is an answer: a node that loads or drains says 503. A few silent probes are not enough."""
    monkeypatch.setattr(supervisor, "HANG_PROBE_PAUSE_SECS", 0.0)

    async def work() -> None:
        silent = SilentServer(200, 503, None, 200)
        server = await asyncio.start_server(silent.handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        await until_unresponsive(lambda: f"http://127.0.0.1:{port}/health", lambda: OWN, 0.4)
        assert silent.asked == 4 + HANG_PROBES
        server.close()

    run(work())


def test_answers_of_another_process_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program may listen at the address of a process that hangs, e.g. on its ::1."""
    monkeypatch.setattr(supervisor, "HANG_PROBE_PAUSE_SECS", 0.0)

    async def work() -> None:
        foreign = SilentServer(*[200] * 99, incarnation=FOREIGN)
        server = await asyncio.start_server(foreign.handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        await until_unresponsive(lambda: f"http://127.0.0.1:{port}/health", lambda: OWN, 0.4)
        assert foreign.asked == HANG_PROBES
        server.close()

    run(work())


def test_refused_connection_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused connection means that the process has ended, which its exit code tells."""
    asked = 0

    def url() -> str:
        nonlocal asked
        asked += 1
        if asked > 3 * HANG_PROBES:
            raise StopAsyncIteration
        return "http://127.0.0.1:1/health"

    monkeypatch.setattr(supervisor, "HANG_PROBE_PAUSE_SECS", 0.0)

    async def work() -> None:
        with pytest.raises(StopAsyncIteration):
            await until_unresponsive(url, lambda: OWN, 0.4)

    run(work())


SUPERVISOR = f"""
import asyncio, os, sys
from pathlib import Path
from baton_ops.launch.supervisor import ChildProcess

async def work():
    node = ChildProcess("node", lambda: [sys.executable, "-c", {READY_THEN_SLEEP!r}], Path(sys.argv[1]), os.environ)
    await node.start()
    await node.until_ready(20)
    print(node.pid, flush=True)
    await node.wait()

asyncio.run(work())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_children_end_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        assert not gone(pid)
        supervisor.kill()
        assert wait_gone(pid)
