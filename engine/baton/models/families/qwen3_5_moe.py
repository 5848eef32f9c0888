"""Qwen3.5 with experts (transformers' Qwen3_5MoeForCausalLM)."""

from __future__ import annotations

from baton.models.config_file import ModelConfig
from baton.models.families.qwen3_5 import Qwen35Family
from baton.models.spec.mlp import MlpSpec
from baton.models.spec.moe import MoeSpec


class Qwen35MoeFamily(Qwen35Family):
    """Experts beside a gated shared expert in every layer."""

    architecture = "Qwen3_5MoeForCausalLM"
    model_type = "qwen3_5_moe_text"
    kv_heads = 2
    feed_forward = "experts and a gated shared expert"

    def read_mlp(self, config: ModelConfig, layer: int) -> MlpSpec | MoeSpec:
        return self.read_experts(config, experts=256, chosen=8)
