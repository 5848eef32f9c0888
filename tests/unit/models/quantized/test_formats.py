"""Every quantized format is loaded as the numbers that it means, whole and divided among ranks."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.errors import ConfigError
from baton.layers.shard import Shard
from baton.models.load import load_weights
from baton.models.spec_reader import read_spec
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.quantized_checkpoints import (
    FORMATS,
    FP8,
    Encoded,
    Format,
    is_linear,
    quantize,
    write_checkpoint,
)
from tests.support.models.whole_model import held_tensors

SHARDS = [Shard(), Shard(0, 2), Shard(1, 2)]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory):
    """quantized(variant, format): directories of the quantized checkpoint and its plain twin."""
    root = tmp_path_factory.mktemp("quantized")

    @cache
    def source(variant: str) -> Path:
        return make_checkpoint(variant, root / variant)

    @cache
    def make(variant: str, name: str) -> tuple[Path, Path]:
        return quantize(source(variant), name, root / f"{variant}-{name}")

    return make


def loaded(path: Path, shard: Shard, dtype: str) -> list[Tensor]:
    return held_tensors(load_weights(read_spec(path, dtype), path, shard=shard))


def assert_equal_models(pair: tuple[Path, Path], shard: Shard, dtype: str = "float32") -> None:
    got, want = (loaded(path, shard, dtype) for path in pair)
    assert len(got) == len(want)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shard", SHARDS, ids=["whole", "first", "second"])
def test_numbers_are_those_of_the_formula_to_the_bit(quantized, name: str, shard: Shard) -> None:
    assert_equal_models(quantized("llama", name), shard)


@pytest.mark.parametrize("name", ["fp8-ragged", "packed-int4-zeros", "awq", "gptq-order"])
def test_numbers_are_rounded_once_to_the_compute_type(quantized, name: str) -> None:
    assert_equal_models(quantized("llama", name), Shard(1, 2), "bfloat16")


@pytest.mark.parametrize("name", ["fp8-ragged", "packed-int5", "awq", "gptq-int3"])
@pytest.mark.parametrize("variant", ["phi3", "qwen3-moe"])
@pytest.mark.parametrize("shard", SHARDS, ids=["whole", "first", "second"])
def test_fused_projections_and_experts_are_cut_right(
    quantized, variant: str, name: str, shard: Shard
) -> None:
    assert_equal_models(quantized(variant, name), shard)


def test_scales_of_activations_and_of_the_cache_are_left_alone(quantized, tmp_path: Path) -> None:
    path, plain = quantized("llama", "fp8-static")
    copy = shutil.copytree(path, tmp_path / "m")
    tensors = load_file(copy / "model.safetensors")
    assert "model.layers.0.mlp.up_proj.input_scale" in tensors
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.5)
    tensors["model.layers.0.self_attn.k_proj.output_scale"] = torch.tensor(0.5)
    save_file(tensors, copy / "model.safetensors")
    assert_equal_models((copy, plain), Shard())


@pytest.mark.parametrize("name", ["fp8-block", "fp8-ragged", "fp8-tensor"])
@pytest.mark.parametrize("has_halves", [True, False])
@pytest.mark.parametrize(
    "shard",
    [*SHARDS, Shard(1, 2, divides_experts=True)],
    ids=["whole", "first", "second", "experts"],
)
def test_experts_in_one_fp8_tensor_are_cut_right(
    quantized, tmp_path: Path, name: str, has_halves: bool, shard: Shard
) -> None:
    """Scales of gate and up follow each other, or blocks run over the border between them."""
    _, plain = quantized("qwen3-moe", name)
    joined, twin = join_experts(plain, FORMATS[name], tmp_path, has_halves=has_halves)
    assert_equal_models((joined, twin), shard)


def put_together(path: Path, folder: Path) -> Path:
    """The checkpoint with each kind of tensor of a layer's experts as one, gate above up."""
    tensors = load_file(path / "model.safetensors")
    joined = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name in tensors:
        prefix, is_expert, projection = name.partition(".experts.0.")
        if not is_expert or projection.startswith("up_proj."):
            continue
        experts = []
        for expert in range(8):
            one = tensors[f"{prefix}.experts.{expert}.{projection}"]
            if projection.startswith("gate_proj."):
                up = projection.replace("gate_proj", "up_proj")
                one = torch.cat((one, tensors[f"{prefix}.experts.{expert}.{up}"]))
            experts.append(one)
        joint = projection.replace("gate_proj", "gate_up_proj").replace(".weight", "")
        joined[f"{prefix}.experts.{joint}"] = torch.stack(experts)
    config = json.loads((path / "config.json").read_text())
    return write_checkpoint(path, folder, joined, config.get("quantization_config"))


