"""Facts about the machine and the process that reads them: limits, memory, shared memory, clock, versions.

An engine reports its own (server/observability/diagnosis.py); `baton doctor` reads those of the machine it runs on.
Reads files under
/proc and makes a few system calls; judges nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import resource
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from baton import DISTRIBUTION

PACKAGES = ("torch", "flashinfer-python")
CPU_FEATURES = ("sse4_2", "avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "amx_bf16", "asimd", "sve")
"""Features that decide which kernels run, as /proc/cpuinfo names them."""
TIMEX_BYTES = 208
TIMEX_STATUS_OFFSET = 40
STA_UNSYNC = 0x0040
"""sys/timex.h: the layout of struct timex on 64-bit Linux, and the status bit of a clock that nothing disciplines."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Sizes are in bytes; None: unknown here, or of a limit: none."""

    hostname: str
    boot_id: str
    network_namespace: str
    uid: int
    kernel: str
    machine: str
    cpu_count: int
    cpu_features: list[str]
    cpu_isa: str | None
    """Instruction level of our kernels."""
    memory_total: int | None
    memory_available: int | None
    memory_limit: int | None
    """Memory that the control group allows."""
    shm_total: int | None
    shm_free: int | None
    sealed_memfd_error: str | None
    """Why a sealed memory file cannot be made; None: it can."""
    open_files_limit: int | None
    open_files_hard_limit: int | None
    locked_memory_limit: int | None
    has_rdma: bool
    unix_seconds: float
    is_clock_synchronized: bool | None
    versions: dict[str, str]
    """Versions of baton, its extension, python, and those of PACKAGES that are installed."""

    def json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> HostFacts:
        """Facts of another process; what its version does not tell is unknown, what it tells besides is left out."""
        unknown: dict[str, Any] = {"cpu_features": [], "versions": {}, "has_rdma": False}
        return cls(**{f.name: value.get(f.name, unknown.get(f.name)) for f in fields(cls)})


def read_host_facts() -> HostFacts:
    """Facts of this process. Takes about a millisecond."""
    memory, shm = _memory(), _file_system("/dev/shm")
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return HostFacts(
        hostname=socket.gethostname(),
        boot_id=_text("/proc/sys/kernel/random/boot_id"),
        network_namespace=_link("/proc/self/ns/net"),
        uid=os.geteuid(),
        kernel=platform.release(),
        machine=platform.machine(),
        cpu_count=len(os.sched_getaffinity(0)),
        cpu_features=_cpu_features(),
        cpu_isa=_cpu_isa(),
        memory_total=memory.get("MemTotal"),
        memory_available=memory.get("MemAvailable"),
        memory_limit=_memory_limit(),
        shm_total=shm and shm[0],
        shm_free=shm and shm[1],
        sealed_memfd_error=_sealed_memfd_error(),
        open_files_limit=_limit(open_files[0]),
        open_files_hard_limit=_limit(open_files[1]),
        locked_memory_limit=_limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        has_rdma=any(Path("/sys/class/infiniband").glob("*")),
        unix_seconds=time.time(),
        is_clock_synchronized=_is_clock_synchronized(),
        versions=_versions(),
    )


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _cpu_features() -> list[str]:
    for line in _text("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            found = set(value.split())
            return [feature for feature in CPU_FEATURES if feature in found]
    return []


def _cpu_isa() -> str | None:
    try:
        from baton._native import cpu_isa
    except ImportError:
        return None
    return str(cpu_isa())


def _memory() -> dict[str, int]:
    """/proc/meminfo [bytes]."""
    found = {}
    for line in _text("/proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found[name] = int(value.split()[0]) * 1024
    return found


def _memory_limit() -> int | None:
    """Smallest limit of the control group of this process and of those above it, versions 2 and 1."""
    found = []
    for line in _text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = Path("/sys/fs/cgroup"), "memory.max"
        elif controllers == "memory":
            root, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):
            if directory.is_relative_to(root) and (text := _text(str(directory / name))).isdigit():
                found.append(int(text))
    limit = min(found, default=0)
    return limit if 0 < limit < 1 << 60 else None  # version 1 says "none" with a number near 2**63


def _file_system(path: str) -> tuple[int, int] | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _sealed_memfd_error() -> str | None:
    """Make what a KV pool in host memory is made of, one page long."""
    try:
        descriptor = os.memfd_create("baton-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, 4096)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        finally:
            os.close(descriptor)
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
        with contextlib.suppress(metadata.PackageNotFoundError):  # the caller judges what is not installed
            found[name] = metadata.version(package)
    with contextlib.suppress(ImportError):  # a source tree without the extension
        from baton._native import __version__

        found["extension"] = str(__version__)
    return found
