"""Seed-OSS 36B (transformers' SeedOssForCausalLM)."""

from __future__ import annotations

from baton.models.config_file import ModelConfig
from baton.models.families.base import Biases, ModelFamily
from baton.models.spec.attention import AttentionBlockSpec
from baton.models.spec.mlp import MlpSpec


class SeedOssFamily(ModelFamily):
    """The plain decoder; q, k and v have biases of their own switch."""

    architecture = "SeedOssForCausalLM"
    model_type = "seed_oss"
    max_position = 524288
    kv_heads = 8
    head_dim = 128
    attention = "grouped queries, biases in q, k and v"

    def read_attention(self, config: ModelConfig) -> AttentionBlockSpec:
        # The class takes null for hidden_size / num_attention_heads, and 128 where it is absent.
        if config.is_null("head_dim"):
            config.refuse("head_dim", None, "state it, or leave it out for 128")
        return super().read_attention(config)

    def read_biases(self, config: ModelConfig) -> Biases:
        return Biases(
            qkv=config.read_flag("attention_bias", True),
            o=config.read_flag("attention_out_bias", False),
        )

    def read_mlp(self, config: ModelConfig, layer: int) -> MlpSpec:
        bias = config.read_flag("mlp_bias", False)
        return MlpSpec(config.read_integer("intermediate_size"), bias)
