"""Phi-3.5-MoE (transformers' PhimoeForCausalLM)."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config_file import ModelConfig
from baton.models.families.base import ModelFamily
from baton.models.families.experts import read_experts, read_experts_per_token
from baton.models.families.longrope import LongropeClass, read_rope_or_longrope
from baton.models.families.mixtral import MIXTRAL_NAMES
from baton.models.families.windows import window_all_layers
from baton.models.spec.model import StreamSpec
from baton.models.spec.moe import MoeSpec, RouterSpec
from baton.models.spec.norm import NormSpec
from baton.models.spec.rope import RopeSpec

_LONGROPE = LongropeClass(theta=1e6, partial=None, original=None, has_mscales=True)


class PhimoeFamily(ModelFamily):
    """Layer norms with biases, two experts per token by SparseMixer, a bias of the head as
    config.json says."""

    architecture = "PhimoeForCausalLM"
    model_type = "phimoe"
    max_position = 131072
    kv_heads = 8
    rms_eps = 1e-5
    attention = (
        "grouped queries, biases, longrope and sliding window as config.json says; layer norms"
    )
    feed_forward = "experts, two by SparseMixer"

    def read_windows(self, config: ModelConfig, layers: int) -> tuple[int, ...]:
        return window_all_layers(config, layers, None)

    def read_rope(self, config: ModelConfig) -> RopeSpec:
        return read_rope_or_longrope(config, self.read_max_position(config), _LONGROPE)

    def read_norm(self, config: ModelConfig) -> NormSpec:
        return replace(super().read_norm(config), kind="layer")

    def read_stream(self, config: ModelConfig) -> StreamSpec:
        return StreamSpec(has_head_bias=config.read_flag("lm_head_bias", False))

    def read_mlp(self, config: ModelConfig, layer: int) -> MoeSpec:
        experts = read_experts(config, ("num_local_experts", "num_experts"), 16)
        chosen = read_experts_per_token(config, 2, experts)
        if chosen != 2:
            config.refuse("num_experts_per_tok", chosen, "the class chooses 2")
        jitter = config.read_number("router_jitter_noise", 0.01)
        router = RouterSpec(experts, chosen, scoring="sparsemixer", jitter=jitter)
        inner = config.read_integer("intermediate_size")
        return MoeSpec(router, inner, size_field="intermediate_size", names=MIXTRAL_NAMES)
