"""A router alone, in front of workers that a test makes."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.processes.cluster import eventually

_LISTENING = re.compile(r"listening on (http://\S+)")


class Router:
    @staticmethod
    @contextmanager
    def up(*flags: str) -> Iterator[str]:
        """Start with `flags` on a free port and give its URL; on a failure its log is printed."""
        command = [
            sys.executable,
            "-m",
            "baton_ops.cli",
            "router",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            *flags,
        ]
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

            def written() -> str:
                log.seek(0)
                return log.read()

            def address() -> str:
                assert process.poll() is None, written()
                found = _LISTENING.search(written())
                return found[1] if found else ""

            try:
                yield eventually("the router listens", address, 30)
            except BaseException:
                print(written())
                raise
            finally:
                process.kill()
                process.wait(10)
