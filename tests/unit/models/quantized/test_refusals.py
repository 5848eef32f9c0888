"""What a quantized checkpoint must not have ends the start with a sentence that names it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.config import build_config
from baton.errors import ConfigError
from baton.models.checkpoint import check_checkpoint
from baton.models.config_file import ModelConfig
from baton.models.quantized.methods import read_quantization
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.quantized_checkpoints import FORMATS, is_linear, quantize
from tests.support.models.whole_model import load_model

AWQ = FORMATS["awq"].config
GPTQ = FORMATS["gptq"].config
FP8 = FORMATS["fp8-block"].config
PACKED = FORMATS["packed-int4"].config


def with_weights(**changes: Any) -> dict[str, Any]:
    """compressed-tensors' config with other fields of the weights."""
    group = PACKED["config_groups"]["group_0"]
    weights = {k: v for k, v in (group["weights"] | changes).items() if v is not ...}
    return PACKED | {"config_groups": {"group_0": group | {"weights": weights}}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("awq", ["quantization_config", "an object"]),
        ({}, ["quant_method = null", "fp8, awq, gptq"]),
        ({"quant_method": "bitsandbytes"}, ["bitsandbytes", "model.dequantize()"]),
        ({"quant_method": "gguf"}, ["gguf", "gguf_file", "save_pretrained"]),
        ({"quant_method": "mxfp4", "block_size": 16}, ["block_size = 16", "not known here"]),
        ({"quant_method": "quark"}, ["quark", "use the unquantized checkpoint"]),
        (AWQ | {"version": "gemv"}, ["version", "gemv", "gemm"]),
        (AWQ | {"bits": 8}, ["bits = 8", "4 is needed"]),
        (AWQ | {"rotation": 3}, ["rotation = 3", "could change what the weights mean"]),
        (GPTQ | {"bits": 5}, ["bits = 5", "2, 3, 4, 8"]),
        (GPTQ | {"checkpoint_format": "marlin"}, ["checkpoint_format", "marlin", "gptq_v2"]),
        (GPTQ | {"group_size": 0}, ["group_size = 0"]),
        (GPTQ | {"dynamic": {"-:(": {}}}, ["dynamic", "-:(", "regular expression"]),
        (GPTQ | {"dynamic": {"+:x": {"hessian": 1}}}, ["dynamic.+:x.hessian"]),
        (GPTQ | {"pack_dtype": "int16"}, ["pack_dtype", "int16", "int32"]),
        (FP8 | {"weight_block_size": [128]}, ["weight_block_size", "[128]"]),
        (FP8 | {"fmt": "e5m2"}, ["fmt", "e5m2", "e4m3"]),
        (FP8 | {"expert_dtype": "fp4"}, ["expert_dtype", "fp4"]),
        (FP8 | {"ignored_layers": ["("]}, ["ignored_layers", "regular expression"]),
        (PACKED | {"format": "nvfp4-pack-quantized"}, ["nvfp4-pack-quantized", "pack-quantized"]),
        (PACKED | {"config_groups": {}}, ["config_groups"]),
        (PACKED | {"transform_config": {"x": 1}}, ["transform_config", "only quantized"]),
        (PACKED | {"ignore": ["re:("]}, ["ignore", "regular expression"]),
        (with_weights(num_bits=9), ["num_bits = 9"]),
        (with_weights(type="float"), ["pack-quantized", "integers"]),
        (with_weights(dynamic=True), ["dynamic"]),
        (with_weights(strategy="tensor"), ["strategy", "channel, group"]),
        (with_weights(secret=1), ["config_groups.group_0.weights.secret"]),
    ],
)
def test_config_is_refused_by_field_and_value(config: Any, words: list[str]) -> None:
    read = ModelConfig(Path("config.json"), {"quantization_config": config})
    with pytest.raises(ConfigError) as refused:
        read_quantization(read, Path("nowhere"))
    for word in words:
        assert word in refused.value.message


def test_modelopt_is_refused_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"hf_quant_config.*modelopt.*unquantized"):
        read_quantization(ModelConfig(tmp_path / "config.json", {}), tmp_path)


