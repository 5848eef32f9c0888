"""DeepSeek V2 and V2 Lite (transformers' DeepseekV2ForCausalLM)."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config_file import ModelConfig
from baton.models.families.experts import (
    read_experts,
    read_experts_per_token,
    read_shared_experts,
)
from baton.models.families.mla import MlaFamily
from baton.models.spec.mlp import MlpSpec
from baton.models.spec.moe import MoeSpec, RouterSpec

_GROUP_LIMITED = "group_limited_greedy"


class DeepseekV2Family(MlaFamily):
    """Latent attention; the first layers are dense, the others have experts beside shared ones."""

    architecture = "DeepseekV2ForCausalLM"
    model_type = "deepseek_v2"
    max_position = 2048
    q_rank = 1536
    feed_forward = "experts and shared experts; a gated MLP in the first layers"

    def is_interleaved(self, config: ModelConfig) -> bool:
        """The class turns neighbors, as complex numbers, and does not read the field."""
        if not config.read_flag("rope_interleave", True):
            config.refuse("rope_interleave", False, "supported: true")
        return True

    def read_mlp(self, config: ModelConfig, layer: int) -> MlpSpec | MoeSpec:
        bias = config.read_flag("mlp_bias", False)
        if layer < (config.read_index("first_k_dense_replace", 0) or 0):
            return MlpSpec(config.read_integer("intermediate_size", 11008), bias=bias)
        inner = config.read_integer("moe_intermediate_size", 1407)
        shared = replace(read_shared_experts(config, inner, 2), bias=bias)
        return MoeSpec(self._read_router(config), inner, shared=shared)

    def _read_router(self, config: ModelConfig) -> RouterSpec:
        """Softmax over all experts; the class never divides by the sum of those chosen."""
        self.check_router(config, "softmax", ("greedy", _GROUP_LIMITED))
        if config.read_flag("norm_topk_prob", False):
            config.refuse(
                "norm_topk_prob", True, "transformers' class ignores it, others do not: false"
            )
        experts = read_experts(config, ("n_routed_experts", "num_experts"), 64)
        router = RouterSpec(
            experts,
            read_experts_per_token(config, None, experts),
            rounds_weights=False,
            is_float32=True,
            group_rank="best",
            scaling_factor=config.read_number("routed_scaling_factor", 1.0),
        )
        if config.get("topk_method") != _GROUP_LIMITED:
            return router
        groups = config.read_integer("n_group")
        if experts % groups:
            config.refuse("n_group", groups, f"a divisor of the {experts} experts is needed")
        kept = config.read_integer("topk_group", most=groups)
        return replace(router, num_groups=groups, kept_groups=kept)
