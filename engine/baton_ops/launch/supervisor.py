"""Child process that is kept alive: started, watched and restarted with back-off.

 1. `start` spawns it in a process group of its own (process_group.py);
 2. `until_ready` waits for its `READY {json}` line, or for a probe of the caller's, bounded by a
    deadline;
 3. `wait` returns its exit code; `RestartBackoff` says how long to pause before the next `start`;
    `stop` ends it;
 4. `until_unresponsive` finds a process that runs and answers nothing any more.

Its output goes to a log file; `last_errors` shows the end of it when the process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from baton.server import logs
from baton.server.launch.process_group import ChildProcessGroup, cancel, describe_exit, first_of
from baton_ops.clients.instance import read_incarnation

PIPE_CHUNK = 65536
FIRST_PAUSE_SECS = 0.5
LONGEST_PAUSE_SECS = 30.0
FORGIVE_AFTER_SECS = 60.0
ROUTINE_LINE = re.compile(r"\S+Z +(INFO|DEBUG|TRACE) |READY ")
"""Lines of an engine or a router that are no complaint."""
PROGRESS_LINE = re.compile(r"\S+Z +INFO (?:rank[\d.]+: )?baton\.[\w.]+: (.*)")


HANG_PROBES = 4
"""Probes in a row without an answer before a process hangs. Each waits for a part of the limit, so
that the time in which this process itself was stopped (Ctrl-Z) counts as one."""
HANG_PROBE_PAUSE_SECS = 5.0


async def until_unresponsive(
    url: Callable[[], str], incarnation: Callable[[], str | None], limit_secs: float
) -> None:
    """Return once the process with `incarnation` has not answered GET `url` for `limit_secs`.

    Any status is an answer, and so is a refused or broken connection: a process that has ended is
    not this one's case. The answer of another process at the same address is none.
    """
    probe_secs = limit_secs / HANG_PROBES
    timeout = aiohttp.ClientTimeout(total=probe_secs)
    connector = aiohttp.TCPConnector(force_close=True)
    silent = 0
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        while silent < HANG_PROBES:
            try:
                async with session.get(url(), allow_redirects=False) as response:
                    is_own = await read_incarnation(response) == incarnation()
                silent = 0 if is_own else silent + 1
                # The other process answers at once: as long as a silent one is waited for.
                if not is_own:
                    await asyncio.sleep(probe_secs)
            except asyncio.TimeoutError:
                silent += 1
            except aiohttp.ClientError:  # refused or cut: `wait` tells whether it has ended
                silent = 0
            if not silent:
                await asyncio.sleep(min(HANG_PROBE_PAUSE_SECS, limit_secs))


class ChildFailed(Exception):
    """The process ended, or did not become ready in time. The message says which."""

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """The process's own, when it ended."""


class RestartBackoff:
    """Pauses between restarts: each twice the one before, up to a limit.

    After a long healthy life the next pause is the shortest again.
    """

    def __init__(self) -> None:
        self._next = FIRST_PAUSE_SECS

    def next_pause(self, healthy_secs: float) -> float:
        """Seconds to wait now, for a process that was healthy for `healthy_secs` before it died."""
        pause = FIRST_PAUSE_SECS if healthy_secs >= FORGIVE_AFTER_SECS else self._next
        self._next = min(LONGEST_PAUSE_SECS, pause * 2)
        return pause


