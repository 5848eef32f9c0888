"""Mixtral 8x7B and 8x22B (transformers' MixtralForCausalLM)."""

from __future__ import annotations

from baton.models.config_file import ModelConfig
from baton.models.families.base import Biases, ModelFamily
from baton.models.families.experts import read_experts, read_experts_per_token
from baton.models.families.windows import window_all_layers
from baton.models.spec.moe import ExpertNames, MoeSpec, RouterSpec

MIXTRAL_NAMES = ExpertNames(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
    all_gate_up="block_sparse_moe.experts.gate_up_proj",
    all_down="block_sparse_moe.experts.down_proj",
)


class MixtralFamily(ModelFamily):
    """Mistral's attention; experts in every layer, whose weights stay float32."""

    architecture = "MixtralForCausalLM"
    model_type = "mixtral"
    max_position = 131072
    kv_heads = 8
    rms_eps = 1e-5
    rope_theta = 1e6
    attention = "grouped queries, sliding window as config.json says"
    feed_forward = "experts"

    def read_biases(self, config: ModelConfig) -> Biases:
        return Biases()

    def read_windows(self, config: ModelConfig, layers: int) -> tuple[int, ...]:
        return window_all_layers(config, layers, None)

    def read_mlp(self, config: ModelConfig, layer: int) -> MoeSpec:
        experts = read_experts(config, ("num_local_experts", "num_experts"), 8)
        router = RouterSpec(
            experts,
            read_experts_per_token(config, 2, experts),
            normalizes=True,
            rounds_weights=False,
        )
        inner = config.read_integer("intermediate_size")
        return MoeSpec(router, inner, size_field="intermediate_size", names=MIXTRAL_NAMES)
