"""OLMo 3 (transformers' Olmo3ForCausalLM)."""

from __future__ import annotations

from baton.models.config_file import ModelConfig
from baton.models.families.olmo2 import Olmo2Family
from baton.models.families.rope_config import read_ropes_by_type
from baton.models.families.windows import types_with_full_every, window_by_layer_types
from baton.models.spec.rope import RopeSpec


class Olmo3Family(Olmo2Family):
    """OLMo 2's blocks; three of four layers have a window, and a rotary embedding of their own."""

    architecture = "Olmo3ForCausalLM"
    model_type = "olmo3"
    rope_theta = 500000.0
    attention = (
        "grouped queries, norms over all heads of q and k, sliding window in three of four layers; "
        "norms behind the blocks"
    )

    def read_windows(self, config: ModelConfig, layers: int) -> tuple[int, ...]:
        return window_by_layer_types(config, layers, 4096, types_with_full_every(4, layers))

    def read_ropes(
        self, config: ModelConfig, windows: tuple[int, ...]
    ) -> tuple[RopeSpec | None, ...]:
        ropes = self._read_ropes_by_type(config)
        types = config.read_names("layer_types", types_with_full_every(4, len(windows)))
        return tuple(ropes[kind] for kind in types)

    def read_rope(self, config: ModelConfig) -> RopeSpec:
        return self._read_ropes_by_type(config)["full_attention"]

    def _read_ropes_by_type(self, config: ModelConfig) -> dict[str, RopeSpec]:
        # The class gives a theta beside the objects to full attention alone.
        thetas = {
            "full_attention": config.read_number("rope_theta", self.rope_theta),
            "sliding_attention": self.rope_theta,
        }
        return read_ropes_by_type(config, self.read_max_position(config), thetas)
