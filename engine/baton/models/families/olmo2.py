"""OLMo 2 (transformers' Olmo2ForCausalLM)."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config_file import ModelConfig
from baton.models.families.base import ModelFamily
from baton.models.spec.attention import AttentionBlockSpec
from baton.models.spec.norm import NormSpec


class Olmo2Family(ModelFamily):
    """Norms stand behind the blocks; all heads of q, and of k, are normed as one row."""

    architecture = "Olmo2ForCausalLM"
    model_type = "olmo2"
    max_position = 2048
    rms_eps = 1e-5
    norm_places = "after"
    attention = "grouped queries, norms over all heads of q and k; norms behind the blocks"

    def has_qk_norm(self, config: ModelConfig) -> bool:
        return True

    def read_attention(self, config: ModelConfig) -> AttentionBlockSpec:
        return replace(super().read_attention(config), norms_all_heads=True)

    def read_norm(self, config: ModelConfig) -> NormSpec:
        return replace(super().read_norm(config), is_float32=True)
