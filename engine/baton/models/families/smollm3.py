"""SmolLM3 (transformers' SmolLM3ForCausalLM)."""

from __future__ import annotations

from baton.models.config_file import ModelConfig
from baton.models.families.base import ModelFamily
from baton.models.families.windows import (
    read_turning_layers,
    types_of_flags,
    window_if_used,
)
from baton.models.spec.mlp import MlpSpec
from baton.models.spec.rope import RopeSpec


class SmolLM3Family(ModelFamily):
    """Nothing turns in some layers, which alone may have a window."""

    architecture = "SmolLM3ForCausalLM"
    model_type = "smollm3"
    max_position = 32768
    kv_heads = 4
    tied = True
    rope_theta = 2000000.0
    attention = "grouped queries, no rotation in every fourth layer, windows as config.json says"

    def read_windows(self, config: ModelConfig, layers: int) -> tuple[int, ...]:
        turns = read_turning_layers(config, layers)
        # The class has no window where neither field states one.
        if config.get("sliding_window") is None and config.get("layer_types") is None:
            return (0,) * layers
        types = types_of_flags([not flag for flag in turns])
        return window_if_used(config, layers, None, types)

    def read_ropes(
        self, config: ModelConfig, windows: tuple[int, ...]
    ) -> tuple[RopeSpec | None, ...]:
        rope = self.read_rope(config)
        turns = read_turning_layers(config, len(windows))
        return tuple(rope if flag else None for flag in turns)

    def read_mlp(self, config: ModelConfig, layer: int) -> MlpSpec:
        bias = config.read_flag("mlp_bias", False)
        return MlpSpec(config.read_integer("intermediate_size"), bias)
