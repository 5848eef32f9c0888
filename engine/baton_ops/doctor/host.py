"""Checks of one machine and of the limits of one process: of this one, or of an engine that
reported its facts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from baton.server.observability.host_facts import HostFacts
from baton_ops.doctor.check import CheckResult, fail, ok, skip, warn

MIN_SHM_BYTES = 256 << 20
"""NCCL and torch's process groups keep their buffers there; containers get 64 MiB by default."""
MIN_OPEN_FILES = 1024
SPARE_OPEN_FILES = 256
"""For sockets, libraries and logs besides the connections of requests."""
MIN_MEMORY_BYTES = 1 << 30
"""A rank takes half of it for torch alone."""
MIN_LOCKED_BYTES = 64 << 20
MIN_DISK_BYTES = 256 << 20
"""A busy engine logs a few MiB an hour; a trace or a decision log far more."""
FULL_DISK_BYTES = 4 << 20
UNSAFE_SKEW_SECS = 240.0
"""Signed requests between engines are refused at 300 s."""
NOTED_SKEW_SECS = 5.0


def format_mib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count >> 20} MiB"


def check_memfd(facts: HostFacts) -> CheckResult:
    if facts.sealed_memfd_error is None:
        return ok(f"kernel {facts.kernel} makes sealed memory files, which KV pools are")
    sentence = f"kernel {facts.kernel} makes no sealed memory file: {facts.sealed_memfd_error}"
    remedy = (
        "use Linux 3.17 or newer, and a seccomp profile that allows memfd_create and "
        "fcntl(F_ADD_SEALS)"
    )
    return fail(sentence, remedy)


def check_shm(facts: HostFacts) -> CheckResult:
    remedy = "docker: --shm-size 1g; Kubernetes: an emptyDir with medium Memory at /dev/shm"
    if facts.shm_total is None:
        return warn("/dev/shm is not there: NCCL and gloo groups cannot start", remedy)
    if facts.shm_total < MIN_SHM_BYTES:
        wanted_size = format_mib(MIN_SHM_BYTES)
        sentence = (
            f"/dev/shm has {format_mib(facts.shm_total)}, tensor parallelism and NCCL want "
            f"{wanted_size}"
        )
        return warn(sentence, remedy)
    return ok(f"/dev/shm has {format_mib(facts.shm_total)}")


def check_open_files(facts: HostFacts, needed: int = MIN_OPEN_FILES) -> CheckResult:
    if facts.open_files_limit is None or facts.open_files_limit >= needed:
        return ok(
            f"{facts.open_files_limit or 'any number of'} files can be open, {needed} are wanted"
        )
    hard = "unlimited" if facts.open_files_hard_limit is None else facts.open_files_hard_limit
    sentence = (
        f"only {facts.open_files_limit} files can be open, {needed} are wanted: connections "
        "would be refused"
    )
    remedy = (
        f"ulimit -n {max(needed, 65536)} (the hard limit is {hard}); systemd: LimitNOFILE=65536"
    )
    return (fail if facts.open_files_limit < SPARE_OPEN_FILES else warn)(sentence, remedy)


def check_locked_memory(facts: HostFacts) -> CheckResult:
    limit = facts.locked_memory_limit
    if not facts.has_rdma:
        return skip("no RDMA device: the limit of locked memory does not matter")
    if limit is None or limit >= MIN_LOCKED_BYTES:
        return ok(
            f"{'any amount' if limit is None else format_mib(limit)} of memory can be locked for "
            "RDMA"
        )
    sentence = f"only {format_mib(limit)} of memory can be locked, RDMA registers whole buffers"
    return warn(
        sentence,
        "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; containers: the capability IPC_LOCK",
    )


