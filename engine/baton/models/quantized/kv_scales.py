"""Scales of the KV cache that a checkpoint has, for pages of FP8 codes. No torch here.

A layer's K are the numbers of their codes times its k_scale, its V likewise. Writers of checkpoints
put the scales beside the projections of the layer, under names of their own; each is one number.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from baton.errors import ConfigError
from baton.layers.kv_spec import FP8, KvScales
from baton.models.config_file import ModelConfig
from baton.models.quantized.methods import FIELD
from baton.models.weight_files import (
    TensorEntry,
    read_tensor_entries,
    refuse_unreadable,
    weight_files,
)

log = logging.getLogger("baton.spec")

FLAG = f"--kv-cache-dtype {FP8}"
_KEY_NAMES = ("k_scale", "k_proj.k_scale", "qkv_proj.k_scale", "k_proj.output_scale", "kv_scale")
_VALUE_NAMES = ("v_scale", "v_proj.v_scale", "qkv_proj.v_scale", "v_proj.output_scale", "kv_scale")
"""Behind `model.layers.N.self_attn.`: what llm-compressor and vLLM, ModelOpt, and AutoFP8 write."""
_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_SCHEME = "kv_cache_scheme"


def read_kv_scales(
    config: ModelConfig, root: Path, num_layers: int, load_format: str = "auto"
) -> tuple[KvScales, ...]:
    """The scales of each layer: those in the files, or 1 where no layer has any.

    Raises ConfigError for scales that are damaged or belong to another kind of cache, and where
    some layers lack theirs.
    """
    is_stated = _check_scheme(config)
    entries: dict[str, TensorEntry] = {}
    if load_format != "dummy":
        for file in weight_files(root):
            entries |= read_tensor_entries(file)
    found = {
        layer: (
            _find_scale(entries, layer, _KEY_NAMES),
            _find_scale(entries, layer, _VALUE_NAMES),
        )
        for layer in range(num_layers)
    }
    absent = [
        f"{'kv'[place]}_scale of layer {layer}"
        for layer, pair in found.items()
        for place in (0, 1)
        if pair[place] is None
    ]
    if len(absent) == 2 * num_layers and (not is_stated or load_format == "dummy"):
        log.warning(
            "%s: the checkpoint has no k_scale and v_scale, and all are 1: keys and values beyond "
            "448 are cut off, small ones lose digits",
            FLAG,
        )
        return (KvScales(),) * num_layers
    if absent:
        origin = f"states a {_SCHEME}" if is_stated else "has scales of other layers"
        raise ConfigError(
            f"{FLAG}: {root} {origin}, but {absent[0]} is missing ({len(absent)} in all); download "
            "the checkpoint again, or use --kv-cache-dtype auto"
        )
    return tuple(
        KvScales(_read_scale(key), _read_scale(value))
        for key, value in found.values()
        if key is not None and value is not None
    )


def is_kv_scale(name: str) -> bool:
    """Tell the names of tensors that `read_kv_scales` looks for."""
    prefix, found, role = name.partition(".self_attn.")
    is_layer = prefix.startswith("model.layers.") and bool(found)
    return is_layer and role in (*_KEY_NAMES, *_VALUE_NAMES)


def _check_scheme(config: ModelConfig) -> bool:
    """Return whether config.json states one scale per layer for FP8. Raises ConfigError where it
    states another kind of cache."""
    quantization = config.get(FIELD)
    scheme = quantization.get(_SCHEME) if isinstance(quantization, dict) else None
    if not isinstance(scheme, dict):
        return False
    expected = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}
    for field, value in expected.items():
        stated = scheme.get(field, value)
        if stated != value:
            config.refuse(
                f"{FIELD}.{_SCHEME}.{field}",
                stated,
                f"{FLAG} takes {str(value).lower()}; use --kv-cache-dtype auto, which needs no "
                "scales",
            )
    return True


def _find_scale(
    entries: Mapping[str, TensorEntry], layer: int, names: tuple[str, ...]
) -> TensorEntry | None:
    prefix = f"model.layers.{layer}.self_attn."
    found = [entries[prefix + name] for name in names if prefix + name in entries]
    if len(found) > 1:
        _refuse(found[0], f"{found[1].name} is there, too; keep the one that was calibrated")
    return found[0] if found else None


def _read_scale(entry: TensorEntry) -> float:
    count = math.prod(entry.shape)
    if entry.dtype not in _BYTES:
        types = ", ".join(_BYTES)
        _refuse(entry, f"it is {entry.dtype}, and one of {types} is needed")
    if count != 1:
        _refuse(entry, f"it has {count} numbers, and one per layer is supported")
    with refuse_unreadable(entry.file), entry.file.open("rb") as file:
        file.seek(entry.begin)
        stored = file.read(_BYTES[entry.dtype])
    match entry.dtype:
        case "F32":
            scale: float = struct.unpack("<f", stored)[0]
        case "F16":
            scale = struct.unpack("<e", stored)[0]
        case _:
            # The upper half of a float32.
            scale = struct.unpack("<f", bytes(2) + stored)[0]
    if not 0.0 < scale < math.inf:
        _refuse(entry, f"it is {scale:g}, and a positive number is needed")
    return scale


def _refuse(entry: TensorEntry, problem: str) -> NoReturn:
    raise ConfigError(
        f"{FLAG}: {entry.file}: {entry.name}: {problem}; correct the checkpoint, or use "
        "--kv-cache-dtype auto, which does not read it"
    )
