"""JSON files of a checkpoint with typed access, config.json above all. No torch here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from baton.config.files import is_given, read_regular_file
from baton.errors import ConfigError

LARGEST_SIZE = 2**31 - 1
"""Sizes and token ids are 32-bit integers in index tensors."""
MAX_LAYERS = 10_000
"""Far above the deepest models; the description of a model has an entry for each layer."""
MAX_EXPERTS = 10_000
"""Far above the widest mixtures; a plan of weights has entries for each expert of each layer."""


_OF_ALL_PARTS = (
    "bos_token_id", "dtype", "eos_token_id", "quantization_config", "torch_dtype", "transformers_weights",
)  # fmt: skip
"""Fields that stand outside of `text_config`."""


class ModelConfig:
    """config.json, or another JSON object of a checkpoint, with typed access; every complaint names
    file and field."""

    def __init__(
        self, path: Path, values: dict[str, Any], spellings: Mapping[str, str] | None = None
    ) -> None:
        """Args: `spellings`: names that the file may have in place of those that are asked for."""
        self.path = path
        self.values = values
        self._spellings = spellings or {}

    def _spelling(self, field: str) -> str:
        """The name of a field in the file."""
        other = self._spellings.get(field, field)
        return other if other in self.values else field

    def refuse(self, field: str, value: object, supported: str) -> NoReturn:
        raise ConfigError(
            f"{self.path}: {self._spelling(field)} = {json.dumps(value)} is not supported; "
            f"{supported}"
        )

    def is_null(self, field: str) -> bool:
        """Tell an explicit null from an absent field."""
        name = self._spelling(field)
        return name in self.values and self.values[name] is None

    def get(self, field: str, default: Any = None) -> Any:
        value = self.values.get(self._spelling(field))
        return default if value is None else value

    def read_checked(
        self, field: str, default: Any, needed: str, is_valid: Callable[[Any], bool]
    ) -> Any:
        value = self.get(field, default)
        if not is_valid(value):
            self.refuse(field, value, f"{needed} is needed")
        return value

    def read_integer(
        self, field: str, default: int | None = None, *, most: int = LARGEST_SIZE
    ) -> int:
        value: int = self.read_checked(
            field,
            default,
            f"a positive integer up to {most}",
            lambda v: type(v) is int and 0 < v <= most,
        )
        return value

    def read_number(self, field: str, default: float) -> float:
        value = self.read_checked(
            field,
            default,
            "a positive number",
            lambda v: type(v) in (int, float) and 0 < v < math.inf,
        )
        return float(value)

    def read_index(self, field: str, default: int | None = None) -> int | None:
        """A layer number or token id, or None when absent."""
        value: int | None = self.read_checked(
            field,
            default,
            "an integer from 0 up",
            lambda v: v is None or (type(v) is int and v >= 0),
        )
        return value

    def read_names(self, field: str, default: list[str]) -> list[str]:
        value: list[str] = self.read_checked(
            field,
            default,
            "a list of names",
            lambda v: type(v) is list and all(type(name) is str for name in v),
        )
        return value

    def read_flag(self, field: str, default: bool) -> bool:
        value: bool = self.read_checked(field, default, "true or false", lambda v: type(v) is bool)
        return value

    def text_part(self) -> ModelConfig:
        """The decoder's fields, which multimodal checkpoints keep in `text_config`, but for those
        that count for all parts; all fields, where there is one part.
        """
        nested = self.values.get("text_config")
        if not isinstance(nested, dict):
            return self
        # To transformers null there leaves the text part's own.
        shared = {name: value for name in _OF_ALL_PARTS if (value := self.get(name)) is not None}
        return ModelConfig(self.path, nested | shared)


def read_json(path: Path) -> dict[str, Any]:
    """A file's object. Raises ConfigError."""
    try:
        values = json.loads(read_regular_file(path).decode())
    except OSError as err:
        raise ConfigError(
            f"{path}: {err.strerror}; give --model-path a Hugging Face model directory"
        ) from err
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"{path}: not valid JSON ({err}); download the file again") from err
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a JSON object is needed, found {type(values).__name__}")
    return values


def read_model_config(root: Path) -> ModelConfig:
    """config.json of a model directory. Raises ConfigError."""
    return ModelConfig(root / "config.json", read_json(root / "config.json"))


def read_generation_config(root: Path) -> ModelConfig:
    """generation_config.json of a model directory, empty without the file. Raises ConfigError."""
    file = root / "generation_config.json"
    return ModelConfig(file, read_json(file) if is_given(file) else {})
