"""Which layers see only the last `sliding_window` tokens, or their own chunk, and which do not
turn, in the spellings of several families. No torch here."""

from __future__ import annotations

from baton.models.config_file import ModelConfig

_SLIDING = "sliding_attention"
_FULL = "full_attention"
_CHUNKED = "chunked_attention"


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


def chunk_by_layer_types(
    config: ModelConfig, layers: int, default_chunk: int, turns: list[bool]
) -> tuple[int, ...]:
    """`layer_types` says which layers have chunks of `attention_chunk_size` (Llama 4).

    Args: `turns`: the layers that have chunks if config.json is silent.
    """
    default_types = [_CHUNKED if flag else _FULL for flag in turns]
    types = config.read_names("layer_types", default_types)
    if len(types) != layers or not set(types) <= {_FULL, _CHUNKED}:
        config.refuse(
            "layer_types", types, f"supported: {layers} times full_attention or chunked_attention"
        )
    if _CHUNKED in types and config.is_null("attention_chunk_size"):
        config.refuse("attention_chunk_size", None, "layers of chunked_attention need a size")
    chunk = config.read_integer("attention_chunk_size", default_chunk)
    return tuple(chunk if kind == _CHUNKED else 0 for kind in types)


def read_turning_layers(config: ModelConfig, layers: int) -> list[bool]:
    """`no_rope_layers`, which has 1 for each layer that turns."""
    interval = config.read_integer("no_rope_layer_interval", 4)
    default = [int((number + 1) % interval != 0) for number in range(layers)]
    flags = config.read_checked(
        "no_rope_layers",
        default,
        f"a list of 0 or 1 for each of {layers} layers",
        lambda v: type(v) is list and len(v) == layers and all(x in (0, 1) for x in v),
    )
    return [bool(flag) for flag in flags]


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
