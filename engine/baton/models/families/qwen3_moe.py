"""Qwen 3 with experts: 30B-A3B, 235B-A22B and the coders (transformers' Qwen3MoeForCausalLM)."""

from __future__ import annotations

from baton.models.config_file import ModelConfig
from baton.models.families.base import ModelFamily
from baton.models.families.experts import is_sparse, read_experts, read_experts_per_token
from baton.models.families.windows import window_all_layers
from baton.models.spec.mlp import MlpSpec
from baton.models.spec.moe import MoeSpec, RouterSpec


class Qwen3MoeFamily(ModelFamily):
    """Qwen 3's attention; experts in the layers that are sparse, else an MLP."""

    architecture = "Qwen3MoeForCausalLM"
    model_type = "qwen3_moe"
    max_position = 32768
    kv_heads = 4
    attention = "grouped queries, norms of q and k, sliding window as config.json says"
    feed_forward = "experts, or a gated MLP, by layer"

    def has_qk_norm(self, config: ModelConfig) -> bool:
        return True

    def read_windows(self, config: ModelConfig, layers: int) -> tuple[int, ...]:
        # transformers 5 windows every layer of this family, whatever max_window_layers says.
        if not config.read_flag("use_sliding_window", False):
            return (0,) * layers
        return window_all_layers(config, layers, 4096)

    def read_mlp(self, config: ModelConfig, layer: int) -> MlpSpec | MoeSpec:
        if not is_sparse(config, layer):
            return MlpSpec(config.read_integer("intermediate_size"))
        experts = read_experts(config, ("num_experts", "num_local_experts"), 128)
        router = RouterSpec(
            experts,
            read_experts_per_token(config, 8, experts),
            normalizes=config.read_flag("norm_topk_prob", False),
        )
        return MoeSpec(router, config.read_integer("moe_intermediate_size", 768))
