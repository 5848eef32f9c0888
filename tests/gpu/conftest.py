"""Everything below needs a CUDA device: without one each test is skipped, and the reason is printed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from baton.runtime.device import no_cuda

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sys.setswitchinterval(
        0.0005
    )  # as server.worker.process has it: two threads share the GIL here too
    reason = no_cuda()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            # Elsewhere a warning is an error; here most come from flashinfer and its compiler, which are not ours.
            item.add_marker(pytest.mark.filterwarnings("default"))
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
