"""GLM 4.5, 4.6 and 4.7 with experts (transformers' Glm4MoeForCausalLM)."""

from __future__ import annotations

from baton.models.config_file import ModelConfig
from baton.models.families.base import Biases, ModelFamily
from baton.models.families.experts import read_biased_router, read_shared_experts
from baton.models.spec.mlp import MlpSpec
from baton.models.spec.moe import MoeSpec


class Glm4MoeFamily(ModelFamily):
    """Half of each head turns; the first layers are dense, the others have experts beside shared
    ones."""

    architecture = "Glm4MoeForCausalLM"
    model_type = "glm4_moe"
    max_position = 131072
    kv_heads = 8
    rms_eps = 1e-5
    partial_rotary = 0.5
    has_draft_layers = True
    attention = "grouped queries, partial rotation, norms of q and k as config.json says"
    feed_forward = "experts and shared experts; a gated MLP in the first layers"

    def read_biases(self, config: ModelConfig) -> Biases:
        return Biases(qkv=config.read_flag("attention_bias", False))

    def has_qk_norm(self, config: ModelConfig) -> bool:
        return config.read_flag("use_qk_norm", False)

    def read_mlp(self, config: ModelConfig, layer: int) -> MlpSpec | MoeSpec:
        first_sparse = config.read_index("first_k_dense_replace", 1) or 0
        if layer < first_sparse:
            return MlpSpec(config.read_integer("intermediate_size", 10944))
        router = read_biased_router(config, experts=128, chosen=8, normalizes=True)
        inner = config.read_integer("moe_intermediate_size", 1408)
        return MoeSpec(router, inner, shared=read_shared_experts(config, inner, 1))
