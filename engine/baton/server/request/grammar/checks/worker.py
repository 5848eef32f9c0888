"""Program of a process that makes and checks the grammars of a front, one at a time.

1. it reads its setup and answers that it is ready;
2. each check is answered with a grammar or a refusal;
3. the end of stdin ends it: the front has closed it, or has died.

A check that takes too long, or that overflows the stack, ends with this process (`process.CheckProcess`). Its time is
CPU time, so that it does not depend on the load of the machine.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from typing import IO

import msgspec

from baton.errors import EngineError
from baton.server.request.grammar.checks.messages import (
    CHECK_CPU_SECS,
    TOO_DEEP_EXIT,
    CheckReply,
    CheckSetup,
    check_decoder,
    read_frame,
    setup_decoder,
    write_frame,
)
from baton.server.request.grammar.markers import MarkerTokens
from baton.server.request.grammar.request_grammar import make_request_grammar

CHECK_STACK_BYTES = 8 * 2**20
"""llguidance recurses along rules and references that lead from one to the next, some 3 to 9 kB each. The thread of a
rank has a larger stack (`store.COMPILE_STACK_BYTES`), so that no grammar that is accepted here overflows it there.
"""

NICENESS = 5
"""Answers in progress go before checks where cores are scarce."""


def main() -> int:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no reply
    threading.stack_size(CHECK_STACK_BYTES)
    thread = threading.Thread(target=answer_checks, args=(sys.stdin.buffer, replies))
    thread.start()
    thread.join()
    return 0


def answer_checks(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Answer each check until the stream ends."""
    setup_bytes = read_frame(requests)
    if setup_bytes is None:
        return
    setup = setup_decoder.decode(setup_bytes)
    markers = MarkerTokens(lambda: setup.marker_ids)
    write_frame(replies, b"")
    while (request := read_frame(requests)) is not None:
        signal.setitimer(signal.ITIMER_PROF, CHECK_CPU_SECS)  # its signal ends the process
        reply = answer_check(request, setup, markers)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        write_frame(replies, msgspec.json.encode(reply))


def answer_check(request: bytes, setup: CheckSetup, markers: MarkerTokens) -> CheckReply:
    """The grammar of a check, or its refusal. Another exception ends the process, with a traceback in the log."""
    try:
        check = check_decoder.decode(request)
        return CheckReply.of_grammar(make_request_grammar(check, setup.whitespace, markers))
    except EngineError as err:
        return CheckReply.of_refusal(err)
    except RecursionError:  # of Python: as where native code overflows the stack
        os._exit(TOO_DEEP_EXIT)


if __name__ == "__main__":
    raise SystemExit(main())
