"""Loads a checkpoint directory for one process, without the flags an engine reads."""

from __future__ import annotations

from pathlib import Path

from baton.models.decoder import Decoder
from baton.models.load import load_weights
from baton.models.spec_reader import read_spec


def load_model(
    path: Path, dtype: str = "auto", load_format: str = "auto", seed: int = 0
) -> Decoder:
    """As an engine would that is alone; `seed` is of dummy weights."""
    return load_weights(read_spec(path, dtype, load_format, seed), path, load_format, seed)
