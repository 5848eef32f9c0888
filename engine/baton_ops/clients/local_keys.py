"""Control keys of the clusters that `baton up` runs for this user: other commands find them here.

One file per cluster, named by the port of its router, in a folder that only this user can enter.
`baton up` writes it when the router is ready and removes it at the end; the key of a cluster that
was killed is that of no router any more.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import stat
import tempfile
from pathlib import Path
from urllib.parse import urlsplit


def keys_folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "baton"
    return Path(tempfile.gettempdir()) / f"baton-{os.getuid()}"


def keep_control_key(port: int, key: str) -> None:
    """Write the key of the cluster whose router has this port. Raises OSError."""
    folder = keys_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(folder):
        raise PermissionError(f"{folder} is not this user's alone")
    file = _file_of(folder, port)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    write_private(temporary, key)
    temporary.replace(file)


def forget_control_key(port: int, key: str) -> None:
    """Remove the key, unless another cluster has written its own."""
    file = _file_of(keys_folder(), port)
    with contextlib.suppress(OSError):
        if file.read_text() == key:
            file.unlink()


def known_control_key(url: str) -> str | None:
    """Key of the cluster of this user whose router is at `url` on this machine; None: there is
    none.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    folder = keys_folder()
    if port is None or not _is_loopback(parts.hostname or "") or not _is_private(folder):
        return None
    try:
        return _file_of(folder, port).read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def write_private(path: Path, text: str) -> None:
    """Write a new file that only this user can read."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _file_of(folder: Path, port: int) -> Path:
    return folder / f"router-{port}.key"


def _is_private(folder: Path) -> bool:
    """True for a folder, and no link, into which no other user can put a file.

    In /tmp another one may have made it.
    """
    try:
        found = folder.lstat()
    except OSError:
        return False
    is_closed = stat.S_IMODE(found.st_mode) & 0o077 == 0
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and is_closed


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
