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
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import IO

import msgspec

from baton.errors import EngineError
from baton.server.fields import bad
from baton.server.request.grammar.checks.messages import (
    CHECK_CPU_SECS,
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
        self._is_closed = False

    def check(self, request: bytes, param: str) -> CheckReply:
        """The reply to a check (JSON of a `GrammarCheck`).

        Raises BadRequest, which names `param`, for one that takes too long or ends the process.
        """
        process = self._process or self._start()
        requests, replies = _pipes(process)
        with contextlib.suppress(BrokenPipeError):
            write_frame(requests, request)
        is_hanging = not _is_readable(replies, CHECK_LIMIT_SECS)
        reply = None if is_hanging else read_frame(replies)
        if reply is None:
            code = self._end()
            is_slow = is_hanging or code == -signal.SIGPROF
            log.warning("the check of a grammar ended its process (exit code %s): %s", code, param)
            reason = TOO_SLOW if is_slow else TOO_DEEP
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
        weakref.finalize(self, end_process, process)
        requests, replies = _pipes(process)
        with contextlib.suppress(BrokenPipeError):
            write_frame(requests, self._setup)
        is_ready = _is_readable(replies, START_LIMIT_SECS) and read_frame(replies) is not None
        if self._is_closed or not is_ready:
            self._end()
            raise EngineError("the process that checks grammars does not start; see the log")
        return process

    def _end(self) -> int | None:
        """End the process; returns its exit code, None where there is none."""
        process = self._process
        self._process = None
        return None if process is None else end_process(process)


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


def _is_readable(pipe: IO[bytes], timeout_secs: float) -> bool:
    """Wait until there is something to read, or the end."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(timeout_secs * 1000))
