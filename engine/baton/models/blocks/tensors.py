"""Tensors that a block holds: taken from what was loaded, moved to a device."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor


def move_tensors(holder: Any, device: torch.device) -> None:
    """Move each tensor field of a dataclass, those in lists and in other dataclasses of blocks
    too."""
    for field in fields(holder):
        value = getattr(holder, field.name)
        if isinstance(value, Tensor):
            setattr(holder, field.name, value.to(device))
        elif isinstance(value, list):
            for index, entry in enumerate(value):
                if isinstance(entry, Tensor):
                    value[index] = entry.to(device)


def take_prefixed(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Remove the tensors whose names start with `prefix`, and return them without it."""
    names = [name for name in tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensors.pop(name) for name in names}
