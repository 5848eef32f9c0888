"""The compute thread applies --cpu-threads: OpenMP's setting is per thread, and MKL would take every core otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, queue, torch
from baton.runtime.build import device_thread

torch.set_num_threads(1)
before = len(os.listdir("/proc/self/task"))
device = device_thread()
weight, x = torch.randn(2048, 2048), torch.randn(1, 2048)
device.submit_job(lambda: [torch.nn.functional.linear(x, weight) for _ in range(20)]).get()
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_one_compute_thread_means_one_thread() -> None:
    """Seen without the setting: each token cost 18 ms of CPU instead of 1, most of it in a spinning barrier."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=240, check=True
    )
    assert int(done.stdout) == 1
