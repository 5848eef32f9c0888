"""The flashinfer backend's calls, made to a naive stand-in: whether the library agrees, a GPU has to say."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton.layers import attention
from baton.layers.attention.flashinfer import FlashInferAttention
from baton.layers.attention.paged_indices import View
from baton.layers.attention.reference import TorchAttention
from baton.layers.kv_pool import KvTensors
from baton.layers.spec import EVERYTHING
from tests.support.devices import fake_flashinfer
from tests.support.kernels.attention_batch import AttentionRow, build_batch
from tests.support.kernels.attention_cases import CASES, Case, check


def run(case: Case) -> None:
    check(case, lambda layers, kv: FlashInferAttention(layers, kv, fake_flashinfer))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_requests_come_out_as_dense_attention_has_them(case: Case) -> None:
    run(case)


@settings(max_examples=25, deadline=None)
@given(
    page_size=st.sampled_from((1, 2, 16, 64, 128)),
    heads=st.sampled_from(((1, 1), (4, 2), (3, 1), (4, 1))),
    windows=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    has_sinks=st.booleans(),
    is_divided=st.booleans(),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    chunk=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_any_mix_of_rows(
    page_size: int,
    heads: tuple[int, int],
    windows: list[int],
    has_sinks: bool,
    is_divided: bool,
    lengths: list[int],
    chunk: int,
    seed: int,
) -> None:
    run(
        Case(
            heads=heads[0], kv_heads=heads[1], page_size=page_size, windows=tuple(windows), lengths=tuple(lengths),
            longest_chunk=chunk, seed=seed, has_sinks=has_sinks, is_divided=is_divided,
        )
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_backend_passes_the_same_cases(case: Case) -> None:
    check(case, TorchAttention)


def test_wrong_window_would_be_noticed() -> None:
    case = Case(windows=(5, 5))

    def off_by_one(layers: Any, kv: Any) -> FlashInferAttention:
        wrong = [replace(layer, window=6) for layer in layers]
        return FlashInferAttention(wrong, kv, fake_flashinfer)

    with pytest.raises(AssertionError, match="window 5"):
        check(case, off_by_one)


def test_one_plan_per_window_and_step_however_many_layers() -> None:
    case = Case(windows=(0, 5, 0, 5, 0, 5), lengths=(1,))
    made: list[FlashInferAttention] = []

    def make(layers: Any, kv: Any) -> FlashInferAttention:
        made.append(FlashInferAttention(layers, kv, fake_flashinfer))
        return made[0]

    check(case, make)
    wrappers = made[0]._wrappers
    assert {
        view.sight.window: (made.decode.plans, made.prefill.plans)
        for view, made in wrappers.items()
    } == {0: (1, 0), 5: (1, 0)}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(64, 8, 128), (96, 8, 128), (8, 1, 128), (16, 2, 64), (32, 4, 256)],
)
def test_workspace_holds_what_splitting_a_short_chunk_of_a_long_context_takes(
    heads: int, kv_heads: int, dim: int
) -> None:
    case = Case(heads=heads, kv_heads=kv_heads, dim=dim, windows=(0,), lengths=(1,))
    backend = FlashInferAttention(case.layers(), case.pool("cpu"), fake_flashinfer)
    for new_tokens in (2, 5, 9, 12, 17, 32, 64, 128, 300):
        for context in (2048, 8192, 32768):
            pages = list(range(context // case.page_size))
            backend.plan(
                build_batch(
                    [AttentionRow([0] * new_tokens, context - new_tokens, pages)], case.page_size
                )
            )


def test_tensor_cores_decode_from_groups_of_three() -> None:
    for heads, kv_heads, expected in ((2, 2, False), (4, 2, False), (3, 1, True), (8, 2, True)):
        case = Case(heads=heads, kv_heads=kv_heads)
        made = FlashInferAttention(case.layers(), case.pool("cpu"), fake_flashinfer)
        assert made._wrappers[View(0, EVERYTHING)].decode.use_tensor_cores is expected


REFUSED = [
    (Case(dtype=torch.float32), "float16 or bfloat16, the model in float32"),
    (Case(dim=32), "heads of 64, 128, 256, the model's have 32"),
    (Case(heads=3, kv_heads=2), "3 query and 2 KV heads"),
]


@pytest.mark.parametrize(("case", "message"), REFUSED)
def test_shapes_outside_the_kernels_are_refused(case: Case, message: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"flashinfer: .*{message}.*; use --attention-backend torch"
    ):
        FlashInferAttention(case.layers(), case.pool("cpu"), fake_flashinfer)


def test_chunks_of_parts_of_pages_are_refused() -> None:
    case = Case(chunks=(0, 24))
    with pytest.raises(
        ConfigError, match=r"chunks of 24 tokens, which are no whole pages of 16; set --page-size"
    ):
        FlashInferAttention(case.layers(), case.pool("cpu"), fake_flashinfer)


def test_flashinfer_asked_for_by_name_is_an_error_on_a_cpu_pool() -> None:
    case = Case()
    with pytest.raises(
        ConfigError,
        match="it needs a CUDA device, the KV pool is on cpu; use --attention-backend torch",
    ):
        attention.make_backend("flashinfer", case.layers(), case.pool("cpu"))


def test_auto_takes_the_native_kernels_on_cpu(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("baton._native", reason="the native module is not built")
    case = Case()
    with caplog.at_level(logging.INFO):
        made = attention.make_backend("auto", case.layers(), case.pool("cpu"))
    assert type(made).__name__ == "CpuAttention"
    ((_, level, message),) = caplog.record_tuples
    assert level == logging.INFO
    assert (
        message
        == "attention: native CPU kernels (flashinfer needs a CUDA device, the KV pool is on cpu)"
    )


def test_auto_says_in_one_sentence_why_the_reference_serves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """float16: neither the CPU kernels nor, on a CPU, flashinfer compute it."""
    case = Case(dtype=torch.float16)
    made = attention.make_backend("auto", case.layers(), case.pool("cpu"))
    assert isinstance(made, TorchAttention)
    (message,) = caplog.messages
    assert "the KV pool is torch.float16 on cpu" in message
    assert message.endswith("the slow torch reference is used instead")


def test_auto_on_cuda_refuses_and_names_what_flashinfer_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case()
    data: Any = SimpleNamespace(device=torch.device("cuda"), dtype=case.dtype)
    kv = KvTensors(case.kv_spec(), data)
    monkeypatch.setitem(
        sys.modules, "flashinfer", None
    )  # what an absent package looks like to import
    for name in ("auto", "flashinfer"):
        with pytest.raises(
            ConfigError,
            match=r"flashinfer: it cannot be imported: .*; use --attention-backend torch",
        ):
            attention.make_backend(name, case.layers(), kv)
    assert isinstance(attention.make_backend("torch", case.layers(), kv), TorchAttention)
