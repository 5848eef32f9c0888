"""Qwen3-Next (transformers' Qwen3NextForCausalLM)."""

from __future__ import annotations

from dataclasses import replace

from baton.layers.spec import DeltaSpec
from baton.models.config_file import ModelConfig
from baton.models.families.base import ModelFamily
from baton.models.families.delta_net import FULL, MOST_TAPS, STATE, place_states
from baton.models.families.experts import is_sparse, read_experts, read_experts_per_token
from baton.models.spec.attention import AttentionBlockSpec
from baton.models.spec.delta_net import DeltaBlockSpec
from baton.models.spec.mlp import MlpSpec
from baton.models.spec.model import LayerSpec
from baton.models.spec.moe import MoeSpec, RouterSpec
from baton.models.spec.norm import NormSpec


class Qwen3NextFamily(ModelFamily):
    """The gated delta net, and gated attention in every fourth layer; experts beside a shared
    expert, which a gate of its own weighs."""

    architecture = "Qwen3NextForCausalLM"
    model_type = "qwen3_next"
    max_position = 32768
    kv_heads = 2
    head_dim = 256
    partial_rotary = 0.25
    has_draft_layers = True
    draft_module = "mtp."
    attention = (
        "gated delta net (a state per sequence); in every fourth layer grouped queries, norms of q "
        "and k, partial rotation, gated results"
    )
    feed_forward = "experts and a gated shared expert, or a gated MLP, by layer"

    def read_layers(self, config: ModelConfig) -> tuple[LayerSpec, ...]:
        layers = super().read_layers(config)
        interval = config.read_integer("full_attention_interval", 4)
        types = [FULL if (number + 1) % interval == 0 else STATE for number in range(len(layers))]
        return place_states(config, layers, self.read_delta(config), types)

    def read_delta(self, config: ModelConfig) -> DeltaBlockSpec:
        """The block of layers with states."""
        key_heads = config.read_integer("linear_num_key_heads", 16)
        value_heads = config.read_integer("linear_num_value_heads", 32)
        if value_heads % key_heads:
            config.refuse(
                "linear_num_value_heads",
                value_heads,
                f"a multiple of linear_num_key_heads ({key_heads}) is needed",
            )
        delta = DeltaSpec(
            key_heads,
            value_heads,
            config.read_integer("linear_key_head_dim", 128),
            config.read_integer("linear_value_head_dim", 128),
            taps=config.read_integer("linear_conv_kernel_dim", 4, most=MOST_TAPS),
        )
        # The class has a norm of its own there, whose weight is the weight itself.
        return DeltaBlockSpec(delta, NormSpec(self.read_norm(config).eps))

    def read_attention(self, config: ModelConfig) -> AttentionBlockSpec:
        return replace(super().read_attention(config), has_output_gate=True)

    def has_qk_norm(self, config: ModelConfig) -> bool:
        return True

    def read_norm(self, config: ModelConfig) -> NormSpec:
        return replace(super().read_norm(config), is_float32=True, adds_one=True)

    def read_mlp(self, config: ModelConfig, layer: int) -> MlpSpec | MoeSpec:
        if not is_sparse(config, layer):
            return MlpSpec(config.read_integer("intermediate_size", 5632))
        return self.read_experts(
            config, experts=512, chosen=10, normalizes=config.read_flag("norm_topk_prob", True)
        )

    def read_experts(
        self, config: ModelConfig, *, experts: int, chosen: int, normalizes: bool = True
    ) -> MoeSpec:
        """Args: `experts`, `chosen`: defaults of the class."""
        experts = read_experts(config, ("num_experts", "num_local_experts"), experts)
        chosen = read_experts_per_token(config, chosen, experts)
        router = RouterSpec(experts, chosen, normalizes=normalizes)
        size_field = "shared_expert_intermediate_size"
        shared = MlpSpec(
            config.read_integer(size_field, 512),
            module="mlp.shared_expert",
            size_field=size_field,
        )
        inner = config.read_integer("moe_intermediate_size", 512)
        return MoeSpec(router, inner, shared=shared, has_shared_gate=True)
