"""Checks that all readers of `quantization_config` share. No torch here."""

from __future__ import annotations

from collections.abc import Container

from baton.models.config_file import ModelConfig


def refuse_unknown_fields(config: ModelConfig, known: Container[str], prefix: str = "") -> None:
    """Raise ConfigError for a field that is in none of the releases that this reader was written
    for: it may change what the weights mean. A null means nothing."""
    for field, value in config.values.items():
        if field not in known and value is not None:
            config.refuse(
                f"{prefix}{field}",
                value,
                "this field is not known here, and could change what the weights mean; "
                "remove it if it does not",
            )


def read_group_size(config: ModelConfig, field: str = "group_size", default: int = 128) -> int:
    """Columns that share a scale; 0 for -1, which is all of them."""
    size: int = config.read_checked(
        field,
        default,
        "a positive integer, or -1",
        lambda v: type(v) is int and (v > 0 or v == -1),
    )
    return max(size, 0)
