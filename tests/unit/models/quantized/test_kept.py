"""Matrices that stay quantized in memory: how much they take, and what they compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.layers import ops
from baton.layers.shard import WHOLE, Shard
from baton.models.blocks.moe import MoeBlock
from baton.models.checkpoint import check_files
from baton.models.decoder import Decoder
from baton.models.load import load_weights
from baton.models.spec_reader import read_spec
from tests.support.models.checkpoints import VOCAB, make_checkpoint
from tests.support.models.model_loop import ModelLoop
from tests.support.models.quantized_checkpoints import encode_gptq, quantize
from tests.support.models.whole_model import load_model

if ops.quantized_kernel(torch.float32, torch.device("cpu")) is None:
    pytest.skip("native CPU kernels are not built", allow_module_level=True)

from baton.layers.ops_cpu import PackedWeight, QuantizedWeight

FORMATS = ["fp8-ragged", "int-asymmetric", "packed-int5", "awq", "gptq-int2"]
REORDERED = ["packed-int4-order", "gptq-order"]


def packed_logits(path: Path, dtype: str, prompt: list[int]) -> torch.Tensor:
    model = load_model(path, dtype)
    model.pack()
    return ModelLoop(model, "cpu", page_size=4).prompt_logits(prompt, 7)


def both_logits(
    tmp_path: Path, variant: str, name: str, dtype: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a quantized checkpoint, and of its numbers as a plain one."""
    quantized, plain = quantize(make_checkpoint(variant, tmp_path / "m"), name, tmp_path)
    layer = load_model(quantized, dtype).weights.layers[0]
    matrix = layer.mlp.down[0] if isinstance(layer.mlp, MoeBlock) else layer.attention.qkv
    assert isinstance(matrix, QuantizedWeight)
    prompt = torch.randint(0, VOCAB, (33,), generator=torch.Generator().manual_seed(1)).tolist()
    return packed_logits(quantized, dtype, prompt), packed_logits(plain, dtype, prompt)


@pytest.mark.parametrize(
    ("variant", "name"), [*(("llama", name) for name in FORMATS), ("gpt-oss", "mxfp4")]
)
def test_logits_are_those_of_dequantized_weights(tmp_path: Path, variant: str, name: str) -> None:
    ours, plain = both_logits(tmp_path, variant, name, "float32")
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_not_rounded_to_bfloat16(tmp_path: Path, name: str) -> None:
    source = make_checkpoint("llama", tmp_path / "m")
    quantized, _ = quantize(source, name, tmp_path)
    matrix = load_model(quantized, "bfloat16").weights.layers[0].mlp.gate_up
    exact = load_model(quantized, "float32").weights.layers[0].mlp.gate_up
    assert isinstance(matrix, QuantizedWeight)
    assert isinstance(exact, QuantizedWeight)
    x = torch.randn(300, matrix.shape[1], generator=torch.Generator().manual_seed(2)).bfloat16()
    numbers = exact.gather_rows(torch.arange(exact.shape[0])).double()
    want = x.double() @ numbers.t()
    # Only the result is rounded, to 8 bits.
    room = want.abs() * 2**-8 + 1e-5
    assert ((matrix.multiply(x).double() - want).abs() <= room).all()


