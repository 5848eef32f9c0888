"""Phi-3, Phi-3.5 and Phi-4 (transformers' Phi3ForCausalLM)."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config_file import ModelConfig
from baton.models.families.base import Biases, ModelFamily
from baton.models.families.longrope import LongropeClass, read_rope_or_longrope
from baton.models.families.windows import window_all_layers
from baton.models.spec.attention import AttentionBlockSpec
from baton.models.spec.mlp import MlpSpec
from baton.models.spec.rope import RopeSpec

_LONGROPE = LongropeClass(theta=10000.0, partial=1.0, original=4096, has_mscales=False)


class Phi3Family(ModelFamily):
    """Checkpoints hold q, k and v in one tensor, and gate and up in another."""

    architecture = "Phi3ForCausalLM"
    model_type = "phi3"
    max_position = 4096
    rms_eps = 1e-5
    attention = "grouped queries, partial rotation, longrope and sliding window as config.json says"

    def read_attention(self, config: ModelConfig) -> AttentionBlockSpec:
        return replace(super().read_attention(config), is_fused=True)

    def read_rope(self, config: ModelConfig) -> RopeSpec:
        return read_rope_or_longrope(config, self.read_max_position(config), _LONGROPE)

    def read_biases(self, config: ModelConfig) -> Biases:
        return Biases()

    def read_windows(self, config: ModelConfig, layers: int) -> tuple[int, ...]:
        return window_all_layers(config, layers, None)

    def read_mlp(self, config: ModelConfig, layer: int) -> MlpSpec:
        return MlpSpec(config.read_integer("intermediate_size"), is_fused=True)
