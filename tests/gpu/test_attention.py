"""The flashinfer backend on its own kernels, and what it assumes of them, one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.layers.attention import flashinfer, make_backend
from baton.layers.attention.flashinfer import FlashInferAttention, find_obstacle
from baton.layers.attention.reference import TorchAttention
from tests.support.kernels.attention_cases import CASES, Case, check


@pytest.fixture(autouse=True)
def _flashinfer() -> None:
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")


@pytest.mark.timeout(600)  # kernels are compiled at their first use
@pytest.mark.parametrize("case", CASES, ids=str)
def test_requests_come_out_as_dense_attention_has_them(case: Case) -> None:
    """Strided K and V, q as a view of the projection, windows, soft cap, NaN in unwritten slots: all at once."""
    check(
        case,
        FlashInferAttention,
        device="cuda",
        tolerance=0.03,
    )


@pytest.mark.timeout(600)
def test_wrong_window_would_be_noticed() -> None:
    case = Case(windows=(5, 5))

    def off_by_one(layers: Any, kv: Any) -> FlashInferAttention:
        wrong = [replace(layer, window=6) for layer in layers]
        return FlashInferAttention(wrong, kv)

    with pytest.raises(AssertionError, match="window 5"):
        check(case, off_by_one, device="cuda", tolerance=0.03)


@pytest.mark.timeout(600)
def test_long_rows_are_split_over_thread_blocks() -> None:
    check(
        Case(lengths=(3000, 5, 1200), longest_chunk=700, windows=(0, 512)),
        make("flashinfer"),
        "cuda",
        0.03,
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("page_size", [1, 16])
def test_kernels_for_long_rows_on_rows_of_any_length(
    dim: int, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in unwritten slots and many rows per step too."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("these kernels are for compute capability 9.x")
    monkeypatch.setattr(flashinfer, "LONG_TOKENS", 1)
    case = Case(lengths=(1, 7, 33, 300, 3000), longest_chunk=700, windows=(0,), dim=dim,
                heads=8, kv_heads=2, page_size=page_size)  # fmt: skip
    backends = []

    def make_and_keep(layers: Any, kv: Any) -> FlashInferAttention:
        backends.append(FlashInferAttention(layers, kv))
        return backends[0]

    check(case, make_and_keep, "cuda", 0.03)
    wrappers = backends[0]._wrappers[0]
    assert wrappers.long_prefill is not wrappers.prefill


@pytest.mark.timeout(600)
def test_steps_planned_faster_than_they_run_keep_their_indices() -> None:
    """Plans follow each other without a wait for results in between: the staging memory must not be overwritten."""
    case = Case(lengths=(400,) * 24, longest_chunk=3, windows=(0,), dim=128, heads=32, kv_heads=8)
    check(case, make("flashinfer"), "cuda", 0.03)


def test_auto_chooses_flashinfer() -> None:
    case = Case()
    kv = case.pool("cuda")
    assert find_obstacle(case.layers()[0], kv) is None
    assert isinstance(make_backend("auto", case.layers(), kv), FlashInferAttention)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_backend_on_cuda(case: Case) -> None:
    check(case, TorchAttention, "cuda")


def make(name: str) -> Any:
    return lambda layers, kv: make_backend(name, layers, kv)


def test_workspace_lies_on_the_device() -> None:
    before = torch.cuda.memory_allocated()
    backend = FlashInferAttention(Case().layers(), Case().pool("cuda"))
    assert torch.cuda.memory_allocated() - before >= 128 << 20
    del backend