def check_memory(facts: HostFacts) -> CheckResult:
    limit = (
        ""
        if facts.memory_limit is None
        else f", the control group allows {format_mib(facts.memory_limit)}"
    )
    if facts.memory_available is None:
        return skip("/proc/meminfo does not tell what is available")
    sentence = f"{format_mib(facts.memory_available)} of memory are available{limit}"
    if min(facts.memory_available, facts.memory_limit or facts.memory_available) < MIN_MEMORY_BYTES:
        return warn(
            sentence, "a rank needs weights + KV pool + 0.6 GiB: lower --kv-pool-mib or add memory"
        )
    return ok(sentence)


def check_disk(facts: HostFacts) -> CheckResult:
    if not facts.disks:
        return skip("the free space of its file systems is unknown")
    smallest = min(facts.disks, key=lambda disk: disk.free)
    sentence = (
        f"{format_mib(smallest.free)} of {format_mib(smallest.total)} are free at {smallest.path}"
    )
    remedy = "remove or rotate old logs and traces, or write them elsewhere (--log-dir, TMPDIR)"
    if smallest.free < FULL_DISK_BYTES:
        return fail(f"{sentence}: logs are lost", remedy)
    if smallest.free < min(MIN_DISK_BYTES, smallest.total // 10):
        return warn(sentence, remedy)
    return ok(sentence)


def check_cpu(facts: HostFacts) -> CheckResult:
    if facts.cpu_isa is None:
        return skip(
            f"{facts.cpu_count} cores; the native extension that chooses kernels is not installed"
        )
    sentence = (
        f"{facts.cpu_count} cores, kernels of level {facts.cpu_isa} "
        f"({' '.join(facts.cpu_features)})"
    )
    if facts.cpu_isa == "scalar" and facts.machine == "x86_64":
        return warn(
            sentence,
            "engines on the CPU want AVX2; check BATON_CPU_ISA and the virtual machine's CPU model",
        )
    return ok(sentence)


def check_clock(facts: HostFacts) -> CheckResult:
    if facts.is_clock_synchronized is None:
        return skip("this kernel does not tell whether the clock is synchronized")
    if not facts.is_clock_synchronized:
        remedy = (
            "run chronyd or systemd-timesyncd; in a virtual machine whose host keeps the "
            "time, ignore this"
        )
        return warn("the kernel says that no time service disciplines the clock", remedy)
    return ok("the clock is synchronized")


def check_versions(facts: HostFacts) -> CheckResult:
    versions = facts.versions
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    if "extension" not in versions:
        return fail(
            f"baton._native cannot be imported ({listed})",
            "install the wheel, or build it: make build",
        )
    if "torch" not in versions:
        return fail(
            f"torch is not installed ({listed}): engines cannot start", "pip install 'torch>=2.6'"
        )
    if "baton" in versions and versions["baton"] != versions["extension"]:
        sentence = f"baton {versions['baton']} has an extension of version {versions['extension']}"
        return fail(sentence, "install one wheel of Baton into a clean environment")
    return ok(listed)


def check_skew(subject: str, offset_secs: float) -> CheckResult:
    """Judge the difference of two clocks."""
    sentence = (
        f"the clock of {subject} is {abs(offset_secs):.1f} s "
        f"{'ahead' if offset_secs > 0 else 'behind'}"
    )
    remedy = (
        "synchronize the clocks (chronyd, systemd-timesyncd); engines refuse "
        "signatures older than 300 s"
    )
    if abs(offset_secs) >= UNSAFE_SKEW_SECS:
        return fail(sentence, remedy)
    if abs(offset_secs) >= NOTED_SKEW_SECS:
        return warn(sentence, remedy)
    return ok(f"the clock of {subject} differs by {abs(offset_secs):.1f} s")


HOST_CHECKS: dict[str, Callable[[HostFacts], CheckResult]] = {
    "memfd": check_memfd,
    "shm": check_shm,
    "open_files": check_open_files,
    "locked_memory": check_locked_memory,
    "memory": check_memory,
    "disk": check_disk,
    "cpu": check_cpu,
    "clock": check_clock,
    "versions": check_versions,
}


def check_host(facts: HostFacts) -> list[CheckResult]:
    return [replace(check(facts), name=f"host.{name}") for name, check in HOST_CHECKS.items()]
