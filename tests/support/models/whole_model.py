"""Loads a checkpoint directory for one process, without the flags an engine reads."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.models.decoder import Decoder
from baton.models.load import load_weights
from baton.models.spec_reader import read_spec


def load_model(
    path: Path, dtype: str = "auto", load_format: str = "auto", seed: int = 0
) -> Decoder:
    """As an engine would that is alone; `seed` is of dummy weights."""
    return load_weights(read_spec(path, dtype, load_format, seed), path, load_format, seed)


def held_tensors(holder: Any) -> list[Tensor]:
    """Every tensor of a decoder, or of a dataclass with its lists and dataclasses; of matrices in
    the order of kernels, their rows."""
    if isinstance(holder, Tensor):
        return [holder]
    if hasattr(holder, "gather_rows"):
        return [holder.gather_rows(torch.arange(holder.shape[0]))]
    if isinstance(holder, Decoder):
        return held_tensors(holder.weights)
    if isinstance(holder, list):
        return [tensor for entry in holder for tensor in held_tensors(entry)]
    if not is_dataclass(holder):
        return []
    values = [getattr(holder, field.name) for field in fields(holder)]
    return [tensor for value in values for tensor in held_tensors(value)]