class ChildProcess:
    """Supervised process.

    `argv` is asked for at every start, so that a restart can name the port it had.
    """

    def __init__(
        self, name: str, argv: Callable[[], Sequence[str]], log_path: Path, env: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log_path = log_path
        self.restarts = 0
        self.incarnation: str | None = None
        """Incarnation in its READY line; another process that answers at its address states another
        one.
        """
        self.ready_at: float | None = None
        """When the last `until_ready` succeeded (monotonic seconds); None while it is not ready."""
        self._argv = argv
        self._env = env
        self._group: ChildProcessGroup | None = None
        self._output: asyncio.Task[None] | None = None
        self._announced: asyncio.Future[dict[str, Any]] | None = None
        self._log_start = 0
        """Size of its log when it was last started."""

    @property
    def pid(self) -> int:
        return self._group.pid if self._group else 0

    async def start(self) -> None:
        """Spawn it; returns at once."""
        self.ready_at = None
        self.incarnation = None
        loop = asyncio.get_running_loop()
        self._announced = loop.create_future()
        # A pipe of our own: asyncio's would make `wait` last until every descendant has closed it.
        read_end, write_end = os.pipe()
        try:
            with os.fdopen(write_end, "wb"), self.log_path.open("ab") as log:
                self._log_start = log.tell()
                self._group = await ChildProcessGroup.spawn(
                    self._argv(), self._env, stdout=write_end, stderr=log.fileno()
                )
        except BaseException:
            os.close(read_end)
            raise
        self._output = loop.create_task(self._copy_output(read_end, self._announced))

    async def announced(self) -> dict[str, Any]:
        """Wait for the READY line; returns its JSON. The line comes from the process itself."""
        assert self._announced is not None, "start comes first"
        return await asyncio.shield(self._announced)

    async def until_ready(self, timeout_secs: float, probe: Awaitable[Any] | None = None) -> Any:
        """Wait for the READY line (returns its JSON), or for `probe` if given.

        Raises ChildFailed; kills nothing.
        """
        assert self._group is not None, "start comes first"
        ready = asyncio.ensure_future(probe if probe is not None else self.announced())
        ended = asyncio.ensure_future(self._group.wait())
        finished = await first_of(ready, ended, timeout_secs=timeout_secs)
        if ready in finished:
            self.ready_at = time.monotonic()
            return ready.result()
        if ended in finished:
            code = ended.result()
            raise ChildFailed(f"{self.name} {describe_exit(code)} before it was ready", code)
        raise ChildFailed(f"{self.name} was not ready after {timeout_secs:.0f} s")

    async def wait(self) -> int:
        """Wait for its end; returns the exit code, negative for a signal.

        The rest of its group is killed.
        """
        assert self._group is not None, "start comes first"
        code = await self._group.wait()
        if (
            self._output is not None
        ):  # bounded: a descendant that left the group may hold the pipe open
            await asyncio.wait({self._output}, timeout=1.0)
            await cancel(self._output)
        return code

    async def stop(self, grace_secs: float) -> bool:
        """SIGTERM, wait at most `grace_secs`, SIGKILL for the whole group.

        Safe to call on a dead process.

        Returns whether it ended by itself.
        """
        if self._group is None:
            return True
        has_ended = await self._group.stop(grace_secs)
        await self.wait()
        return has_ended

    def kill(self) -> None:
        """SIGKILL for the whole group, at once."""
        if self._group is not None:
            self._group.kill()

    def last_errors(self, count: int = 20) -> str:
        """The end of what it logged since its start, without lines of level INFO and below where
        there are others.
        """
        lines = self._last_lines()
        return "\n".join(
            [line for line in lines if not ROUTINE_LINE.match(line)][-count:] or lines[-1:]
        )

    def last_progress(self) -> str:
        """Newest INFO line of the log without time and logger; empty when there is none."""
        matches = (PROGRESS_LINE.match(line) for line in reversed(self._last_lines()))
        return next((match[1] for match in matches if match), "")

    def _last_lines(self) -> list[str]:
        with self.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - 64 * 1024))
            lines = log.read().decode(errors="replace").splitlines()
        return [text for line in lines for text in logs.to_text(line).splitlines()]

    async def _copy_output(self, read_end: int, announced: asyncio.Future[dict[str, Any]]) -> None:
        """Standard output → log; the first READY line also → `announced`."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0)
        )
        pending = b""
        with contextlib.closing(transport), self.log_path.open("ab", buffering=0) as log:
            while chunk := await reader.read(PIPE_CHUNK):
                log.write(chunk)
                if announced.done():
                    continue
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    ready = logs.read_ready(line.decode(errors="replace"))
                    if ready is not None and not announced.done():
                        self.incarnation = ready.get("incarnation")
                        announced.set_result(ready)
