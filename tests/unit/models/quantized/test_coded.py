"""Quantized checkpoints as a GPU's kernels take them: what stays quantized, and its numbers."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.errors import ConfigError
from baton.layers import ops
from baton.layers.shard import WHOLE, Shard
from baton.models.blocks.moe import MoeBlock
from baton.models.checkpoint import check_files
from baton.models.decoder import Decoder
from baton.models.load import load_weights
from baton.models.quantized.readers.mxfp4 import FP4_NUMBERS
from baton.models.spec_reader import read_spec
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.quantized_checkpoints import quantize
from tests.support.models.whole_model import held_tensors

pytest.importorskip("triton", reason="triton is not installed")

from baton.layers.kernels.coded import CodedMatrix, find_runs

CPU = torch.device("cpu")
FORMATS = [
    "fp8-ragged", "fp8-channel", "int-asymmetric", "packed-int5", "packed-int4-zeros", "awq",
    "gptq-int3", "mxfp4",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices get the form of a GPU's kernels, in host memory."""

    def make(dtype: torch.dtype, device: torch.device) -> Any:
        return functools.partial(CodedMatrix.make, dtype=dtype, device=device)

    monkeypatch.setattr(ops, "quantized_kernel", make)


def numbers(matrix: CodedMatrix) -> Tensor:
    """float32 [outputs, inputs], one element after the other."""
    outputs, inputs = matrix.shape
    size, offset = matrix.runs
    assert matrix.codes.shape[1] % matrix.group_bytes == 0
    dense = torch.empty(outputs, inputs)
    for n in range(outputs):
        for k in range(inputs):
            group, place = divmod(k + offset, size)
            half, byte = divmod(place, matrix.group_bytes)
            code = int(matrix.codes[n, group * matrix.group_bytes + byte])
            if matrix.codes_per_byte == 2:
                code = code >> 4 * half & 15
            number = float(code)
            if matrix.code == "fp8":
                number = float(torch.tensor(code, dtype=torch.uint8).view(torch.float8_e4m3fn))
            elif matrix.code == "fp4":
                number = float(FP4_NUMBERS[code])
            zeros = matrix.zeros
            zero = float(zeros[group, n]) if isinstance(zeros, Tensor) else zeros
            dense[n, k] = (number - zero) * matrix.scales[group, n].float()
    return dense


def first_matrices(decoder: Decoder) -> list[ops.Matrix]:
    layer = decoder.weights.layers[0]
    if isinstance(layer.mlp, MoeBlock):
        return [layer.mlp.gate_up[1], layer.mlp.down[1]]
    return [layer.attention.qkv, layer.mlp.down]


@pytest.fixture(params=FORMATS)
def quantized_and_plain(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    variant = "gpt-oss" if request.param == "mxfp4" else "llama"
    return quantize(make_checkpoint(variant, tmp_path / "m"), request.param, tmp_path)


# A share of two begins inside blocks of 24 x 40, and inside groups of 32.
@pytest.mark.parametrize("shard", [WHOLE, Shard(1, 2)])
def test_codes_scales_and_zeros_are_the_numbers_of_the_plain_twin(
    quantized_and_plain: tuple[Path, Path], shard: Shard
) -> None:
    loaded, twin = (
        first_matrices(load_weights(read_spec(path, "float32"), path, shard=shard))
        for path in quantized_and_plain
    )
    for matrix, dense in zip(loaded, twin, strict=True):
        assert isinstance(matrix, CodedMatrix)
        assert isinstance(dense, Tensor)
        torch.testing.assert_close(numbers(matrix), dense, rtol=1e-6, atol=1e-9)


def test_memory_that_a_start_checks_is_what_the_weights_take(
    quantized_and_plain: tuple[Path, Path],
) -> None:
    path, _ = quantized_and_plain
    spec = read_spec(path, "float16")
    held = held_tensors(load_weights(spec, path))
    taken = sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())
    counted = check_files(spec, path).memory(spec, on_cpu=False)
    # Last groups are filled up in memory: 64 columns to two groups of 40.
    assert counted <= taken < 1.15 * counted


def test_reordered_groups_are_dequantized_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, plain = quantize(make_checkpoint("llama", tmp_path / "m"), "gptq-order", tmp_path)
    with caplog.at_level(logging.INFO):
        loaded = first_matrices(load_weights(read_spec(path, "float32"), path))
    twin = first_matrices(load_weights(read_spec(plain, "float32"), plain))
    for matrix, dense in zip(loaded, twin, strict=True):
        assert isinstance(matrix, Tensor)
        assert isinstance(dense, Tensor)
        assert torch.equal(matrix, dense)
    assert "dequantized to float32 at load" in caplog.text


@pytest.mark.parametrize(
    ("groups", "runs"),
    [
        ([0, 0, 0], (3, 0)),
        ([0, 0, 1], (2, 0)),
        ([0, 1, 1], (2, 1)),
        ([0, 0, 0, 1, 1, 1, 2], (3, 0)),
        ([0, 1, 1, 1, 2, 2], (3, 2)),
        ([0, 0, 0, 1, 1, 2, 2], None),
        ([0, 1, 0, 1], None),
        ([0, 0, 2, 2], None),
    ],
)
def test_groups_are_runs_of_columns(groups: list[int], runs: tuple[int, int] | None) -> None:
    assert find_runs(torch.tensor(groups)) == runs


def test_experts_in_different_forms_are_refused() -> None:
    def make(columns: int) -> CodedMatrix:
        matrix = CodedMatrix.make(
            "int8",
            torch.zeros(4, 8, dtype=torch.uint8),
            scales=torch.ones(4, 8 // columns),
            zeros=0.0,
            column_group=torch.arange(8) // columns,
            dtype=torch.float16,
            device=CPU,
        )
        assert matrix is not None
        return matrix

    assert CodedMatrix.stack([make(4), make(4)]).shape == (2, 4, 8)
    for other in (make(2), torch.zeros(4, 8)):
        with pytest.raises(ConfigError, match="quantized in different forms"):
            CodedMatrix.stack([make(4), other])
