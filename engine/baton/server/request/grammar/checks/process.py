"""A process that checks grammars, as the front sees it.

1. the first check starts it;
2. a check that takes more CPU time than it may ends a child of it, and so does one that overflows
   the stack; the next check goes on without a new start (`worker`);
3. a check that is not answered within `CHECK_LIMIT_SECS` ends it: the next check starts another
   process;
4. `close` ends it, and so does the end of this object.

A process, and not a thread: parts of a check hold Python's lock for 40 ms per MB of schema, a
translation from EBNF may take minutes, and chains of some thousand rules or references overflow the
stack.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import IO, NoReturn

import msgspec

from baton.errors import EngineError
from baton.server.fields import bad
from baton.server.request.grammar.checks.messages import (
    TOO_DEEP_EXIT,
    CheckReply,
    CheckSetup,
    limited_check,
    read_frame,
    reply_decoder,
    write_frame,
)

log = logging.getLogger("baton.grammar")

CHECK_LIMIT_SECS = 30.0
"""For a process that hangs, or gets no CPU time."""
START_LIMIT_SECS = 60.0
"""A start takes 0.2 s of CPU time."""
EXIT_LIMIT_SECS = 5.0
"""Between the end of a process's pipe and its own."""
TOO_SLOW = f"was not checked within {CHECK_LIMIT_SECS:g} s"
TOO_DEEP = (
    "cannot be checked: its rules or references are nested too deeply, or it needs too much memory"
)
WORKER = "baton.server.request.grammar.checks.worker"


class SlowCheck(Exception):
    """A check took more CPU time than it may."""


class CheckProcess:
    """All methods but `close` are called from one thread at a time, which waits in them without
    Python's lock.
    """

    def __init__(self, load_setup: Callable[[], CheckSetup], niceness: int = 0) -> None:
        """`load_setup`: called before the first start."""
        self._load_setup = load_setup
        self._niceness = niceness
        self._setup: bytes | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: weakref.finalize[..., CheckProcess] | None = None
        """Ends the process, at the latest with this object."""
        self._is_closed = False

    def check(self, request: bytes, param: str, cpu_secs: float) -> CheckReply:
        """The reply to a check (JSON of a `GrammarCheck`).

        Raises SlowCheck for one that takes more than `cpu_secs`, BadRequest, which names `param`,
        for one that overflows the stack or is not answered, and EngineError where the process fails
        or is closed.
        """
        process = self._process or self._start()
        started = time.monotonic()
        with kill_after(process, CHECK_LIMIT_SECS):
            answer = exchange(process, limited_check(request, cpu_secs))
        if answer is None:
            self._end_without_answer(process, param, time.monotonic() - started)
        reply = reply_decoder.decode(answer)
        code = reply.exit_code
        if code is None:
            return reply
        if code == -signal.SIGPROF:
            raise SlowCheck
        log.warning("the check of a grammar ended its process (exit code %s): %s", code, param)
        if code >= 0 and code != TOO_DEEP_EXIT:
            raise EngineError("the process that checks grammars has ended; see the log")
        raise bad(param, f"{TOO_DEEP}; simplify it")

    def _end_without_answer(
        self, process: subprocess.Popen[bytes], param: str, waited_secs: float
    ) -> NoReturn:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_LIMIT_SECS)  # for an exit code of its own
        code = self._end()
        log.warning("no answer to the check of a grammar (exit code %s): %s", code, param)
        if code is not None and waited_secs >= CHECK_LIMIT_SECS:
            raise bad(param, f"{TOO_SLOW}; simplify it")
        raise EngineError("the process that checks grammars has ended; see the log")

    def close(self) -> None:
        self._is_closed = True
        self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        """Raises EngineError where no process can be started."""
        if self._setup is None:
            self._setup = msgspec.json.encode(self._load_setup())
        # A session of its own: Ctrl-C in the terminal reaches the front alone.
        process = subprocess.Popen(
            [sys.executable, "-m", WORKER, str(self._niceness)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._process = process
        self._ending = weakref.finalize(self, end_process, process)
        with kill_after(process, START_LIMIT_SECS):
            ready = exchange(process, self._setup)
        if self._is_closed or ready is None:
            self._end()
            raise EngineError("the process that checks grammars does not start; see the log")
        return process

    def _end(self) -> int | None:
        """End the process; returns its exit code, None where `close` has ended it."""
        ending = self._ending
        self._process = None
        self._ending = None
        return None if ending is None else ending()


@contextlib.contextmanager
def kill_after(process: subprocess.Popen[bytes], limit_secs: float) -> Iterator[None]:
    """Kill a process that is still waited for then: its pipes end, and with them the wait."""
    timer = threading.Timer(limit_secs, kill_group, (process,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def exchange(process: subprocess.Popen[bytes], request: bytes) -> bytes | None:
    """Send a frame and wait for the next one; None: the process has ended."""
    requests, replies = _pipes(process)
    with contextlib.suppress(BrokenPipeError):
        write_frame(requests, request)
    return read_frame(replies)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads its session, and its child. Of one that has ended, the child ends
    by itself.
    """
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):  # another thread has just reaped it
            os.killpg(process.pid, signal.SIGKILL)


def end_process(process: subprocess.Popen[bytes]) -> int:
    """Kill a process and its child, and close its pipes; returns its exit code."""
    kill_group(process)
    code = process.wait()
    for pipe in _pipes(process):
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
    return code


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    """Requests and replies of a process."""
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout
