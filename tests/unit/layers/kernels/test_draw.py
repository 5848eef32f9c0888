"""The draw kernel against the host's sampler, without a GPU: in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernel_draws_the_hosts_tokens() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kernels.draw_cases"],
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ends of the range: 6 rows" in done.stdout
    assert "names of columns: 5" in done.stdout
    assert "not finite: 6 rows" in done.stdout
