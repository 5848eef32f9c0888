"""Phi-3 and Phi-4 with plain rotary embeddings (transformers' Phi3ForCausalLM)."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config_file import ModelConfig
from baton.models.families.base import Biases, ModelFamily
from baton.models.families.windows import window_all_layers
from baton.models.spec.attention import AttentionBlockSpec
from baton.models.spec.mlp import MlpSpec


class Phi3Family(ModelFamily):
    """Checkpoints hold q, k and v in one tensor, and gate and up in another."""

    architecture = "Phi3ForCausalLM"
    model_type = "phi3"
    max_position = 4096
    rms_eps = 1e-5
    partial_rotary = 1.0
    attention = "grouped queries, partial rotation and sliding window as config.json says"

    def read_attention(self, config: ModelConfig) -> AttentionBlockSpec:
        block = super().read_attention(config)
        if block.rope.kind != "default":
            # The class takes every other name for longrope, which has two sets of frequencies.
            config.refuse("rope_scaling.rope_type", block.rope.kind, "supported: default")
        return replace(block, is_fused=True)

    def read_biases(self, config: ModelConfig) -> Biases:
        return Biases()

    def read_windows(self, config: ModelConfig, layers: int) -> tuple[int, ...]:
        return window_all_layers(config, layers, None)

    def read_mlp(self, config: ModelConfig, layer: int) -> MlpSpec:
        return MlpSpec(config.read_integer("intermediate_size"), is_fused=True)
