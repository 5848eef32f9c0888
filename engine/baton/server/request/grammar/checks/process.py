"""A process that checks grammars, as the front sees it.

1. the first check starts it;
2. a check that takes more than `CHECK_CPU_SECS` ends it, and so does one that overflows its stack: the request is
   refused, and the next check starts another process;
3. `close` ends it, and so does the end of this object.

A process, and not a thread: parts of a check hold Python's lock for 40 ms per MB of schema, a translation from EBNF may
take minutes, and chains of some thousand rules or references overflow the stack.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import IO

import msgspec

from baton.errors import EngineError
from baton.server.fields import bad
from baton.server.request.grammar.checks.messages import (
    CHECK_CPU_SECS,
    TOO_DEEP_EXIT,
    CheckReply,
    CheckSetup,
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
TOO_SLOW = f"was not checked within {CHECK_CPU_SECS:g} s"
TOO_DEEP = (
    "cannot be checked: its rules or references are nested too deeply, or it needs too much memory"
)
WORKER = "baton.server.request.grammar.checks.worker"


class CheckProcess:
    """All methods but `close` are called from one thread, which waits in them without Python's lock."""

    def __init__(self, load_setup: Callable[[], CheckSetup]) -> None:
        """`load_setup`: called before the first start."""
        self._load_setup = load_setup
        self._setup: bytes | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: weakref.finalize[..., CheckProcess] | None = None
        """Ends the process, at the latest with this object."""
        self._is_closed = False

    def check(self, request: bytes, param: str) -> CheckReply:
        """The reply to a check (JSON of a `GrammarCheck`).

        Raises BadRequest, which names `param`, for one that takes too long or ends the process, and EngineError where
        the process fails or is closed.
        """
        process = self._process or self._start()
        started = time.monotonic()
        with kill_after(process, CHECK_LIMIT_SECS):
            reply = exchange(process, request)
        if reply is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_LIMIT_SECS)  # for an exit code of its own
            code = self._end()
            is_late = time.monotonic() - started >= CHECK_LIMIT_SECS
            log.warning("the check of a grammar ended its process (exit code %s): %s", code, param)
            if code is None or (code >= 0 and code != TOO_DEEP_EXIT):
                raise EngineError("the process that checks grammars has ended; see the log")
            reason = TOO_SLOW if is_late or code == -signal.SIGPROF else TOO_DEEP
            raise bad(param, f"{reason}; simplify it")
        return reply_decoder.decode(reply)

    def close(self) -> None:
        self._is_closed = True
        self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        """Raises EngineError where no process can be started."""
        if self._setup is None:
            self._setup = msgspec.json.encode(self._load_setup())
        # A session of its own: Ctrl-C in the terminal reaches the front alone.
        process = subprocess.Popen(
            [sys.executable, "-m", WORKER],
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
    timer = threading.Timer(limit_secs, process.kill)
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


def end_process(process: subprocess.Popen[bytes]) -> int:
    """Kill a process and close its pipes; returns its exit code."""
    process.kill()
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
