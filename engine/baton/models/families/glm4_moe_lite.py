"""GLM 4.7 Flash (transformers' Glm4MoeLiteForCausalLM)."""

from __future__ import annotations

from baton.models.config_file import ModelConfig
from baton.models.families.experts import (
    read_biased_router,
    read_dense_layers,
    read_shared_experts,
)
from baton.models.families.mla import MlaFamily
from baton.models.spec.mlp import MlpSpec
from baton.models.spec.moe import MoeSpec


class Glm4MoeLiteFamily(MlaFamily):
    """Latent attention; config.json says which layers are dense, by default the first one."""

    architecture = "Glm4MoeLiteForCausalLM"
    model_type = "glm4_moe_lite"
    max_position = 202752
    rms_eps = 1e-5
    q_rank = 768
    plain_dim = 192
    value_dim = 256
    has_draft_layers = True
    feed_forward = "experts and shared experts, or a gated MLP, by layer"

    def read_mlp(self, config: ModelConfig, layer: int) -> MlpSpec | MoeSpec:
        if layer in read_dense_layers(config, 1):
            return MlpSpec(config.read_integer("intermediate_size", 10240))
        self.check_router(config, "sigmoid", ("noaux_tc",))
        router = read_biased_router(
            config, experts=64, chosen=4, normalizes=True, scaling_factor=1.8
        )
        inner = config.read_integer("moe_intermediate_size", 1536)
        return MoeSpec(router, inner, shared=read_shared_experts(config, inner, 1))
