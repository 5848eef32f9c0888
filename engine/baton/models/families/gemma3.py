"""Gemma 3, text (transformers' Gemma3ForCausalLM)."""

from __future__ import annotations

from baton.models.config_file import ModelConfig
from baton.models.families.gemma2 import Gemma2Family
from baton.models.families.rope_config import read_ropes_by_type
from baton.models.families.windows import types_with_full_every
from baton.models.spec.rope import RopeSpec


class Gemma3Family(Gemma2Family):
    """Gemma 2's blocks with norms of q and k, without soft caps; five of six layers have a window,
    and a rotary embedding of their own."""

    architecture = "Gemma3ForCausalLM"
    model_type = "gemma3_text"
    max_position = 131072
    vocab_size = 262208
    heads = 8
    rope_theta = 1e6
    score_soft_cap = None
    logits_soft_cap = 0.0
    attention = (
        "grouped queries, norms of q and k, sliding window in five of six layers; norms around the "
        "blocks"
    )

    def has_qk_norm(self, config: ModelConfig) -> bool:
        return True

    def default_types(self, config: ModelConfig, layers: int) -> list[str]:
        return types_with_full_every(config.read_integer("sliding_window_pattern", 6), layers)

    def read_ropes(
        self, config: ModelConfig, windows: tuple[int, ...]
    ) -> tuple[RopeSpec | None, ...]:
        ropes = self._read_ropes_by_type(config)
        types = config.read_names("layer_types", self.default_types(config, len(windows)))
        return tuple(ropes[kind] for kind in types)

    def read_rope(self, config: ModelConfig) -> RopeSpec:
        return self._read_ropes_by_type(config)["full_attention"]

    def _read_ropes_by_type(self, config: ModelConfig) -> dict[str, RopeSpec]:
        thetas = {
            "full_attention": config.read_number("rope_theta", self.rope_theta),
            "sliding_attention": config.read_number("rope_local_base_freq", 10000.0),
        }
        return read_ropes_by_type(config, self.read_max_position(config), thetas)

    def read_max_context(self, config: ModelConfig) -> int:
        # max_position_embeddings states the stretched limit, whatever the rotary embedding.
        return self.read_max_position(config)
