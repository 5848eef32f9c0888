"""Latent attention by flashinfer's kernel, against the torch backend."""

from __future__ import annotations

import pytest
import torch

from tests.unit.layers.attention.test_latent import check_flashinfer


@pytest.mark.timeout(600)  # the kernel is compiled at its first use
@pytest.mark.parametrize("heads", [6, 16, 128])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_prompts_and_single_tokens_equal_the_torch_backend(heads: int, page_size: int) -> None:
    flashinfer = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    lengths = (3, 17, 64, 100, 290) if page_size == 1 else (3, 17, 64, 1000, 2500)
    check_flashinfer(heads, page_size, lengths, flashinfer, torch.device("cuda"))
