"""Which layers see only the last `sliding_window` tokens, in the spellings of several families. No
torch here."""

from __future__ import annotations

from baton.models.config_file import ModelConfig

_SLIDING = "sliding_attention"
_FULL = "full_attention"


def window_all_layers(config: ModelConfig, layers: int, default: int | None) -> tuple[int, ...]:
    """`sliding_window` holds for every layer whenever it is set (Mistral)."""
    window = config.values.get("sliding_window", default)
    size = 0 if window is None else config.read_integer("sliding_window", window)
    return (size,) * layers


def window_if_used(
    config: ModelConfig, layers: int, default_window: int | None, default_types: list[str]
) -> tuple[int, ...]:
    """`use_sliding_window` switches windows on, and `layer_types` says for which layers (Qwen).

    Args: `default_types`: layer_types of the class if config.json is silent.
    """
    if not config.read_flag("use_sliding_window", False):
        types = config.read_names("layer_types", [])
        if _SLIDING in types:
            config.refuse("layer_types", types, "sliding_attention needs use_sliding_window true")
        return (0,) * layers
    return window_by_layer_types(config, layers, default_window, default_types)


def window_by_layer_types(
    config: ModelConfig, layers: int, default_window: int | None, default_types: list[str]
) -> tuple[int, ...]:
    """`layer_types` says which layers have `sliding_window`, if it is not null.

    Args: `default_types`: layer_types of the class if config.json is silent.
    """
    if config.is_null("sliding_window"):
        return (0,) * layers
    window = config.read_integer("sliding_window", default_window)
    types = config.read_names("layer_types", default_types)
    if len(types) != layers or not set(types) <= {_FULL, _SLIDING}:
        config.refuse(
            "layer_types", types, f"supported: {layers} times full_attention or sliding_attention"
        )
    return tuple(window if kind == _SLIDING else 0 for kind in types)


def types_from_layer(config: ModelConfig, layers: int, default_first: int) -> list[str]:
    """Windows from layer `max_window_layers` on."""
    first = config.read_index("max_window_layers", default_first) or 0
    return types_of_flags([number >= first for number in range(layers)])


def types_of_flags(windowed: list[bool]) -> list[str]:
    """Windows at the layers whose flag is set."""
    return [_SLIDING if flag else _FULL for flag in windowed]


def types_with_full_every(step: int, layers: int) -> list[str]:
    """Windows but at every `step`-th layer."""
    return types_of_flags([(number + 1) % step != 0 for number in range(layers)])


def types_of_even_layers(config: ModelConfig, layers: int, default_end: int) -> list[str]:
    """Windows at even layers below `max_window_layers` (transformers' Qwen2-MoE)."""
    end = config.read_index("max_window_layers", default_end) or 0
    return types_of_flags([number % 2 == 0 and number < end for number in range(layers)])
