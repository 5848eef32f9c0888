"""Granite 3 and 4, dense (transformers' GraniteForCausalLM)."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config_file import ModelConfig
from baton.models.families.base import ModelFamily
from baton.models.spec.attention import AttentionBlockSpec
from baton.models.spec.mlp import MlpSpec
from baton.models.spec.model import StreamSpec


class GraniteFamily(ModelFamily):
    """The plain decoder with factors of its own for embeddings, scores, blocks and logits."""

    architecture = "GraniteForCausalLM"
    model_type = "granite"
    max_position = 2048
    attention = "grouped queries; factors of embeddings, scores, blocks and logits"

    def read_attention(self, config: ModelConfig) -> AttentionBlockSpec:
        block = super().read_attention(config)
        factor = config.read_number("attention_multiplier", 1.0)
        return replace(block, heads=replace(block.heads, factor=factor))

    def read_stream(self, config: ModelConfig) -> StreamSpec:
        return StreamSpec(
            embedding_factor=config.read_number("embedding_multiplier", 1.0),
            block_factor=config.read_number("residual_multiplier", 1.0),
            logits_divisor=config.read_number("logits_scaling", 1.0),
        )

    def read_mlp(self, config: ModelConfig, layer: int) -> MlpSpec:
        bias = config.read_flag("mlp_bias", False)
        return MlpSpec(config.read_integer("intermediate_size"), bias)
