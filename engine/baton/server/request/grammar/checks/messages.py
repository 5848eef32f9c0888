"""Messages between a front and the processes that check grammars: JSON in frames, each behind its
length.

The first frame to a process is `CheckSetup`, which it answers with an empty frame. Each further one
is a check (`GrammarCheck`) behind the CPU time that it may take, answered with one `CheckReply`.
"""

from __future__ import annotations

from typing import IO

import msgspec

from baton.errors import EngineError, by_code
from baton.server.fields import exact_decimal
from baton.server.request.grammar.request_grammar import GrammarCheck, RequestGrammar

LENGTH_BYTES = 8
LIMIT_BYTES = 4
"""Size of the CPU time that a check may take [ms]."""

TOO_DEEP_EXIT = 3
"""Exit code of a process whose check was nested too deeply for Python."""


class CheckSetup(msgspec.Struct):
    """Facts that all checks of a process share."""

    whitespace: str
    """--structured-whitespace."""
    marker_ids: dict[str, int]
    """As `MarkerTokens.ids`."""


class CheckReply(msgspec.Struct, kw_only=True):
    """The grammar, or the refusal of it, or the end of the process that checked it."""

    text: str = ""
    ignored: tuple[str, ...] = ()
    code: str | None = None
    """Code of the refusal; None: the grammar is accepted."""
    message: str = ""
    param: str | None = None
    exit_code: int | None = None
    """Exit code of the process that the check has ended (negative: a signal); None: it goes on."""
    cpu_secs: float = 0.0
    """CPU time that the check took; 0.0 where it ended its process."""

    @classmethod
    def of_grammar(cls, grammar: RequestGrammar) -> CheckReply:
        return cls(text=grammar.text, ignored=grammar.ignored)

    @classmethod
    def of_refusal(cls, err: EngineError) -> CheckReply:
        return cls(code=err.code, message=err.message, param=err.param)

    def grammar(self) -> RequestGrammar:
        """Raises the refusal."""
        if self.code is not None:
            raise by_code(self.code)(self.message, param=self.param)
        return RequestGrammar(self.text, self.ignored)


check_decoder = msgspec.json.Decoder(GrammarCheck, float_hook=exact_decimal)
reply_decoder = msgspec.json.Decoder(CheckReply)
setup_decoder = msgspec.json.Decoder(CheckSetup)


def limited_check(check: bytes, cpu_secs: float) -> bytes:
    """The frame of a check that may take so much CPU time."""
    return round(cpu_secs * 1000).to_bytes(LIMIT_BYTES, "little") + check


def read_limited_check(frame: bytes) -> tuple[memoryview, float]:
    """The check in a frame, and its CPU time [seconds]."""
    limit_ms = int.from_bytes(frame[:LIMIT_BYTES], "little")
    return memoryview(frame)[LIMIT_BYTES:], limit_ms / 1000


def write_frame(stream: IO[bytes], body: bytes) -> None:
    stream.write(len(body).to_bytes(LENGTH_BYTES, "little"))
    stream.write(body)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next frame; None at the end of the stream, also within a frame."""
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    size = int.from_bytes(head, "little")
    body = stream.read(size)
    return body if len(body) == size else None
