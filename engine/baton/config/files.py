"""Files that flags name, or that a checkpoint consists of: regular files, or links to some.

A directory, a socket or a device under the name of a file is refused with what it is. So is a
pipe, whose reading or writing would wait for the other end.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_OTHER_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def refuse_other_kinds(path: Path) -> None:
    """Raise OSError where `path` is there and is no regular file.

    FileNotFoundError means that nothing of this name is there: a link that leads nowhere is there.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if not path.is_symlink():
            raise
        text = f"it is a link to {os.readlink(path)}, which is not there"
        raise OSError(errno.EINVAL, text, str(path)) from None
    for is_kind, name in _OTHER_KINDS:
        if is_kind(mode):
            raise OSError(errno.EINVAL, f"it is {name}, not a regular file", str(path))


def is_given(path: Path) -> bool:
    """True if anything of this name is there, a link that leads nowhere included."""
    return os.path.lexists(path)


def read_regular_file(path: Path) -> bytes:
    """Content of a regular file. Raises OSError, as `refuse_other_kinds` does."""
    refuse_other_kinds(path)
    return path.read_bytes()


def refuse_unwritable_kinds(path: Path) -> None:
    """Raise OSError where `path` is there and nothing can be appended to it as to a file."""
    try:
        refuse_other_kinds(path)
    except FileNotFoundError:
        return
    except OSError:
        if path.exists():
            raise
        return  # the file that the link names is made
