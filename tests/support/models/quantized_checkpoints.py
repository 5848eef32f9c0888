"""Quantized forms of a tiny checkpoint, each beside a plain checkpoint of what its numbers mean.

The encoders are naive: they walk over blocks and groups, and pack bits in Python integers.
`quantize` replaces the matrices of a directory; the plain twin holds (code - zero) * scale,
computed in float32 element by element.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8 = torch.float8_e4m3fn
Roles = dict[str, Tensor]
"""Tensors of a matrix by what comes behind the module's name."""


class Encoded(NamedTuple):
    tensors: Roles
    dense: Tensor
    """float32"""


class Format(NamedTuple):
    config: dict[str, Any]
    """`quantization_config`"""
    encode: Callable[[Tensor], Encoded]
    names_of: Callable[[str, str], str] = lambda module, role: f"{module}.{role}"
    """Name of the tensor that has a role."""


# ---- FP8 and int8 with a grid of scales ---------------------------------------------------------


def _blocks(shape: tuple[int, int], block: tuple[int, int]) -> list[tuple[int, int, slice, slice]]:
    """(row, column) in the grid of scales, and the slices of each block; 0 is everything."""
    sizes = [size or n for size, n in zip(block, shape, strict=True)]
    return [
        (r // sizes[0], c // sizes[1], slice(r, r + sizes[0]), slice(c, c + sizes[1]))
        for r in range(0, shape[0], sizes[0])
        for c in range(0, shape[1], sizes[1])
    ]


def encode_scaled(
    weight: Tensor,
    block: tuple[int, int],
    role: str,
    *,
    code: torch.dtype = FP8,
    zeros: bool = False,
    powers_of_two: bool = False,
) -> Encoded:
    rows, columns = weight.shape
    places = _blocks((rows, columns), block)
    grid = torch.zeros(places[-1][0] + 1, places[-1][1] + 1)
    zero = torch.zeros_like(grid, dtype=torch.int8)
    codes = torch.zeros(rows, columns, dtype=code)
    dense = torch.zeros(rows, columns)
    for i, j, r, c in places:
        part = weight[r, c].float()
        top = 448.0 if code == FP8 else 127.0
        scale = part.abs().max() / top
        if powers_of_two:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        if zeros:
            scale = (part.max() - part.min()) / 255
            zero[i, j] = torch.round(-128 - part.min() / scale).clamp(-128, 127).to(torch.int8)
        grid[i, j] = scale
        shifted = part / scale + zero[i, j].float()
        if code == torch.int8:
            shifted = shifted.round().clamp(-128, 127)
        codes[r, c] = shifted.to(code)
        dense[r, c] = (codes[r, c].float() - zero[i, j].float()) * scale
    stored = grid
    if powers_of_two:
        stored = (torch.log2(grid) + 127).round().to(torch.uint8)
    tensors = {"weight": codes, role: stored.squeeze() if block == (0, 0) else stored}
    if zeros:
        tensors["weight_zero_point"] = zero
    return Encoded(tensors, dense)


# ---- integers in words --------------------------------------------------------------------------


class Groups(NamedTuple):
    codes: Tensor
    """Unsigned, int32 [rows, columns]"""
    scales: Tensor
    """[rows, groups]"""
    zeros: Tensor
    """int32 [rows, groups]"""
    group_of: list[int]
    dense: Tensor


def quantize_groups(
    weight: Tensor,
    *,
    bits: int,
    group_size: int,
    symmetric: bool,
    shuffled: bool = False,
    scale_type: torch.dtype = torch.float16,
) -> Groups:
    rows, columns = weight.shape
    size = group_size or columns
    group_of = [column // size for column in range(columns)]
    if shuffled:
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
        group_of = [group_of[int(place)] for place in order]
    count = max(group_of) + 1
    most = (1 << bits) - 1
    codes = torch.zeros(rows, columns, dtype=torch.int32)
    scales = torch.zeros(rows, count)
    zeros = torch.full((rows, count), 1 << (bits - 1), dtype=torch.int32)
    dense = torch.zeros(rows, columns)
    for group in range(count):
        columns_in = [c for c, g in enumerate(group_of) if g == group]
        part = weight[:, columns_in].float()
        if symmetric:
            scale = part.abs().amax(1) / ((1 << (bits - 1)) - 0.5)
        else:
            scale = (part.amax(1) - part.amin(1)).clamp(min=1e-4) / most
        scale = scale.to(scale_type).float()
        if not symmetric:
            zeros[:, group] = torch.round(-part.amin(1) / scale).clamp(0, most).int()
        zero = zeros[:, group, None]
        codes[:, columns_in] = ((part / scale[:, None]).round() + zero).clamp(0, most).int()
        scales[:, group] = scale
        dense[:, columns_in] = (codes[:, columns_in] - zero).float() * scale[:, None]
    return Groups(codes, scales.to(scale_type), zeros, group_of, dense)


def pack_rows(values: Tensor, bits: int) -> Tensor:
    """int32 [rows, words]: the values of each row side by side, low bits first."""
    rows, columns = values.shape
    words = -(-columns * bits // 32)
    packed = np.zeros((rows, words), dtype=np.int32)
    for row in range(rows):
        number = 0
        for column, value in enumerate(values[row].tolist()):
            number |= value << (bits * column)
        packed[row] = np.frombuffer(number.to_bytes(words * 4, "little"), dtype=np.int32)
    return torch.from_numpy(packed)


def encode_packed(weight: Tensor, **how: Any) -> Encoded:
    """compressed-tensors' pack-quantized."""
    made = quantize_groups(weight, **how)
    bits = how["bits"]
    tensors = {
        "weight_packed": pack_rows(made.codes, bits),
        "weight_scale": made.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not how["symmetric"]:
        tensors["weight_zero_point"] = pack_rows(made.zeros.t(), bits).t().contiguous()
    if how.get("shuffled"):
        tensors["weight_g_idx"] = torch.tensor(made.group_of, dtype=torch.int32)
    return Encoded(tensors, made.dense)


def encode_gptq(weight: Tensor, *, version: int, **how: Any) -> Encoded:
    made = quantize_groups(weight, **how)
    bits = how["bits"]
    zeros = (made.zeros - 1) % (1 << bits) if version == 1 else made.zeros
    tensors = {
        "qweight": pack_rows(made.codes, bits).t().contiguous(),
        "qzeros": pack_rows(zeros.t(), bits),
        "scales": made.scales.t().contiguous(),
        "g_idx": torch.tensor(made.group_of, dtype=torch.int32),
    }
    return Encoded(tensors, made.dense)


_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column in each nibble of a word, lowest first."""


def encode_awq(weight: Tensor, **how: Any) -> Encoded:
    made = quantize_groups(weight, bits=4, symmetric=False, **how)

    def pack(values: Tensor) -> Tensor:
        """int32 [n, rows / 8] of [rows, n]."""
        ordered = values.t().unflatten(1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(1)
        return pack_rows(ordered, 4)

    tensors = {
        "qweight": pack(made.codes),
        "qzeros": pack(made.zeros),
        "scales": made.scales.t().contiguous(),
    }
    return Encoded(tensors, made.dense)


# ---- FP4 of all experts -------------------------------------------------------------------------

FP4_NUMBERS = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def encode_mxfp4(weight: Tensor) -> Encoded:
    """gpt-oss's packing. Args: `weight`: [experts, inputs, outputs]."""
    blocks = weight.float().transpose(1, 2).unflatten(-1, (-1, 32))
    # The largest number is 6: three bits.
    exponents = blocks.abs().amax(-1).log2().floor() - 2
    scales = torch.exp2(exponents)[..., None]
    codes = ((blocks / scales)[..., None] - FP4_NUMBERS).abs().argmin(-1)
    dense = (FP4_NUMBERS[codes] * scales).flatten(2).transpose(1, 2)
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    packed = (low | high << 4).to(torch.uint8)
    return Encoded({"blocks": packed, "scales": (exponents + 127).to(torch.uint8)}, dense)


# ---- the formats --------------------------------------------------------------------------------


def _fp8(block: tuple[int, int], role: str = "weight_scale_inv", **changes: Any) -> Format:
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    if block != (0, 0):
        config["weight_block_size"] = list(block)
    powers = changes.get("scale_fmt") == "ue8m0"
    return Format(config | changes, lambda w: encode_scaled(w, block, role, powers_of_two=powers))


def _compressed(
    packing: str, weights: dict[str, Any], encode: Callable[[Tensor], Encoded]
) -> Format:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}}
    group["input_activations"] = {"num_bits": 8, "type": weights["type"], "dynamic": True}
    config = {
        "quant_method": "compressed-tensors",
        "format": packing,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
    }
    return Format(config, encode)


def _packed(bits: int, group_size: int, *, symmetric: bool, shuffled: bool = False) -> Format:
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    weights |= (
        {"strategy": "group", "group_size": group_size} if group_size else {"strategy": "channel"}
    )
    if shuffled:
        weights["actorder"] = "group"
    how = {"bits": bits, "group_size": group_size, "symmetric": symmetric, "shuffled": shuffled}
    how["scale_type"] = torch.bfloat16
    return _compressed("pack-quantized", weights, lambda w: encode_packed(w, **how))


def _gptq(bits: int, group_size: int, *, version: int = 1, **changes: Any) -> Format:
    symmetric = changes.pop("symmetric", True)
    shuffled = changes.get("desc_act", False)
    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size or -1}
    config |= {"desc_act": False, "sym": symmetric, "lm_head": False, "damp_percent": 0.01}
    config["checkpoint_format"] = {1: "gptq", 2: "gptq_v2"}[version]
    how = {"bits": bits, "group_size": group_size, "symmetric": symmetric, "shuffled": shuffled}
    return Format(config | changes, lambda w: encode_gptq(w, version=version, **how))


FORMATS: dict[str, Format] = {
    "fp8-block": _fp8((128, 128)),
    "fp8-ragged": _fp8((24, 40), scale_fmt="ue8m0"),
    "fp8-tensor": _fp8((0, 0)),
    "fp8-static": _fp8((0, 0), "weight_scale", activation_scheme="static"),
    "fp8-channel": _fp8((1, 0), "weight_scale", weight_block_size=None),
    "float-quantized": _compressed(
        "float-quantized",
        {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
        lambda w: encode_scaled(w, (1, 0), "weight_scale"),
    ),
    "float-block": _compressed(
        "float-quantized",
        {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "block",
            "block_structure": [40, 24],
        },
        lambda w: encode_scaled(w, (40, 24), "weight_scale"),
    ),
    "int-quantized": _compressed(
        "int-quantized",
        {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        lambda w: encode_scaled(w, (1, 0), "weight_scale", code=torch.int8),
    ),
    "int-asymmetric": _compressed(
        "int-quantized",
        {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32},
        lambda w: encode_scaled(w, (1, 32), "weight_scale", code=torch.int8, zeros=True),
    ),
    "packed-int4": _packed(4, 32, symmetric=True),
    "packed-int4-zeros": _packed(4, 32, symmetric=False),
    "packed-int4-order": _packed(4, 16, symmetric=True, shuffled=True),
    "packed-int8": _packed(8, 0, symmetric=True),
    "packed-int5": _packed(5, 32, symmetric=False),
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"},
        lambda w: encode_awq(w, group_size=16),
    ),
    "gptq": _gptq(4, 32),
    "gptq-zeros": _gptq(4, 16, symmetric=False),
    "gptq-v2": _gptq(4, 32, version=2, symmetric=False),
    "gptq-order": _gptq(4, 16, desc_act=True),
    "gptq-int8": _gptq(8, 0),
    "gptq-int3": _gptq(3, 32, symmetric=False),
    "gptq-int2": _gptq(2, 16),
}


MXFP4 = Format(
    {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
    },
    encode_mxfp4,
    lambda module, role: f"{module}_{role}",
)  # fmt: skip
"""Of gpt-oss alone, whose experts are in joint tensors."""


def is_joint(name: str) -> bool:
    """Tell matrices of all experts in one tensor."""
    return name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def is_linear(name: str) -> bool:
    """Tell matrices that writers quantize from heads, embeddings, routers, norms and convolutions."""
    if not name.startswith("model.layers.") or not name.endswith(".weight"):
        return False
    others = (".gate.weight", "_gate.weight", ".router.weight", "norm.weight", "conv1d.weight")
    return not name.endswith(others)


def is_narrow(name: str) -> bool:
    """Tell the projections of a delta net that have few rows or columns, beside those of heads."""
    return re.search(r"self_attn\.(b|[fg]_[ab])_proj\.weight$", name) is not None


def quantize(source: Path, name: str, folder: Path) -> tuple[Path, Path]:
    """Write checkpoint `source` in a format, and its plain twin: the two directories."""
    made = MXFP4 if name == "mxfp4" else FORMATS[name]
    is_chosen = is_joint if name == "mxfp4" else is_linear
    tensors = load_file(source / "model.safetensors")
    quantized: Roles = {}
    plain: Roles = {}
    # Writers of these formats leave experts plain that are stacked in one tensor, and matrices that
    # are too narrow for their groups, and say so.
    left = [each for each in sorted(tensors) if is_joint(each) or is_narrow(each)]
    left_plain = [] if is_chosen is is_joint else [each.removesuffix(".weight") for each in left]
    for tensor_name, tensor in tensors.items():
        if not is_chosen(tensor_name) or is_narrow(tensor_name):
            quantized[tensor_name] = plain[tensor_name] = tensor
            continue
        encoded = made.encode(tensor)
        plain[tensor_name] = encoded.dense
        module = tensor_name.removesuffix(".weight")
        for role, stored in encoded.tensors.items():
            quantized[made.names_of(module, role)] = stored
        if made.config.get("activation_scheme") == "static":
            quantized[f"{module}.input_scale"] = torch.tensor(0.5)
    return (
        write_checkpoint(
            source, folder / "quantized", quantized, _excluding(made.config, left_plain)
        ),
        write_checkpoint(source, folder / "plain", plain, None),
    )


def _excluding(config: dict[str, Any], modules: list[str]) -> dict[str, Any]:
    """The `quantization_config` of a format that leaves modules plain."""
    if not modules:
        return config
    if config["quant_method"] == "gptq":
        return {**config, "dynamic": {f"-:{re.escape(module)}": {} for module in modules}}
    member = (
        "ignore" if config["quant_method"] == "compressed-tensors" else "modules_to_not_convert"
    )
    return {**config, member: [*config.get(member, []), *modules]}


def write_checkpoint(
    source: Path, path: Path, tensors: Roles, quantization: dict[str, Any] | None
) -> Path:
    """A copy of directory `source` with other tensors and another `quantization_config`."""
    shutil.copytree(source, path)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config.pop("quantization_config", None)
    if quantization is not None:
        config["quantization_config"] = quantization
    (path / "config.json").write_text(json.dumps(config))
    return path
