"""The mask kernel against numpy, without a GPU: in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernel_sets_the_forbidden_logits_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kernels.mask_cases"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "24 shapes" in done.stdout
    assert "masks of 2 words have fewer bits than a row has logits (65)" in done.stdout
