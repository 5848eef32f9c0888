"""Program of a process that makes and checks the grammars of a front, one at a time.

1. it reads its setup, loads what checks need, and answers that it is ready;
2. each check is passed to a child, a fork of this process, and answered with its grammar, its
   refusal or its end;
3. a check that takes too long, or that overflows the stack, ends the child. The next one gets
   another child within some milliseconds: a new process takes 0.2 s of CPU time to start;
4. the end of stdin ends both: the front has closed it, or has died.

The time of a check is CPU time, so that it does not depend on the load of the machine.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterable
from typing import IO, NoReturn

import msgspec

from baton.errors import EngineError
from baton.server.request.grammar.checks.messages import (
    TOO_DEEP_EXIT,
    CheckReply,
    CheckSetup,
    check_decoder,
    read_frame,
    read_limited_check,
    setup_decoder,
    write_frame,
)
from baton.server.request.grammar.markers import MarkerTokens
from baton.server.request.grammar.request_grammar import GrammarCheck, make_request_grammar

CHECK_STACK_BYTES = 8 * 2**20
"""llguidance recurses along rules and references that lead from one to the next, some 3 to 9 kB
each. The thread of a rank has a larger stack (`store.COMPILE_STACK_BYTES`), so that no grammar that
is accepted here overflows it there.
"""

FIRST_CHECK = GrammarCheck({"guided_json": {"type": "object"}})
"""Checked before the first fork: children have the tables that the first check makes."""


def main() -> int:
    """`worker NICENESS`"""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(int(sys.argv[1]))
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no reply
    forward_checks(sys.stdin.buffer, replies)
    return 0


def forward_checks(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Have each check answered by a child until the stream ends."""
    setup_bytes = read_frame(requests)
    if setup_bytes is None:
        return
    checker = GrammarChecker(setup_decoder.decode(setup_bytes))
    checker.answer(msgspec.json.encode(FIRST_CHECK))
    gc.freeze()  # a collection in a child would copy the pages that it shares with this process
    # Of the pipes between front and this process, a child keeps none: their end must mean the end
    # of this process.
    front_pipes = (requests.fileno(), replies.fileno())
    child = CheckerChild(checker, front_pipes)
    write_frame(replies, b"")
    while (request := read_frame(requests)) is not None:
        reply = child.check(request)
        if reply is None:
            ended = CheckReply(exit_code=child.wait())
            child = CheckerChild(checker, front_pipes)
            reply = msgspec.json.encode(ended)
        write_frame(replies, reply)


class GrammarChecker:
    """Makes and checks the grammars of a front."""

    def __init__(self, setup: CheckSetup) -> None:
        self._whitespace = setup.whitespace
        self._markers = MarkerTokens(lambda: setup.marker_ids)

    def answer(self, request: bytes | memoryview) -> CheckReply:
        """The grammar of a check, or its refusal. Another exception is a fault of this program."""
        try:
            check = check_decoder.decode(request)
            return CheckReply.of_grammar(
                make_request_grammar(check, self._whitespace, self._markers)
            )
        except EngineError as err:
            return CheckReply.of_refusal(err)
        except RecursionError:  # of Python: as where native code overflows the stack
            os._exit(TOO_DEEP_EXIT)

    def answer_all(self, requests: IO[bytes], replies: IO[bytes]) -> None:
        """Answer limited checks until the stream ends; one that exceeds its limit ends this
        process.
        """
        while (request := read_frame(requests)) is not None:
            check, cpu_secs = read_limited_check(request)
            started = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, cpu_secs)  # its signal ends the process
            reply = self.answer(check)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            reply.cpu_secs = time.process_time() - started
            write_frame(replies, msgspec.json.encode(reply))


class CheckerChild:
    """A fork of this process that answers checks. It ends with its pipe, at the latest when this
    process ends.
    """

    def __init__(self, checker: GrammarChecker, closed_files: Iterable[int]) -> None:
        """`closed_files`: descriptors that the child closes."""
        requests_read, requests_write = os.pipe()
        replies_read, replies_write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            for descriptor in (*closed_files, requests_write, replies_read):
                os.close(descriptor)
            _run_child(checker, requests_read, replies_write)
        os.close(requests_read)
        os.close(replies_write)
        self._requests = os.fdopen(requests_write, "wb")
        self._replies = os.fdopen(replies_read, "rb")

    def check(self, request: bytes) -> bytes | None:
        """The reply to a limited check; None: it has ended the child."""
        try:
            write_frame(self._requests, request)
        except BrokenPipeError:
            return None
        return read_frame(self._replies)

    def wait(self) -> int:
        """Exit code of a child that has ended, or is ending (negative: a signal)."""
        for pipe in (self._requests, self._replies):
            try:
                pipe.close()
            except BrokenPipeError:  # of what it has not read
                continue
        _, status = os.waitpid(self._pid, 0)
        return os.waitstatus_to_exitcode(status)


def _run_child(checker: GrammarChecker, requests: int, replies: int) -> NoReturn:
    """Life of a child."""
    code = 1
    try:
        threading.stack_size(CHECK_STACK_BYTES)
        streams = (os.fdopen(requests, "rb"), os.fdopen(replies, "wb"))
        thread = threading.Thread(target=checker.answer_all, args=streams)
        thread.start()
        thread.join()
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    raise SystemExit(main())