def test_directory_of_gguf_files_says_how_to_convert(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "m")
    (path / "model.safetensors").rename(path / "model-q4.gguf")
    with pytest.raises(ConfigError, match=r"model-q4\.gguf.*gguf_file.*save_pretrained"):
        check_checkpoint(build_config({}), path)


K = "model.layers.1.self_attn.k_proj"
UP = "model.layers.0.mlp.up_proj"
Edit = Callable[[dict[str, Tensor], dict[str, Any]], Any]


def plain(tensors: dict[str, Tensor], module: str, *roles: str) -> None:
    """Replace a quantized matrix by plain numbers."""
    for role in roles:
        del tensors[f"{module}.{role}"]
    tensors[f"{module}.weight"] = torch.zeros(96 if module == UP else 32, 64)


def number(index: int, value: float) -> Callable[[Tensor], None]:
    def edit(tensor: Tensor) -> None:
        tensor.view(-1)[index] = value

    return edit


CASES: list[tuple[str, Edit, list[str]]] = [
    (
        "fp8-block",
        lambda t, c: t.pop(f"{K}.weight_scale_inv"),
        [f"missing tensor {K}.weight_scale_inv, which FP8, a scale per 128 x 128 block needs"],
    ),
    (
        "fp8-ragged",
        lambda t, c: t.update({f"{UP}.weight_scale_inv": torch.ones(4, 1, dtype=torch.uint8)}),
        [f"{UP}.weight_scale_inv is [4, 1]", "24 x 40 block", "implies [4, 2]"],
    ),
    (
        "fp8-block",
        lambda t, c: t.update({f"{UP}.weight_scale_inv": torch.ones(1, 1).byte()}),
        [f"{UP}.weight_scale_inv is U8", "implies F32"],
    ),
    (
        "fp8-block",
        lambda t, c: c.update(modules_to_not_convert=["lm_head", "k_proj"]),
        [f"{K}.weight_scale_inv says that {K} is quantized", 'not_convert lists "k_proj"'],
    ),
    (
        "fp8-block",
        lambda t, c: t.update({f"{K}.weight": torch.zeros(32, 64)}),
        [f"{K}.weight is F32", "implies F8_E4M3"],
    ),
    (
        "fp8-block",
        lambda t, c: plain(t, UP, "weight_scale_inv"),
        [f"{UP}.weight is plain F32 without a scale", "excludes it nowhere"],
    ),
    (
        "fp8-tensor",
        lambda t, c: t.update({f"{UP}.weight_scale_inv": torch.ones(2)}),
        [f"{UP}.weight_scale_inv is [2]", "[]"],
    ),
    (
        "packed-int4",
        lambda t, c: t.pop(f"{UP}.weight_shape"),
        [f"missing tensor {UP}.weight_shape, which int4, groups of 32 needs"],
    ),
    (
        "packed-int4",
        lambda t, c: t.update({f"{UP}.weight_zero_point": torch.zeros(12, 2).int()}),
        [f"unexpected tensor {UP}.weight_zero_point"],
    ),
    (
        "packed-int4",
        lambda t, c: c["config_groups"]["group_0"].update(targets=["re:.*self_attn"]),
        [f"{UP}.weight_scale says that {UP} is quantized, but no target"],
    ),
    (
        "int-quantized",
        lambda t, c: c.update(ignore=["lm_head", K]),
        [f"{K}.weight_scale says", f'ignore lists "{K}"'],
    ),
    (
        "awq",
        lambda t, c: t.pop(f"{K}.qzeros"),
        [f"missing tensor {K}.qzeros, which AWQ int4, groups of 16 needs"],
    ),
    (
        "awq",
        lambda t, c: [t.pop(f"{K}.{role}") for role in ("qweight", "qzeros", "scales")],
        [f"missing tensor {K}.qweight"],
    ),
    (
        "gptq",
        lambda t, c: t.update({f"{UP}.scales": torch.ones(3, 96).half()}),
        [f"{UP}.scales is [3, 96]", "GPTQ int4, groups of 32", "implies [2, 96]"],
    ),
    (
        "gptq",
        lambda t, c: c.update(dynamic={r"-:.*\.k_proj": {}}),
        [f"{K}.qweight says", "dynamic lists"],
    ),
    (
        "gptq",
        lambda t, c: c.update(dynamic={r"+:.*\.k_proj": {"bits": 8}}),
        [f"{K}.qweight is [8, 32]", "GPTQ int8", "implies [16, 32]"],
    ),
    (
        "gptq-order",
        lambda t, c: t.pop(f"{K}.g_idx"),
        [f"missing tensor {K}.g_idx"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "edit", "words"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)]
)
def test_tensors_that_do_not_fit_are_named_before_loading(
    tmp_path: Path, name: str, edit: Edit, words: list[str]
) -> None:
    path = edited(tmp_path, name, edit)
    with pytest.raises(ConfigError) as refused:
        check_checkpoint(build_config({}), path)
    for word in words:
        assert word in refused.value.message


