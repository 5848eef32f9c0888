"""DeepSeek V3 and R1, Kimi K2, Moonlight (transformers' DeepseekV3ForCausalLM)."""

from __future__ import annotations

from baton.models.config_file import ModelConfig
from baton.models.families.experts import read_biased_router, read_shared_experts
from baton.models.families.mla import MlaFamily
from baton.models.spec.mlp import MlpSpec
from baton.models.spec.moe import MoeSpec


class DeepseekV3Family(MlaFamily):
    """Latent attention; the first layers are dense, the others have experts beside shared ones."""

    architecture = "DeepseekV3ForCausalLM"
    model_type = "deepseek_v3"
    other_model_types = ("kimi_k2",)
    max_position = 4096
    q_rank = 1536
    has_draft_layers = True
    feed_forward = "experts and shared experts; a gated MLP in the first layers"

    def read_mlp(self, config: ModelConfig, layer: int) -> MlpSpec | MoeSpec:
        if layer < (config.read_index("first_k_dense_replace", 3) or 0):
            return MlpSpec(config.read_integer("intermediate_size", 18432))
        self.check_router(config, "sigmoid", ("noaux_tc",))
        router = read_biased_router(
            config,
            experts=256,
            chosen=8,
            normalizes=True,
            groups=8,
            kept_groups=4,
            scaling_factor=2.5,
        )
        inner = config.read_integer("moe_intermediate_size", 2048)
        return MoeSpec(router, inner, shared=read_shared_experts(config, inner, 1))