@pytest.mark.parametrize("name", ["int-quantized", "int-asymmetric", "float-quantized"])
@pytest.mark.parametrize("shard", [Shard(1, 2), Shard(1, 2, divides_experts=True)], ids=str)
def test_experts_in_one_tensor_of_scaled_codes_are_those_stored_one_by_one(
    quantized, tmp_path: Path, name: str, shard: Shard
) -> None:
    path, _ = quantized("qwen3-moe", name)
    assert_equal_models((put_together(path, tmp_path / "joined"), path), shard)


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("shard", [Shard(1, 2), Shard(1, 2, divides_experts=True)], ids=str)
def test_experts_in_one_tensor_are_quantized_at_load_like_those_stored_one_by_one(
    tmp_path: Path, name: str, shard: Shard
) -> None:
    path = make_checkpoint("qwen3-moe", tmp_path / "m")
    joined = put_together(path, tmp_path / "joined")
    got, want = (
        held_tensors(load_weights(read_spec(each, "float32", quantization=name), each, shard=shard))
        for each in (joined, path)
    )
    assert len(got) == len(want)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("name", ["packed-int4", "awq", "gptq"])
def test_packed_words_of_several_experts_in_one_tensor_are_refused(
    quantized, tmp_path: Path, name: str
) -> None:
    path, _ = quantized("qwen3-moe", name)
    joined = put_together(path, tmp_path / "joined")
    with pytest.raises(ConfigError, match=r"missing tensor model.layers.0.mlp.experts.0.gate_proj"):
        loaded(joined, Shard(), "float32")


def join_experts(plain: Path, made: Format, folder: Path, *, has_halves: bool) -> tuple[Path, Path]:
    """The checkpoint with the experts of a layer quantized in one tensor, and its plain twin."""
    dense = load_file(plain / "model.safetensors")
    quantized: dict[str, Tensor] = {}
    twin = dict(dense)
    for name, tensor in dense.items():
        if not is_linear(name):
            quantized[name] = tensor
        elif "experts." not in name:
            encoded = made.encode(tensor)
            twin[name] = encoded.dense
            quantized[name] = encoded.tensors["weight"]
            quantized[f"{name}_scale_inv"] = encoded.tensors["weight_scale_inv"]
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate_up = []
        down = []
        for expert in range(8):
            gate, up, last = (f"{prefix}.{expert}.{x}_proj.weight" for x in ("gate", "up", "down"))
            if has_halves:
                halves = [made.encode(dense[gate]), made.encode(dense[up])]
            else:
                halves = [made.encode(torch.cat((dense[gate], dense[up])))]
            gate_up.append(stack_rows(halves))
            down.append(made.encode(dense[last]))
            whole = torch.cat([half.dense for half in halves])
            twin |= {gate: whole[:32], up: whole[32:], last: down[-1].dense}
        for role, experts in (("gate_up_proj", gate_up), ("down_proj", down)):
            codes = [each.tensors["weight"].view(torch.uint8) for each in experts]
            scales = [as_grid(each.tensors["weight_scale_inv"]) for each in experts]
            quantized[f"{prefix}.{role}"] = torch.stack(codes).view(FP8)
            quantized[f"{prefix}.{role}_scale_inv"] = torch.stack(scales)
    return (
        write_checkpoint(plain, folder / "joined", quantized, made.config),
        write_checkpoint(plain, folder / "twin", twin, None),
    )


def as_grid(scales: Tensor) -> Tensor:
    return scales if scales.dim() == 2 else scales.reshape(1, 1)


def stack_rows(parts: list[Encoded]) -> Encoded:
    codes = torch.cat([part.tensors["weight"].view(torch.uint8) for part in parts]).view(FP8)
    scales = torch.cat([as_grid(part.tensors["weight_scale_inv"]) for part in parts])
    tensors = {"weight": codes, "weight_scale_inv": scales}
    return Encoded(tensors, torch.cat([part.dense for part in parts]))
