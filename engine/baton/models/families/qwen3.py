"""Qwen 3, dense (transformers' Qwen3ForCausalLM)."""

from __future__ import annotations

from baton.models.config_file import ModelConfig
from baton.models.families.base import ModelFamily
from baton.models.families.windows import types_from_layer, window_if_used


class Qwen3Family(ModelFamily):
    """Heads of q and k are normed; `attention_bias` and windows as config.json says."""

    architecture = "Qwen3ForCausalLM"
    model_type = "qwen3"
    max_position = 32768
    kv_heads = 32
    head_dim = 128
    attention = "grouped queries, norms of q and k, sliding window as config.json says"

    def has_qk_norm(self, config: ModelConfig) -> bool:
        return True

    def read_windows(self, config: ModelConfig, layers: int) -> tuple[int, ...]:
        types = types_from_layer(config, layers, 28)
        return window_if_used(config, layers, 4096, types)
