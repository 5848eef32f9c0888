"""MXFP4 experts of gpt-oss: the numbers are those that transformers dequantizes, whole and
divided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.errors import ConfigError
from baton.layers.shard import WHOLE, Shard
from baton.models.blocks.moe import MoeBlock
from baton.models.load import load_weights
from baton.models.spec_reader import read_spec
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.quantized_checkpoints import quantize
from tests.support.models.whole_model import held_tensors, load_model

EXPERTS = "model.layers.1.mlp.experts."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mxfp4")
    return quantize(make_checkpoint("gpt-oss", root / "m"), "mxfp4", root)[0]


def dequantized_by_transformers(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, quantization_config=Mxfp4Config(dequantize=True)
    )
    tensors: dict[str, Tensor] = model.state_dict()
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shard", [WHOLE, Shard(1, 2), Shard(1, 2, divides_experts=True)], ids=["whole", "inner", "ep"]
)
def test_numbers_are_those_of_transformers_to_the_bit(
    checkpoint: Path, shard: Shard, dtype: torch.dtype
) -> None:
    theirs = dequantized_by_transformers(checkpoint, dtype)
    spec = read_spec(checkpoint, str(dtype).removeprefix("torch."))
    mlp = load_weights(spec, checkpoint, shard=shard).weights.layers[1].mlp
    assert isinstance(mlp, MoeBlock)
    # 96 inner dimensions: the second rank of two begins within a block of 32.
    inner = slice(0, 96) if shard.divides_experts else shard.slice_of(96)
    for own, expert in enumerate(mlp.spec.held_experts):
        both = theirs[f"{EXPERTS}gate_up_proj"][expert].t()
        want = torch.cat((both[0::2][inner], both[1::2][inner]))
        assert torch.equal(held_tensors(mlp.gate_up)[own], want)
        want = theirs[f"{EXPERTS}down_proj"][expert].t()[:, inner]
        assert torch.equal(held_tensors(mlp.down)[own], want)


def edit_tensors(path: Path, changes: dict[str, Tensor | None], folder: Path) -> Path:
    """A copy with other tensors; None removes one."""
    tensors: dict[str, Tensor | None] = {**load_file(path / "model.safetensors"), **changes}
    left = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    folder.mkdir()
    (folder / "config.json").write_text((path / "config.json").read_text())
    save_file(left, folder / "model.safetensors")
    return folder


def test_damaged_experts_are_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    scales = f"{EXPERTS}down_proj_scales"
    blocks = f"{EXPERTS}down_proj_blocks"
    stored = load_file(checkpoint / "model.safetensors")
    exponents = stored[scales].clone()
    exponents[3, 0, 0] = 255
    wrong: list[tuple[dict[str, Tensor | None], str]] = [
        ({scales: None}, rf"missing tensor {scales}, which MXFP4"),
        ({blocks: None}, rf"missing tensor {blocks}|unexpected tensor {scales}"),
        ({blocks: stored[blocks][..., :8].contiguous()}, rf"{blocks} is .*implies .*16\]"),
        (
            {scales: exponents},
            r"down_proj: (a code or )?a scale is no finite number; the file is damaged",
        ),
        (
            {blocks: None, scales: None, f"{EXPERTS}down_proj": torch.ones(8, 96, 64)},
            r"experts\.down_proj is plain F32 without a scale, but quantization_config states MXFP4",
        ),
    ]
    for number, (changes, words) in enumerate(wrong):
        path = edit_tensors(checkpoint, changes, tmp_path / str(number))
        with pytest.raises(ConfigError, match=words):
            load_model(path)


def test_joint_experts_in_other_forms_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    changes: dict[str, Tensor | None] = {}
    for layer in range(3):
        for name, shape in (("gate_up", (8, 64, 192)), ("down", (8, 96, 64))):
            source = f"model.layers.{layer}.mlp.experts.{name}_proj"
            changes |= {f"{source}_blocks": None, f"{source}_scales": None}
            changes[source] = torch.zeros(shape).to(torch.float8_e4m3fn)
    path = edit_tensors(checkpoint, changes, tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="are read as plain numbers or MXFP4"):
        load_model(path)
