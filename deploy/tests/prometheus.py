"""Prometheus and promtool for the tests: those of PATH, else unpacked from Debian's package without installing it."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

CACHE = Path(
    os.environ.get("BATON_KUBE_CACHE")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton-kube"
)
"""The folder of deploy/tests/kube/run.sh, which unpacks other packages there."""
DOWNLOAD_SECS = 300.0


def require(program: str) -> str:
    """Return the path of `prometheus` or `promtool`; where there is none and no package can be had, skip."""
    if found := shutil.which(program):
        return found
    unpacked = CACHE / "debian" / "usr" / "bin" / program
    if not unpacked.exists():
        why = _unpack(unpacked)
        if why is not None:
            pytest.skip(f"{program} is not in PATH, and Debian's package prometheus could not be unpacked: {why}")
    return str(unpacked)


def _unpack(wanted: Path) -> str | None:
    """Unpack the package into the cache. Returns why that failed, or None."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return "there is no apt-get"
    (CACHE / "debian").mkdir(parents=True, exist_ok=True)
    with (CACHE / "prometheus.lock").open("w") as lock, tempfile.TemporaryDirectory(dir=CACHE) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if wanted.exists():
            return None
        # apt-get's sandbox user may not write into a folder that only this user can enter.
        command = ["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", "prometheus"]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DOWNLOAD_SECS)
        except subprocess.TimeoutExpired:
            return f"apt-get download took longer than {DOWNLOAD_SECS:g} s"
        packages = list(Path(folder).glob("prometheus_*.deb"))
        if done.returncode or not packages:
            return f"apt-get download prometheus: {done.stderr.strip() or done.stdout.strip()}"
        command = ["dpkg", "-x", str(packages[0]), str(CACHE / "debian")]
        done = subprocess.run(command, capture_output=True, text=True)
        return None if done.returncode == 0 and wanted.exists() else f"{' '.join(command)}: {done.stderr.strip()}"
