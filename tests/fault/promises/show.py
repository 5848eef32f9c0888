"""What the script of a promise prints: what it does, what it counted, and whether the promise was kept."""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from baton._native import start_logs


@dataclass
class Show:
    """Output of one script."""

    started: float = field(default_factory=time.monotonic)

    def tell(self, text: str) -> None:
        print(f"{time.monotonic() - self.started:7.1f} s  {text}", flush=True)

    def keep(self, promise: str, is_kept: bool, found: object) -> None:
        """Print a promise with what was found. Raises AssertionError if it is broken."""
        self.tell(f"{'kept' if is_kept else 'BROKEN'}: {promise}: {found}")
        assert is_kept, f"{promise}: {found}"


def machine() -> str:
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    return f"{cores} cores, {platform.machine()}, Python {platform.python_version()}, load {load:.1f} at the start"


def run_script(
    text: str | None, long: Callable[[Show], None], short: Callable[[Show], None]
) -> None:
    """Entry point of a script: `--short` runs the form that `make test` has."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="the form that make test runs")
    is_short = parser.parse_args().short
    start_logs("error", "text", "promise")
    print((text or "").splitlines()[0])
    print(machine())
    (short if is_short else long)(Show())
