"""Allocator of the extension module, which is the installed router: the one that the native program has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from baton import _native


def test_installed_router_allocates_with_mimalloc() -> None:
    """mimalloc itself says so, on standard error."""
    command = [sys.executable, "-m", "baton_ops.cli", "router", "--version"]
    env = {**os.environ, "MIMALLOC_VERBOSE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("baton-router ")
    assert "mimalloc: " in done.stderr


def test_extension_needs_no_static_thread_storage() -> None:
    """A module with DF_STATIC_TLS cannot be loaded once other modules, such as torch's, took the reserve."""
    df_static_tls = 0x10
    assert not dynamic_flags(Path(_native.__file__)) & df_static_tls


def dynamic_flags(path: Path) -> int:
    """DT_FLAGS of a little-endian 64-bit ELF file, as its man page lays it out."""
    image = path.read_bytes()
    assert image[:6] == b"\x7fELF\x02\x01"

    def number(at: int, size: int) -> int:
        return int.from_bytes(image[at : at + size], "little")

    program_headers = number(32, 8)
    pt_dynamic = 2
    dt_flags = 30
    for index in range(number(56, 2)):
        header = program_headers + index * number(54, 2)
        if number(header, 4) != pt_dynamic:
            continue
        entry = number(header + 8, 8)
        while number(entry, 8):
            if number(entry, 8) == dt_flags:
                return number(entry + 8, 8)
            entry += 16
    return 0