@pytest.mark.parametrize(
    ("name", "tensor", "change", "words"),
    [
        ("packed-int4", f"{UP}.weight_shape", number(0, 95), "says [95, 64]"),
        ("gptq-order", f"{UP}.g_idx", number(5, 4), "names groups 0 to 4, but the matrix has 4"),
        ("packed-int4-order", f"{UP}.weight_g_idx", number(5, -1), "names groups -1 to 3"),
        ("awq", f"{UP}.scales", number(7, float("nan")), "no finite number"),
        ("fp8-block", f"{UP}.weight_scale_inv", number(0, float("inf")), "no finite number"),
        ("fp8-block", f"{UP}.weight", number(70, float("nan")), "no finite number"),
    ],
)
def test_damaged_content_is_named_at_load(
    tmp_path: Path, name: str, tensor: str, change: Callable[[Tensor], None], words: str
) -> None:
    path = edited(tmp_path, name, lambda tensors, config: change(tensors[tensor]))
    with pytest.raises(ConfigError) as refused:
        load_model(path)
    assert words in refused.value.message
    assert UP in refused.value.message


def test_codes_without_a_scale_are_no_numbers_of_an_unquantized_checkpoint(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "m")
    tensors = load_file(path / "model.safetensors")
    tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"{UP}\.weight is F8_E4M3, config.json implies F32"):
        check_checkpoint(build_config({}), path)


@pytest.mark.parametrize(
    ("name", "exclusion", "excluded"),
    [
        ("fp8-block", {"modules_to_not_convert": [UP]}, re.escape(UP)),
        ("fp8-block", {"ignored_layers": ["model.layers.0"]}, r"model\.layers\.0\."),
        ("awq", {"modules_to_not_convert": ["layers.0.mlp"]}, r".*\.0\.mlp"),
        ("gptq", {"dynamic": {r"-:.*0\.mlp": {}}}, r".*\.0\.mlp"),
        (
            "gptq",
            {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.down_proj"]]},
            r".*(self_attn\.[kvo]|mlp\.(gate|up))_proj",
        ),
        ("packed-int4", {"ignore": ["re:.*0.mlp.*"]}, r".*\.0\.mlp"),
        ("packed-int4", {"ignore": ["0.mlp"]}, r".*\.0\.mlp"),
    ],
)
def test_plain_matrices_that_config_excludes_are_read_plain(
    tmp_path: Path, name: str, exclusion: dict[str, Any], excluded: str
) -> None:
    source = make_checkpoint("llama", tmp_path / "m")
    dense = load_file(source / "model.safetensors")
    modules = [name.removesuffix(".weight") for name in dense if is_linear(name)]
    plain_modules = [module for module in modules if re.match(excluded, module)]
    assert plain_modules

    def edit(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config.update(exclusion)
        for tensor in list(tensors):
            if tensor.rpartition(".")[0] in plain_modules:
                del tensors[tensor]
        tensors |= {f"{module}.weight": dense[f"{module}.weight"] for module in plain_modules}

    path = edited(tmp_path / "q", name, edit, source)
    check_checkpoint(build_config({}), path)
    gate_up = load_model(path, "float32").weights.layers[0].mlp.gate_up
    assert torch.equal(gate_up[96:], dense[f"{UP}.weight"])


def edited(folder: Path, name: str, edit: Edit, source: Path | None = None) -> Path:
    """A quantized checkpoint after `edit(tensors, quantization_config)`."""
    source = source or make_checkpoint("llama", folder / "source")
    path, _ = quantize(source, name, folder)
    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    edit(tensors, config["quantization_config"])
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path
