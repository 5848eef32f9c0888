"""Things that may stand where a file is expected."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

KINDS = {
    "directory": "it is a directory, not a regular file",
    "pipe": "it is a pipe, not a regular file",
    "socket": "it is a socket, not a regular file",
    "device": "it is a device, not a regular file",
    "dangling": "it is a link to nowhere, which is not there",
}
"""By kind: what is said about it."""


def put_kind(path: Path, kind: str) -> None:
    """Put this kind of thing at `path`, in place of what is there."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        folder = os.open(path.parent, os.O_RDONLY)  # paths of sockets have 107 bytes at most
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.symlink_to("nowhere")
