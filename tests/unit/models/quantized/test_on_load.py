"""--quantization: plain matrices become codes at load, the same however the model is divided."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from baton.config import build_config
from baton.errors import ConfigError
from baton.layers.shard import WHOLE, Shard
from baton.models.checkpoint import check_checkpoint
from baton.models.decoder import Decoder
from baton.models.load import load_weights
from baton.models.spec_reader import read_spec
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.quantized_checkpoints import (
    is_joint,
    is_linear,
    quantize,
    write_checkpoint,
)
from tests.support.models.whole_model import held_tensors, load_model

GROUPS = {"int8": (8, 128), "int4": (4, 32)}


def load_quantized(path: Path, quantization: str | None, shard: Shard = WHOLE) -> Decoder:
    return load_weights(read_spec(path, "float32", quantization=quantization), path, shard=shard)


def nearest_codes(weight: Tensor, bits: int, size: int) -> Tensor:
    """Each group of a row rounded to multiples of its largest value / (2 ** (bits - 1) - 1)."""
    most = (1 << (bits - 1)) - 1
    rounded = torch.empty_like(weight)
    for row in range(weight.shape[0]):
        for first in range(0, weight.shape[1], size):
            group = weight[row, first : first + size]
            scale = group.abs().max() / most
            rounded[row, first : first + size] = torch.round(group / scale) * scale
    return rounded


@pytest.mark.parametrize("quantization", GROUPS)
@pytest.mark.parametrize("shard", [Shard(), Shard(0, 2), Shard(1, 2)])
@pytest.mark.parametrize("variant", ["llama", "qwen3-moe", "gpt-oss"])
def test_each_group_is_rounded_to_its_nearest_codes(
    tmp_path: Path, variant: str, quantization: str, shard: Shard
) -> None:
    source = make_checkpoint(variant, tmp_path / "m")
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if is_linear(name):
            tensors[name] = nearest_codes(tensor, *GROUPS[quantization])
        elif is_joint(name):
            # [inputs, outputs] of each expert.
            codes = [nearest_codes(each.t(), *GROUPS[quantization]).t() for each in tensor]
            tensors[name] = torch.stack(codes)
    plain = write_checkpoint(source, tmp_path / "plain", tensors, None)
    got = held_tensors(load_quantized(source, quantization, shard))
    want = held_tensors(load_quantized(plain, None, shard))
    assert len(got) == len(want)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_groups_of_zeros_stay_zeros(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "m")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.weight"].zero_()
    path = write_checkpoint(source, tmp_path / "zeros", tensors, None)
    o = held_tensors(load_quantized(path, "int4").weights.layers[0].attention)
    assert any(not matrix.any() and matrix.shape == (64, 64) for matrix in o)


def test_model_hash_tells_quantized_weights_apart(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "m")
    hashes = {read_spec(path, quantization=value).model_hash for value in (None, "int8", "int4")}
    assert len(hashes) == 3


def test_checkpoints_that_cannot_be_quantized_at_load_are_refused(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "m")
    quantized, _ = quantize(source, "awq", tmp_path)
    with pytest.raises(ConfigError, match=r"--quantization int8: .* already \(awq\)"):
        check_checkpoint(build_config({"quantization": "int8"}), quantized)
    dummy = {"quantization": "int4", "load_format": "dummy"}
    with pytest.raises(ConfigError, match="--load-format dummy has no weights to quantize"):
        check_checkpoint(build_config(dummy), source)


def test_start_log_says_memory_and_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = make_checkpoint("llama", tmp_path / "m")
    quantized, _ = quantize(source, "packed-int4", tmp_path)
    with caplog.at_level("INFO"):
        load_quantized(source, "int8")
        load_model(quantized, "float16")
    lines = [line for line in caplog.messages if line.startswith("quantized weights")]
    assert "(--quantization): 14 of int8 made at load, groups of 128" in lines[0]
    assert "8 matrices stay quantized" in lines[0]
    assert "(compressed-tensors): 14 of int4, groups of 32" in lines[1]
    assert "dequantized to float16 at load: no kernel computes" in lines[1]
