"""A child process with all that it starts, in a session of its own: they end together, and by the
kernel when we die.

1. `spawn` starts it; on Linux a signal reaches it even if we are killed;
2. `wait` returns its exit code and kills what it left behind;
3. `stop` asks (SIGTERM), waits a bounded time, then kills the whole group.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

PR_SET_PDEATHSIG = 1


def describe_exit(code: int) -> str:
    """'exited with code 1', 'was killed by SIGKILL'."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


class ChildProcessGroup:
    """Running child and its descendants; `wait` or `stop` it always."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._is_swept = False
        """Nothing of the group is left: its id may belong to another process by now."""

    @classmethod
    async def spawn(
        cls,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        stdout: int,
        stderr: int | None = None,
        stdin: bytes = b"",
        death_signal: signal.Signals = signal.SIGTERM,
    ) -> ChildProcessGroup:
        """`stdout`, `stderr`: file descriptors; `stdin`: all it can read there; `death_signal`:
        sent when we die.
        """
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=dict(env),
            # a Ctrl-C in the terminal reaches us alone: we stop children in order
            start_new_session=True,
            preexec_fn=_die_with_parent(os.getpid(), death_signal)
            if sys.platform == "linux"
            else None,
        )
        if process.stdin is not None:
            process.stdin.write(stdin)
            with contextlib.suppress(ConnectionError):  # it has died already, which `wait` reports
                await process.stdin.drain()
            process.stdin.close()
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Wait for the child's end; returns its exit code, negative for a signal. The rest of its
        group is killed.
        """
        code = await self._process.wait()
        self.kill()
        self._is_swept = True
        return code

    async def stop(self, grace_secs: float) -> bool:
        """SIGTERM, wait at most `grace_secs`, SIGKILL for the group. Returns whether the child
        ended by itself.
        """
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_secs)
        has_ended = self._process.returncode is not None
        self.kill()
        await self.wait()
        return has_ended

    def kill(self) -> None:
        """SIGKILL for the child and its group, which outlives it."""
        if not self._is_swept:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def first_of(
    *works: Awaitable[Any],
    timeout_secs: float | None = None,
    return_when: str = asyncio.FIRST_COMPLETED,
) -> set[asyncio.Future[Any]]:
    """Wait until the first of these ends, or as `return_when` says (asyncio.wait), and cancel the
    others.

    Returns those that have ended, none after `timeout_secs`. Raises their failure.
    """
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(work) for work in works]
    done: set[asyncio.Future[Any]]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout_secs, return_when=return_when)
        for task in done:
            task.result()
        return done
    finally:
        await cancel(*tasks)


def _die_with_parent(parent: int, number: signal.Signals) -> Callable[[], None]:
    """For the moment between fork and exec: the kernel sends the signal when `parent` dies, however
    it dies.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # it died before prctl
            os._exit(1)

    return prepare