@pytest.mark.parametrize("name", REORDERED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_with_reordered_groups_are_those_of_dequantized_weights_to_the_bit(
    tmp_path: Path, name: str, dtype: str
) -> None:
    assert torch.equal(*both_logits(tmp_path, "llama", name, dtype))


@pytest.mark.parametrize("code_type", ["int4", "fp8"])
def test_zero_points_without_exact_differences_are_refused(code_type: Any) -> None:
    with pytest.raises(ValueError, match=f"zero point 0.5 of {code_type} codes"):
        QuantizedWeight(
            code_type,
            torch.zeros(3, 4, dtype=torch.uint8),
            scales=torch.ones(3, 1),
            zeros=torch.full((3, 1), 0.5),
            column_group=torch.zeros(4, dtype=torch.int32),
            dtype=torch.float32,
        )


@pytest.mark.parametrize("name", ["fp8-block", "int-quantized", "awq", "packed-int4", "mxfp4"])
@pytest.mark.parametrize("shard", [WHOLE, Shard(1, 2)])
def test_memory_that_a_start_checks_is_what_the_weights_take(
    tmp_path: Path, name: str, shard: Shard
) -> None:
    # Rows are whole panels of the kernels, whose padding is not counted.
    variant = "gpt-oss" if name == "mxfp4" else "qwen3-moe"
    source = make_checkpoint(variant, tmp_path / "m")
    quantized, _ = quantize(source, name, tmp_path)
    spec = read_spec(quantized, "bfloat16")
    expected = check_files(spec, quantized, shard).memory(spec)
    got = sum(matrix_bytes(load_weights(spec, quantized, shard=shard)))
    assert 0.75 * expected < got < 1.8 * expected
    plain = read_spec(source, "bfloat16")
    assert expected < 0.9 * check_files(plain, source, shard).memory(plain)


def matrix_bytes(decoder: Decoder) -> list[int]:
    weights = decoder.weights
    layers: list[Any] = []
    for layer in weights.layers:
        layers += [layer.attention.qkv, layer.attention.o, *layer.mlp.gate_up, *layer.mlp.down]
        layers.append(layer.mlp.router)
    return [each.nbytes for each in (weights.embed, weights.lm_head, *layers)]


def test_projections_in_different_forms_are_dequantized(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "m")
    path, _ = quantize(source, "gptq", tmp_path)
    dense = load_file(source / "model.safetensors")["model.layers.0.self_attn.k_proj.weight"]
    how: dict[str, Any] = {"bits": 4, "group_size": 16, "symmetric": True, "version": 1}
    encoded = encode_gptq(dense, **how)
    tensors = load_file(path / "model.safetensors")
    tensors |= {f"model.layers.0.self_attn.k_proj.{k}": v for k, v in encoded.tensors.items()}
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["dynamic"] = {r"+:.*\.0\..*k_proj": {"group_size": 16}}
    (path / "config.json").write_text(json.dumps(config))
    layers = load_model(path).weights.layers
    assert isinstance(layers[1].attention.qkv, QuantizedWeight)
    assert isinstance(layers[0].attention.qkv, torch.Tensor)
    assert torch.equal(layers[0].attention.qkv[64:96], encoded.dense)


def test_rows_outside_a_weight_and_other_inputs_are_refused() -> None:
    weight = QuantizedWeight(
        "int8",
        torch.full((3, 4), 9, dtype=torch.uint8),
        scales=torch.ones(3, 1),
        zeros=1.0,
        column_group=torch.zeros(4, dtype=torch.int32),
        dtype=torch.float32,
    )
    assert torch.equal(weight.multiply(torch.ones(2, 4)), torch.full((2, 3), 32.0))
    with pytest.raises(ValueError, match="row 3 is outside a matrix of 3"):
        weight.gather_rows(torch.tensor([3]))
    with pytest.raises(ValueError, match=r"not torch\.float32"):
        weight.multiply(torch.ones(2, 4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="group 2 is outside a matrix of 1"):
        QuantizedWeight(
            "int4",
            torch.zeros(3, 4, dtype=torch.uint8),
            scales=torch.ones(3, 1),
            zeros=torch.zeros(3, 1),
            column_group=torch.full((4,), 2, dtype=torch.int32),
            dtype=torch.float32,
        )


def test_packed_weight_of_the_rows_multiplies_alike() -> None:
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 16, (70, 101), generator=generator).to(torch.uint8)
    weight = QuantizedWeight(
        "int4",
        codes,
        scales=torch.rand(70, 4, generator=generator),
        zeros=torch.randint(0, 16, (70, 4), generator=generator).float(),
        column_group=torch.randint(0, 4, (101,), generator=generator).int(),
        dtype=torch.bfloat16,
    )
    rows = weight.gather_rows(torch.arange(70))
    x = torch.randn(5, 101, generator=generator).bfloat16()
    assert torch.equal(weight.multiply(x), PackedWeight(rows).multiply(x))
