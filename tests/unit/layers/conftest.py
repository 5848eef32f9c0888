"""Processes that have imported torch, for tests whose scripts need one of their own."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.support.processes.prepared_python import PreparedPython


def modules() -> list[str]:
    return [name for name in ("torch", "triton") if importlib.util.find_spec(name) is not None]


@pytest.fixture(scope="session")
def torch_process() -> Iterator[PreparedPython]:
    with PreparedPython.start(*modules()) as process:
        yield process


@pytest.fixture(scope="session")
def triton_interpreter() -> Iterator[PreparedPython]:
    """Kernels run in Triton's interpreter, which is chosen when Triton is imported."""
    with PreparedPython.start(*modules(), TRITON_INTERPRET="1") as process:
        yield process
