"""Mistral 7B and its successors with the same blocks (transformers' MistralForCausalLM)."""

from __future__ import annotations

from baton.models.config_file import ModelConfig
from baton.models.families.base import Biases, ModelFamily
from baton.models.families.windows import window_all_layers


class MistralFamily(ModelFamily):
    """Every layer has the window, if there is one."""

    architecture = "MistralForCausalLM"
    model_type = "mistral"
    max_position = 131072
    kv_heads = 8
    attention = "grouped queries, sliding window as config.json says"

    def read_biases(self, config: ModelConfig) -> Biases:
        return Biases()

    def read_windows(self, config: ModelConfig, layers: int) -> tuple[int, ...]:
        return window_all_layers(config, layers, 4096)
