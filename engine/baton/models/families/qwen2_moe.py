"""Qwen 1.5 and 2 with experts (transformers' Qwen2MoeForCausalLM)."""

from __future__ import annotations

from baton.models.config_file import ModelConfig
from baton.models.families.base import Biases, ModelFamily
from baton.models.families.experts import is_sparse, read_experts, read_experts_per_token
from baton.models.families.windows import types_of_even_layers, window_if_used
from baton.models.spec.mlp import MlpSpec
from baton.models.spec.moe import MoeSpec, RouterSpec


class Qwen2MoeFamily(ModelFamily):
    """Qwen 2's attention; experts beside a shared expert, which a gate of its own weighs."""

    architecture = "Qwen2MoeForCausalLM"
    model_type = "qwen2_moe"
    max_position = 32768
    kv_heads = 16
    attention = "grouped queries, biases in q, k and v, sliding window as config.json says"
    feed_forward = "experts and a gated shared expert, or a gated MLP, by layer"

    def read_biases(self, config: ModelConfig) -> Biases:
        return Biases(qkv=config.read_flag("qkv_bias", True))

    def read_windows(self, config: ModelConfig, layers: int) -> tuple[int, ...]:
        types = types_of_even_layers(config, layers, 28)
        return window_if_used(config, layers, 4096, types)

    def read_mlp(self, config: ModelConfig, layer: int) -> MlpSpec | MoeSpec:
        if not is_sparse(config, layer):
            return MlpSpec(config.read_integer("intermediate_size"))
        experts = read_experts(config, ("num_experts", "num_local_experts"), 60)
        router = RouterSpec(
            experts,
            read_experts_per_token(config, 4, experts),
            normalizes=config.read_flag("norm_topk_prob", False),
        )
        size_field = "shared_expert_intermediate_size"
        shared = MlpSpec(
            config.read_integer(size_field, 5632),
            module="mlp.shared_expert",
            size_field=size_field,
        )
        inner = config.read_integer("moe_intermediate_size", 1408)
        return MoeSpec(router, inner, shared=shared, has_shared_gate=True)
