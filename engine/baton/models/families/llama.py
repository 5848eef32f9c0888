"""Llama 1 to 3 (transformers' LlamaForCausalLM)."""

from __future__ import annotations

from baton.models.config_file import ModelConfig
from baton.models.families.base import ModelFamily
from baton.models.spec.mlp import MlpSpec


class LlamaFamily(ModelFamily):
    """The plain decoder; `attention_bias` and `mlp_bias` switch biases on."""

    architecture = "LlamaForCausalLM"
    model_type = "llama"
    max_position = 2048

    def read_mlp(self, config: ModelConfig, layer: int) -> MlpSpec:
        bias = config.read_flag("mlp_bias", False)
        return MlpSpec(config.read_integer("intermediate_size"), bias)
