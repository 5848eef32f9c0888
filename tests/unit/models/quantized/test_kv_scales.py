"""Scales of the KV cache: read under the names that writers of checkpoints use, or refused."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.config import build_config
from baton.errors import ConfigError
from baton.layers.kv_spec import FP8, KvScales
from baton.models.checkpoint import check_checkpoint
from baton.models.spec.model import ModelSpec
from baton.models.spec_reader import read_spec
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.quantized_checkpoints import FORMATS, quantize

LAYERS = 2
WRITTEN = (KvScales(0.5, 0.25), KvScales(1.5, 0.0625))


def of_layers(key: str, value: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Scales WRITTEN under these names behind self_attn."""
    return {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor(number, dtype=dtype)
        for layer, scales in enumerate(WRITTEN)
        for name, number in ((key, scales.key), (value, scales.value))
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("scales") / "plain")


@pytest.fixture
def with_scales(plain: Path, tmp_path: Path):
    """with_scales(tensors, quantization_config): the checkpoint with these beside its own."""

    def make(tensors: Mapping[str, Tensor], quantization: dict[str, Any] | None = None) -> Path:
        path = tmp_path / "m"
        path.mkdir()
        for file in plain.iterdir():
            (path / file.name).write_bytes(file.read_bytes())
        every = load_file(plain / "model.safetensors") | dict(tensors)
        save_file(every, path / "model.safetensors")
        if quantization is not None:
            config = json.loads((path / "config.json").read_text())
            config["quantization_config"] = quantization
            (path / "config.json").write_text(json.dumps(config))
        return path

    return make


def check(path: Path, kv_cache_dtype: str = FP8) -> None:
    check_checkpoint(
        build_config({"model_path": str(path), "kv_cache_dtype": kv_cache_dtype, "device": "cpu"}),
        path,
    )


def read(path: Path) -> ModelSpec:
    check(path)
    return read_spec(path, kv_cache_dtype=FP8)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("k_scale", "v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_are_found_by_every_name_and_type(
    with_scales, key: str, value: str, dtype: torch.dtype
) -> None:
    spec = read(with_scales(of_layers(key, value, dtype)))
    assert spec.kv_scales == WRITTEN
    group = spec.kv_spec(16).full_group
    assert (group.dtype, group.scales) == (FP8, WRITTEN)


def test_one_scale_of_both_is_that_of_each(with_scales) -> None:
    names = {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor([0.5]) for layer in (0, 1)}
    assert read(with_scales(names)).kv_scales == (KvScales(0.5, 0.5),) * LAYERS


def test_checkpoint_without_scales_has_ones_and_says_so(
    plain: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert read(plain).kv_scales == (KvScales(),) * LAYERS
    assert "no k_scale and v_scale, and all are 1" in caplog.text
    assert read_spec(plain).kv_scales == ()


def test_scales_of_a_quantized_checkpoint_are_read(plain: Path, tmp_path: Path) -> None:
    path, _ = quantize(plain, "fp8-static", tmp_path)
    tensors = load_file(path / "model.safetensors") | of_layers("k_scale", "v_scale")
    save_file(tensors, path / "model.safetensors")
    assert read(path).kv_scales == WRITTEN
    check(path, "auto")


KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def scheme(**changes: Any) -> dict[str, Any]:
    """`quantization_config` with a `kv_cache_scheme`, and no matrix that is quantized."""
    return FORMATS["float-quantized"].config | {
        "ignore": ["Linear"],
        "kv_cache_scheme": KV_SCHEME | changes,
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"type": "int"}, ["kv_cache_scheme.type", "int", "float"]),
        ({"num_bits": 4}, ["kv_cache_scheme.num_bits", "4", "8"]),
        ({"strategy": "attn_head"}, ["kv_cache_scheme.strategy", "attn_head", "tensor"]),
        ({"dynamic": True}, ["kv_cache_scheme.dynamic", "true", "false"]),
    ],
)
def test_scheme_of_another_cache_is_refused(
    with_scales, changes: dict[str, Any], words: list[str]
) -> None:
    path = with_scales(of_layers("k_scale", "v_scale"), scheme(**changes))
    with pytest.raises(ConfigError) as refused:
        read(path)
    for word in [*words, "--kv-cache-dtype auto"]:
        assert word in refused.value.message
    check(path, "auto")


def test_scales_of_a_stated_scheme_are_read(with_scales) -> None:
    assert read(with_scales(of_layers("k_scale", "v_scale"), scheme())).kv_scales == WRITTEN


def test_lost_scales_of_a_stated_scheme_are_named(with_scales) -> None:
    with pytest.raises(ConfigError, match=r"k_scale of layer 0 is missing \(4 in all\)"):
        read(with_scales({}, scheme()))


def changed(name: str, tensor: Tensor | None) -> dict[str, Tensor]:
    tensors = of_layers("k_scale", "v_scale")
    full_name = f"model.layers.1.self_attn.{name}"
    if tensor is None:
        del tensors[full_name]
    else:
        tensors[full_name] = tensor
    return tensors


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        ("k_scale", None, "k_scale of layer 1 is missing (1 in all)"),
        ("v_scale", None, "v_scale of layer 1 is missing (1 in all)"),
        ("k_scale", torch.tensor(0.0), "it is 0, and a positive number is needed"),
        ("v_scale", torch.tensor(-1.0), "it is -1, and a positive number is needed"),
        ("v_scale", torch.tensor(torch.nan), "it is nan, and a positive number is needed"),
        ("k_scale", torch.tensor(torch.inf), "it is inf, and a positive number is needed"),
        ("k_scale", torch.ones(2, 1, 1), "it has 2 numbers, and one per layer is supported"),
        ("k_scale", torch.ones(0), "it has 0 numbers, and one per layer is supported"),
        ("v_scale", torch.tensor(1), "it is I64, and one of F32, BF16, F16 is needed"),
        ("k_proj.k_scale", torch.tensor(1.0), "k_proj.k_scale is there, too"),
    ],
)
def test_damaged_scale_is_refused_by_name(
    with_scales, name: str, tensor: Tensor | None, problem: str
) -> None:
    path = with_scales(changed(name, tensor))
    with pytest.raises(ConfigError, match=re.escape(problem)) as refused:
        read(path)
    assert "--kv-cache-dtype auto" in refused.value.message


def test_scales_that_nothing_reads_are_unexpected_tensors(with_scales) -> None:
    path = with_scales(of_layers("k_scale", "v_scale"))
    with pytest.raises(ConfigError, match=r"unexpected tensor .*self_attn\.[kv]_scale"):
        check(path, "auto")


def test_gpu_gets_the_pages_of_the_cpu(plain: Path) -> None:
    on_gpu, on_cpu = (
        read_spec(plain, on_cpu=where, kv_cache_dtype=FP8).kv_spec(16) for where in (False, True)
    )
    assert on_gpu.groups == on_cpu.groups


def test_latents_are_refused_by_name(tmp_path: Path) -> None:
    path = make_checkpoint("deepseek-v3", tmp_path / "m")
    with pytest.raises(ConfigError, match=r"fp8_e4m3: latent attention keeps .*; use .* auto"):
        read_spec(path, kv_cache_dtype=FP8)


def test_random_weights_have_scales_of_one(with_scales) -> None:
    path = with_scales(of_layers("k_scale", "v_scale"), scheme())
    spec = read_spec(path, load_format="dummy", kv_cache_dtype=FP8)
    assert spec.kv_scales == (KvScales(),) * LAYERS
