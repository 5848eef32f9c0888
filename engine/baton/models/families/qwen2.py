"""Qwen 2 and 2.5 (transformers' Qwen2ForCausalLM)."""

from __future__ import annotations

from baton.models.config_file import ModelConfig
from baton.models.families.base import Biases, ModelFamily
from baton.models.families.windows import types_from_layer, window_if_used


class Qwen2Family(ModelFamily):
    """Biases in q, k and v always; windows from a layer on, if `use_sliding_window`."""

    architecture = "Qwen2ForCausalLM"
    model_type = "qwen2"
    max_position = 32768
    kv_heads = 32
    attention = "grouped queries, biases in q, k and v, sliding window as config.json says"

    def read_biases(self, config: ModelConfig) -> Biases:
        return Biases(qkv=True)

    def read_windows(self, config: ModelConfig, layers: int) -> tuple[int, ...]:
        types = types_from_layer(config, layers, 28)
        return window_if_used(config, layers, 4096, types)
