"""Fields about layers with states that several families read alike. No torch here."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config_file import ModelConfig
from baton.models.spec.delta_net import DeltaBlockSpec
from baton.models.spec.model import LayerSpec

STATE = "linear_attention"
FULL = "full_attention"
MOST_TAPS = 8
"""Of the kernels' convolution."""


def place_states(
    config: ModelConfig,
    layers: tuple[LayerSpec, ...],
    delta: DeltaBlockSpec,
    default_types: list[str],
) -> tuple[LayerSpec, ...]:
    """The layers, of which those that `layer_types` calls linear have `delta` for attention.

    Args: `default_types`: layer_types of the class if config.json is silent.
    """
    types = config.read_names("layer_types", default_types)
    if len(types) != len(layers) or not set(types) <= {STATE, FULL}:
        config.refuse("layer_types", types, f"supported: {len(layers)} times {STATE} or {FULL}")
    if FULL not in types:
        config.refuse("layer_types", types, f"at least one layer of {FULL} is needed")
    # Equal layers stay one object, because a deep model has many of them.
    with_state = {layer: replace(layer, attention=delta) for layer in dict.fromkeys(layers)}
    return tuple(
        with_state[layer] if kind == STATE else layer
        for layer, kind in zip(layers, types, strict=True)
    )
