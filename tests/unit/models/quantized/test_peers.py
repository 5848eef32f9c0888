"""Quantized checkpoints mean to transformers and compressed-tensors what they mean here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from baton.layers.kv_spec import FP8, KvScales
from baton.models.spec_reader import read_spec
from tests.support.models.checkpoints import make_checkpoint, reference_model
from tests.support.models.quantized_checkpoints import (
    FORMATS,
    encode_scaled,
    is_linear,
    quantize,
    write_checkpoint,
)
from tests.support.models.whole_model import held_tensors, load_model


def assert_equal_models(quantized: Path, plain: Path, dtype: str = "float32") -> None:
    got, want = (held_tensors(load_model(path, dtype)) for path in (quantized, plain))
    assert len(got) == len(want)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


COMPRESSED = [name for name in FORMATS if name.startswith(("packed", "int-", "float-"))]
COMPRESSED.remove("packed-int4-order")  # the package reads reordered groups no longer


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize("name", COMPRESSED)
def test_transformers_decompresses_to_the_same_numbers(tmp_path: Path, name: str) -> None:
    pytest.importorskip("compressed_tensors", reason="exists for Python 3.11 and newer")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    quantized, _ = quantize(make_checkpoint("llama", tmp_path / "m"), name, tmp_path)
    # The package computes in the type of the scales, which is bfloat16 in packed files.
    dtype = "bfloat16" if name.startswith("packed") else "float32"
    model = AutoModelForCausalLM.from_pretrained(
        quantized,
        dtype=getattr(torch, dtype),
        quantization_config=CompressedTensorsConfig(dequantize=True),
    )
    tensors = {key: value.detach() for key, value in model.state_dict().items()}
    plain = write_checkpoint(quantized, tmp_path / "theirs", tensors, None)
    assert_equal_models(quantized, plain, dtype)


@pytest.mark.parametrize(
    ("bits", "strategy", "group_size", "symmetric"),
    [
        (4, "group", 32, True),
        (4, "group", 32, False),
        (8, "channel", None, True),
        (3, "group", 16, False),
    ],
)
def test_weights_that_compressed_tensors_packs_are_read_right(
    tmp_path: Path, bits: int, strategy: str, group_size: int | None, symmetric: bool
) -> None:
    pytest.importorskip("compressed_tensors", reason="exists for Python 3.11 and newer")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(
        num_bits=bits, type="int", strategy=strategy, group_size=group_size, symmetric=symmetric
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format="pack-quantized")
    compressor: Any = BaseCompressor.get_value_from_registry("pack-quantized")
    source = make_checkpoint("llama", tmp_path / "m")
    quantized: dict[str, Tensor] = {}
    theirs: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not is_linear(name):
            quantized[name] = theirs[name] = tensor
            continue
        groups = tensor.unflatten(1, (-1, group_size or tensor.shape[1]))
        low, high = groups.amin(2), groups.amax(2)
        most = (1 << bits) - 1
        scale = (high - low) / most if not symmetric else groups.abs().amax(2) / (most / 2)
        state = {"weight": tensor, "weight_scale": scale}
        if not symmetric:
            zero = torch.round(-(1 << (bits - 1)) - low / scale)
            limit = 1 << (bits - 1)
            state["weight_zero_point"] = zero.clamp(-limit, limit - 1).to(torch.int8)
        packed = compressor.compress(state, scheme)
        theirs[name] = compressor.decompress(dict(packed), scheme)["weight"]
        module = name.removesuffix("weight")
        quantized |= {f"{module}{role}": value.contiguous() for role, value in packed.items()}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args.model_dump()}},
    }
    ours = write_checkpoint(source, tmp_path / "ours", quantized, config)
    assert_equal_models(ours, write_checkpoint(source, tmp_path / "theirs", theirs, None))


@pytest.mark.parametrize("powers_of_two", [False, True])
def test_transformers_dequantizes_fp8_blocks_to_the_same_numbers(
    tmp_path: Path, powers_of_two: bool
) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    block = (16, 32)
    source = make_checkpoint("llama", tmp_path / "m")
    quantized: dict[str, Tensor] = {}
    theirs: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not is_linear(name):
            quantized[name] = theirs[name] = tensor
            continue
        encoded = encode_scaled(tensor, block, "weight_scale_inv", powers_of_two=powers_of_two)
        theirs[name] = Fp8Dequantize(None).convert(dict(encoded.tensors))["weight"]
        module = name.removesuffix("weight")
        quantized |= {f"{module}{role}": value for role, value in encoded.tensors.items()}
    config = {"quant_method": "fp8", "weight_block_size": list(block)}
    config["scale_fmt"] = "ue8m0" if powers_of_two else "float"
    ours = write_checkpoint(source, tmp_path / "ours", quantized, config)
    plain = write_checkpoint(source, tmp_path / "theirs", theirs, None)
    # Without a type to round to, transformers rounds to bfloat16 where scales are exponents.
    assert_equal_models(ours, plain, "bfloat16" if powers_of_two else "float32")


def test_scales_of_a_cache_that_compressed_tensors_quantizes_are_read(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="exists for Python 3.11 and newer")
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    plain = make_checkpoint("llama", tmp_path / "m")
    scheme = QuantizationConfig(
        config_groups={},
        kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor"},
        quantization_status="compressed",
    )
    model = reference_model(plain)
    apply_quantization_config(model, scheme)
    tensors = {key: value.detach().clone() for key, value in model.state_dict().items()}
    scales = [name for name in tensors if name.endswith("_scale")]
    assert len(scales) == 4, "of K and V in two layers"
    for number, name in enumerate(scales):
        tensors[name].fill_(0.25 * (1 + number))
    path = write_checkpoint(plain, tmp_path / "theirs", tensors, scheme.to_dict())
    assert read_spec(path, kv_cache_dtype=FP8).kv_scales == (
        KvScales(0.25, 0.5),
        KvScales(0.75, 1.0),
    )
    assert_equal_models(path, plain)
