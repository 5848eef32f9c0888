"""Prometheus and promtool for the tests: those of PATH, else unpacked from Debian's package without installing it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import queue
import re
import shutil
import subprocess
import tempfile
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CACHE = Path(
    os.environ.get("BATON_KUBE_CACHE")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton-kube"
)
"""The folder of deploy/tests/kube/run.sh, which unpacks other packages there."""
DOWNLOAD_SECS = 300.0
START_SECS = 60.0
STOP_SECS = 30.0


def require(program: str) -> str:
    """Return the path of `prometheus` or `promtool`; where there is none and no package can be had, skip."""
    if found := shutil.which(program):
        return found
    unpacked = CACHE / "debian" / "usr" / "bin" / program
    if not unpacked.exists():
        why = _unpack(unpacked)
        if why is not None:
            pytest.skip(
                f"{program} is not in PATH, and Debian's package prometheus could not be unpacked: {why}"
            )
    return str(unpacked)


def _unpack(wanted: Path) -> str | None:
    """Unpack the package into the cache. Returns why that failed, or None."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return "there is no apt-get"
    (CACHE / "debian").mkdir(parents=True, exist_ok=True)
    with (
        (CACHE / "prometheus.lock").open("w") as lock,
        tempfile.TemporaryDirectory(dir=CACHE) as folder,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        if wanted.exists():
            return None
        # apt-get's sandbox user may not write into a folder that only this user can enter.
        command = ["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", "prometheus"]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=DOWNLOAD_SECS
            )
        except subprocess.TimeoutExpired:
            return f"apt-get download took longer than {DOWNLOAD_SECS:g} s"
        packages = list(Path(folder).glob("prometheus_*.deb"))
        if done.returncode or not packages:
            return f"apt-get download prometheus: {done.stderr.strip() or done.stdout.strip()}"
        command = ["dpkg", "-x", str(packages[0]), str(CACHE / "debian")]
        done = subprocess.run(command, capture_output=True, text=True)
        return (
            None
            if done.returncode == 0 and wanted.exists()
            else f"{' '.join(command)}: {done.stderr.strip()}"
        )


class Server:
    """A running Prometheus with a configuration folder like deploy/monitoring."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._address: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        address = self._address.get(timeout=START_SECS)
        assert address is not None, f"Prometheus ended at its start:\n{''.join(self.lines)}"
        self.url = f"http://{address}"

    def _read(self) -> None:
        assert self.process.stderr is not None
        address = None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r'msg="Listening on" address=(\S+)', line):
                address = found[1]
            elif "Server is ready to receive web requests" in line:
                self._address.put(address)
        self._address.put(None)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Samples of an instant query: `metric` (labels) and `value` (time, text)."""
        asked = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(
                f"{self.url}/api/v1/query?{asked}", timeout=STOP_SECS
            ) as answer:
                result = json.loads(answer.read())["data"]["result"]
        except urllib.error.HTTPError as err:
            with err:
                raise AssertionError(f"{expression}: {err.read().decode()}") from err
        assert isinstance(result, list)
        return result

    def numbers(self, expression: str) -> list[float]:
        """Values of an instant query, without those that are not a number."""
        values = [float(sample["value"][1]) for sample in self.query(expression)]
        return [value for value in values if not math.isnan(value)]

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_SECS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(STOP_SECS)
        self._reader.join(STOP_SECS)
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[Server]:
    """Run `prometheus.yml` of the folder on a free port; its data goes into `data` there."""
    command = [
        require("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    command += [f"--storage.tsdb.path={folder / 'data'}", "--log.level=info"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        server = Server(process)
    except BaseException:
        process.kill()
        process.wait(STOP_SECS)
        raise
    try:
        yield server
    finally:
        server.stop()
