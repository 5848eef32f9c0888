"""A file of lines that may never make its writer wait: decision log and scheduler trace.

A thread writes; between it and the scheduler is a bounded queue. When the disk cannot keep up,
lines are dropped and counted. A log goes on after a gap and starts a new file at `limit_bytes`,
keeping the one before as FILE.1. A trace is worth nothing with a gap, so it ends there, and at
`limit_bytes`.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton.config.files import refuse_unwritable_kinds
from baton.errors import ConfigError

log = logging.getLogger("baton.rank")

QUEUED_LINES = 8192
LOG_BYTES = 64 * 2**20
"""Size of a decision log: about 200 000 steps."""
TRACE_BYTES = 2**30


class LogFile:
    def __init__(
        self,
        flag: str,
        path: str,
        render: Callable[[Any], str],
        limit_bytes: int,
        *,
        must_be_whole: bool = False,
    ) -> None:
        """`render` makes a line of what `put` gets, on the writing thread. Raises ConfigError."""
        self.dropped = 0
        self._path = Path(path)
        self._render = render
        self._limit = limit_bytes
        self._whole = must_be_whole
        self._ended = False
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        try:
            refuse_unwritable_kinds(self._path)
            self._file = self._path.open("w" if must_be_whole else "a", encoding="utf-8")
        except OSError as err:
            raise ConfigError(
                f"{flag} {path}: {err.strerror}; give a file in a directory that can be written"
            ) from err
        self._size = self._file.tell()
        self._thread = threading.Thread(
            target=self._run, name=f"log {self._path.name}", daemon=True
        )
        self._thread.start()

    def put(self, item: Any) -> None:
        """Hand over one item (not None); never waits."""
        if self._ended or self._queue.qsize() >= QUEUED_LINES:
            self.dropped += 1
            self._ended = self._whole
        else:
            self._queue.put(item)

    def close(self) -> None:
        """Write what is queued and close the file."""
        self._queue.put(None)
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                self._write(self._render(item) + "\n")
                if self._queue.empty():
                    self._file.flush()
            self._file.close()
        except OSError as err:
            self._ended = True
            log.error("%s: %s; no further lines are written", self._path, err.strerror)

    def _write(self, line: str) -> None:
        if self._size + len(line) > self._limit and self._size:
            if self._whole:
                if not self._ended:
                    log.warning(
                        "%s has reached %d MiB and ends here", self._path, self._limit >> 20
                    )
                self._ended = True
                return
            self._file.close()
            os.replace(self._path, self._path.with_name(self._path.name + ".1"))
            self._file = self._path.open("w", encoding="utf-8")
            self._size = 0
        self._file.write(line)
        self._size += len(line.encode())


def path_of_rank(path: str, dp_rank: int, dp_size: int) -> str:
    """Each rank has its own file: FILE, or FILE.rank0, FILE.rank1, ... with data parallelism."""
    return path if dp_size == 1 else f"{path}.rank{dp_rank}"
