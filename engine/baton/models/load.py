"""Checkpoint files to a ready `Decoder`.

1. `read_spec` checks the config; `plan_weights` says which tensors must come and where each goes.
2. Files are memory-mapped (safetensors) and copied tensor by tensor into their stacked places, cast on the way; peak
   memory is the finished model plus one tensor. A tensor-parallel rank reads its shares of them and nothing else.
3. Anything missing, unexpected or of another shape ends the start with one ConfigError that lists it.

`load_format="dummy"` fills the same places with seeded noise instead: same seed, same weights, on every node.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.errors import ConfigError
from baton.models.decoder import Decoder, DecoderWeights, LayerWeights
from baton.models.shard import WHOLE, Shard, share_of
from baton.models.spec import ModelSpec, read_spec
from baton.models.weights import Param, is_ignorable, plan_weights
from baton.runtime.collectives import ALONE, Collectives
from baton.runtime.ops import TORCH_DTYPES

log = logging.getLogger("baton.load")

_DUMMY_STD = 0.02
_SHOWN = 8


def load_model(path: str | Path, dtype: str = "auto", load_format: str = "auto", seed: int = 0) -> Decoder:
    """Load a Hugging Face model directory.

    Args:
        dtype: auto | float32 | bfloat16 (see `read_spec`).
        load_format: auto reads safetensors files; dummy needs config.json only and draws weights from `seed`.
    Raises:
        ConfigError: unsupported config, missing or malformed files.
    """
    return load_weights(read_spec(path, dtype, load_format, seed), path, load_format, seed)


def load_weights(
    spec: ModelSpec,
    path: str | Path,
    load_format: str = "auto",
    seed: int = 0,
    shard: Shard = WHOLE,
    tp: Collectives = ALONE,
) -> Decoder:
    """The share of model `spec` that a tensor-parallel rank computes; only that is read of the files.

    Args:
        tp: how it meets the other ranks.
    Raises:
        ConfigError: as `load_model`, or the model cannot be divided so.
    """
    started = time.monotonic()
    own = share_of(spec, shard)
    tensors = _dummy(spec, seed, shard) if load_format == "dummy" else _from_files(spec, Path(path), shard)
    decoder = Decoder(own, _assemble(spec, tensors), shard, tp)
    log.info(
        "loaded %s from %s: %d parameters as %s, share %d of %d, in %.2f s",
        spec.architecture, path, spec.num_parameters, spec.dtype, shard.rank + 1, shard.size,
        time.monotonic() - started,
    )  # fmt: skip
    return decoder


def _assemble(spec: ModelSpec, tensors: dict[tuple[int, str], Tensor]) -> DecoderWeights:
    per_layer: list[dict[str, Any]] = [{} for _ in range(spec.num_layers)]
    for (layer, name), tensor in tensors.items():
        if layer >= 0:
            per_layer[layer][name] = tensor
    embed = tensors[-1, "embed"]
    lm_head = embed if spec.tied else tensors[-1, "lm_head"]
    return DecoderWeights(embed, [LayerWeights(**w) for w in per_layer], tensors[-1, "norm"], lm_head)


def _dummy(spec: ModelSpec, seed: int, shard: Shard) -> dict[tuple[int, str], Tensor]:
    """Whole tensors are drawn, and this rank's shares kept: a model is the same however it is divided."""
    generator = torch.Generator().manual_seed(seed)
    own = {(p.layer, p.name): p for p in plan_weights(spec, shard)}

    def draw(param: Param) -> Tensor:
        if param.is_norm:
            return torch.ones(param.shape, dtype=TORCH_DTYPES[spec.dtype])
        noise = torch.empty(param.shape, dtype=torch.float32).normal_(0.0, _DUMMY_STD, generator=generator)
        return noise.to(TORCH_DTYPES[spec.dtype])

    tensors = {}
    for param in plan_weights(spec):
        whole = draw(param)
        if (mine := own.get((param.layer, param.name))) is None:
            continue
        pieces = whole.split([part.shape[0] for part in param.parts])
        shares = [piece[part.share] for piece, part in zip(pieces, mine.parts, strict=True)]
        tensors[param.layer, param.name] = whole if mine == param else torch.cat(shares)
    return tensors


def _from_files(spec: ModelSpec, root: Path, shard: Shard) -> dict[tuple[int, str], Tensor]:
    params = list(plan_weights(spec, shard))
    places = {part.source: (param, part) for param in params for part in param.parts}
    tensors: dict[tuple[int, str], Tensor] = {}
    problems: list[str] = []
    missing = set(places)
    for file in weight_files(root):
        try:
            with safe_open(str(file), framework="pt") as f:
                for source in f.keys():  # noqa: SIM118 - a safetensors handle is not a mapping
                    if source not in places:
                        if not is_ignorable(spec, source, shard):
                            problems.append(f"{file.name}: unexpected tensor {source}")
                        continue
                    param, part = places[source]
                    stored = f.get_slice(source)
                    found = tuple(stored.get_shape())
                    missing.discard(source)
                    if found != part.whole:
                        wanted = list(part.whole)
                        problems.append(f"{file.name}: {source} is {list(found)}, config.json implies {wanted}")
                        continue
                    target = tensors.get((param.layer, param.name))
                    if target is None:
                        target = torch.empty(param.shape, dtype=TORCH_DTYPES[spec.dtype])
                        tensors[param.layer, param.name] = target
                    taken = f.get_tensor(source) if part.shape == part.whole else stored[part.share]
                    target[part.first_row : part.first_row + part.shape[0]].copy_(taken)
        except SafetensorError as err:
            raise ConfigError(f"{file}: {err}; the file is damaged, download it again") from err
    problems += [f"missing tensor {source}" for source in sorted(missing)]
    if problems:
        shown = problems[:_SHOWN] + ([f"… and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else [])
        raise ConfigError("\n  ".join([f"{root}: the weights do not fit its config.json:", *shown]))
    return tensors


def weight_files(root: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those of the index, else model.safetensors, else the only ones there."""
    index = root / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as err:
            raise ConfigError(f"{index}: no readable weight_map ({err!r}); download the file again") from err
        if absent := [n for n in names if not (root / n).is_file()]:
            count = f"{len(absent)} of {len(names)}"
            raise ConfigError(f"{index}: {count} files are absent, first {absent[0]}; finish the download")
        return [root / n for n in names]
    if (root / "model.safetensors").is_file():
        return [root / "model.safetensors"]
    files = sorted(root.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{root}: no *.safetensors file; convert the checkpoint, or give --load-format dummy")
    return files
