"""Facts about the machine and the process that reads them: limits, memory, shared memory, clock,
versions.

An engine reports its own (server/observability/diagnosis.py); `baton doctor` reads those of the
machine it runs on. Reads files under /proc and makes a few system calls; judges nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import re
import resource
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from baton import DISTRIBUTION

PACKAGES = ("torch", "flashinfer-python")
CPU_FEATURES = (
    "sse4_2",
    "avx2",
    "fma",
    "avx512f",
    "avx512bw",
    "avx512_bf16",
    "amx_bf16",
    "asimd",
    "sve",
)
"""Features that decide which kernels run, as /proc/cpuinfo names them."""
TIMEX_BYTES = 208
TIMEX_STATUS_OFFSET = 40
STA_UNSYNC = 0x0040
"""sys/timex.h: the layout of struct timex on 64-bit Linux, and the status bit of a clock that
nothing disciplines.
"""


def _or_empty(read: Callable[[], str]) -> str:
    try:
        return read().strip()
    except OSError:
        return ""


def _text(path: str) -> str:
    return _or_empty(Path(path).read_text)


def _limits(which: int) -> list[int | None]:
    """Soft and hard limit of a resource."""
    return [
        None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which)
    ]


def _cpu_features() -> list[str]:
    flags = re.search(r"^(?:flags|Features)\s*:(.*)", _text("/proc/cpuinfo"), re.MULTILINE)
    found = flags[1].split() if flags else []
    return [feature for feature in CPU_FEATURES if feature in found]


def _cpu_isa() -> str | None:
    with contextlib.suppress(ImportError):  # a source tree without the extension
        from baton._native import cpu_isa

        return str(cpu_isa())
    return None


def _memory(name: str) -> int | None:
    """Entry of /proc/meminfo [bytes]."""
    found = re.search(rf"^{name}:\s*(\d+) kB$", _text("/proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _memory_limit() -> int | None:
    """Smallest limit of the control group of this process and of those above it, versions 2 and
    1.
    """
    found = []
    for line in _text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = Path("/sys/fs/cgroup")
            name = "memory.max"
        elif controllers == "memory":
            root = Path("/sys/fs/cgroup/memory")
            name = "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):
            if directory.is_relative_to(root) and (text := _text(str(directory / name))).isdigit():
                found.append(int(text))
    limit = min(found, default=0)
    return limit if 0 < limit < 1 << 60 else None  # version 1 says "none" with a number near 2**63


def _file_system(path: str) -> tuple[int | None, int | None]:
    """Size and free space."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None, None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """File system on which this process writes. Sizes in bytes."""

    path: str
    total: int
    free: int


def _disks() -> list[DiskSpace]:
    """File systems of temporary files, and of the files that standard output and error go to."""
    folders = [tempfile.gettempdir()]
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # closed, or no /proc
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            if is_file:
                folders.append(str(Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent))
    found = []
    for folder in dict.fromkeys(folders):
        total, free = _file_system(folder)
        if total is not None and free is not None:
            found.append(DiskSpace(folder, total, free))
    return found


def _sealed_memfd_error() -> str | None:
    """Make what a KV pool in host memory is made of, one page long."""
    try:
        with os.fdopen(
            os.memfd_create("baton-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "wb"
        ) as file:
            file.truncate(4096)
            fcntl.fcntl(
                file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            )
    except (OSError, AttributeError) as err:
        return str(err)
    return None


def _is_clock_synchronized() -> bool | None:
    """Ask the kernel, as `ntptime` does; None where it does not tell."""
    if platform.system() != "Linux" or platform.architecture()[0] != "64bit":
        return None
    timex = ctypes.create_string_buffer(TIMEX_BYTES)
    if ctypes.CDLL(None, use_errno=True).adjtimex(timex) < 0:
        return None
    status = int.from_bytes(timex.raw[TIMEX_STATUS_OFFSET : TIMEX_STATUS_OFFSET + 4], "little")
    return not status & STA_UNSYNC


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name, package in (("baton", DISTRIBUTION), *((name, name) for name in PACKAGES)):
        with contextlib.suppress(
            metadata.PackageNotFoundError
        ):  # the caller judges what is not installed
            found[name] = metadata.version(package)
    with contextlib.suppress(ImportError):  # a source tree without the extension
        from baton._native import __version__

        found["extension"] = str(__version__)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Facts of this process, each read when it is not given: `HostFacts()` takes about a
    millisecond.

    Sizes are in bytes; None: unknown here, or of a limit: none.
    """

    hostname: str = field(default_factory=socket.gethostname)
    boot_id: str = field(default_factory=lambda: _text("/proc/sys/kernel/random/boot_id"))
    network_namespace: str = field(
        default_factory=lambda: _or_empty(lambda: os.readlink("/proc/self/ns/net"))
    )
    uid: int = field(default_factory=os.geteuid)
    kernel: str = field(default_factory=platform.release)
    machine: str = field(default_factory=platform.machine)
    cpu_count: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    cpu_features: list[str] = field(default_factory=_cpu_features)
    cpu_isa: str | None = field(default_factory=_cpu_isa)
    """Instruction level of our kernels."""
    memory_total: int | None = field(default_factory=lambda: _memory("MemTotal"))
    memory_available: int | None = field(default_factory=lambda: _memory("MemAvailable"))
    memory_limit: int | None = field(default_factory=_memory_limit)
    """Memory that the control group allows."""
    shm_total: int | None = field(default_factory=lambda: _file_system("/dev/shm")[0])
    shm_free: int | None = field(default_factory=lambda: _file_system("/dev/shm")[1])
    disks: list[DiskSpace] = field(default_factory=_disks)
    """Where its temporary files and its log are."""
    sealed_memfd_error: str | None = field(default_factory=_sealed_memfd_error)
    """Why a sealed memory file cannot be made; None: it can."""
    open_files_limit: int | None = field(default_factory=lambda: _limits(resource.RLIMIT_NOFILE)[0])
    open_files_hard_limit: int | None = field(
        default_factory=lambda: _limits(resource.RLIMIT_NOFILE)[1]
    )
    locked_memory_limit: int | None = field(
        default_factory=lambda: _limits(resource.RLIMIT_MEMLOCK)[0]
    )
    has_rdma: bool = field(default_factory=lambda: any(Path("/sys/class/infiniband").glob("*")))
    unix_seconds: float = field(default_factory=time.time)
    is_clock_synchronized: bool | None = field(default_factory=_is_clock_synchronized)
    versions: dict[str, str] = field(default_factory=_versions)
    """Versions of baton, its extension, python, and those of PACKAGES that are installed."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> HostFacts:
        """Facts of another process; what its version does not tell is unknown, what it tells
        besides is left out.
        """
        unknown: dict[str, Any] = {
            "cpu_features": [],
            "versions": {},
            "has_rdma": False,
            "disks": [],
        }
        values = {f.name: value.get(f.name, unknown.get(f.name)) for f in fields(cls)}
        disks = [DiskSpace(disk["path"], disk["total"], disk["free"]) for disk in values["disks"]]
        return cls(**{**values, "disks": disks})
