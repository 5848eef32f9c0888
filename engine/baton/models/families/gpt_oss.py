"""gpt-oss (transformers' GptOssForCausalLM)."""

from __future__ import annotations

from dataclasses import replace

from baton.layers.spec import ClampedSilu, ExpertForm
from baton.models.config_file import ModelConfig
from baton.models.families.base import Biases, ModelFamily
from baton.models.families.experts import read_experts, read_experts_per_token
from baton.models.families.windows import types_of_flags, window_by_layer_types
from baton.models.spec.attention import AttentionBlockSpec
from baton.models.spec.moe import ExpertNames, JointLayout, MoeSpec, RouterSpec
from baton.models.spec.norm import NormSpec
from baton.models.spec.rope import RopeSpec

_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Of the class if config.json has no parameters of its rotary embedding."""


class GptOssFamily(ModelFamily):
    """Heads with sinks, a window in every second layer; experts with biases and a clamped
    activation in every layer."""

    architecture = "GptOssForCausalLM"
    model_type = "gpt_oss"
    max_position = 131072
    kv_heads = 8
    head_dim = 64
    rms_eps = 1e-5
    rope_theta = 150000.0
    attention = "grouped queries with attention sinks, biases, sliding window in every second layer"
    feed_forward = "experts with biases and clamped SiLU"

    def read_attention(self, config: ModelConfig) -> AttentionBlockSpec:
        block = super().read_attention(config)
        return replace(block, heads=replace(block.heads, has_sinks=True))

    def read_biases(self, config: ModelConfig) -> Biases:
        bias = config.read_flag("attention_bias", True)
        return Biases(qkv=bias, o=bias)

    def read_windows(self, config: ModelConfig, layers: int) -> tuple[int, ...]:
        types = types_of_flags([number % 2 == 0 for number in range(layers)])
        return window_by_layer_types(config, layers, 128, types)

    def read_rope(self, config: ModelConfig) -> RopeSpec:
        if not config.get("rope_scaling") and not config.get("rope_parameters"):
            values = config.values | {"rope_parameters": _DEFAULT_ROPE}
            config = ModelConfig(config.path, values)
        return super().read_rope(config)

    def read_norm(self, config: ModelConfig) -> NormSpec:
        return replace(super().read_norm(config), is_float32=True)

    def read_mlp(self, config: ModelConfig, layer: int) -> MoeSpec:
        experts = read_experts(config, ("num_local_experts", "num_experts"), 128)
        router = RouterSpec(
            experts,
            read_experts_per_token(config, 4, experts),
            scoring="softmax_of_chosen",
            has_logit_bias=True,
        )
        gain = config.read_number("swiglu_alpha", 1.702)
        return MoeSpec(
            router,
            config.read_integer("intermediate_size", 2880),
            size_field="intermediate_size",
            names=ExpertNames(router="mlp.router"),
            layout=JointLayout(is_transposed=True, is_interleaved=True),
            is_always_joint=True,
            has_biases=True,
            form=ExpertForm(ClampedSilu(gain, config.read_number("swiglu_limit", 7.0))),
        )
