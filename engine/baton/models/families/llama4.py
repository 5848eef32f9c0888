"""Llama 4, text (transformers' Llama4ForCausalLM)."""

from __future__ import annotations

from dataclasses import replace

from baton.layers.spec import ExpertForm
from baton.models.config_file import ModelConfig
from baton.models.families.base import ModelFamily
from baton.models.families.experts import read_experts, read_experts_per_token
from baton.models.families.windows import chunk_by_layer_types, read_turning_layers
from baton.models.spec.attention import AttentionBlockSpec, QueryTemperature
from baton.models.spec.mlp import MlpSpec
from baton.models.spec.moe import ExpertNames, JointLayout, MoeSpec, RouterSpec
from baton.models.spec.rope import RopeSpec

_NAMES = ExpertNames(
    router="feed_forward.router",
    gate="feed_forward.experts.{}.gate_proj",
    up="feed_forward.experts.{}.up_proj",
    down="feed_forward.experts.{}.down_proj",
    all_gate_up="feed_forward.experts.gate_up_proj",
    all_down="feed_forward.experts.down_proj",
)


class Llama4Family(ModelFamily):
    """Layers that turn see their own chunk, the others everything; experts whose weights multiply
    their inputs, beside a shared expert."""

    architecture = "Llama4ForCausalLM"
    model_type = "llama4_text"
    max_position = 131072
    kv_heads = 8
    head_dim = 128
    rms_eps = 1e-5
    rope_theta = 500000.0
    attention = (
        "grouped queries, chunks and L2 norms of q and k in layers that turn, scaled queries in "
        "every fourth layer, which does not"
    )
    feed_forward = "experts and a shared expert, or a gated MLP, by layer"

    def read_attention(self, config: ModelConfig) -> AttentionBlockSpec:
        block = replace(super().read_attention(config), is_interleaved=True)
        if config.read_flag("use_qk_norm", True):
            eps = self.read_norm(config).eps
            block = replace(block, turned_norm_eps=eps)
        # Files have 4 for true.
        tunes = config.read_checked(
            "attn_temperature_tuning", True, "true or false", lambda v: type(v) in (bool, int)
        )
        if not tunes:
            return block
        factor = config.read_number("attn_scale", 0.1)
        temperature = QueryTemperature(factor, config.read_number("floor_scale", 8192))
        return replace(block, temperature=temperature)

    def read_chunks(self, config: ModelConfig, layers: int) -> tuple[int, ...]:
        return chunk_by_layer_types(config, layers, 8192, self._read_turning(config, layers))

    def read_ropes(
        self, config: ModelConfig, windows: tuple[int, ...]
    ) -> tuple[RopeSpec | None, ...]:
        rope = self.read_rope(config)
        return tuple(rope if flag else None for flag in self._read_turning(config, len(windows)))

    def _read_turning(self, config: ModelConfig, layers: int) -> list[bool]:
        # To the class an empty list is none.
        if config.get("no_rope_layers") == []:
            config = ModelConfig(config.path, config.values | {"no_rope_layers": None})
        return read_turning_layers(config, layers)

    def read_mlp(self, config: ModelConfig, layer: int) -> MlpSpec | MoeSpec:
        step = config.read_integer("interleave_moe_layer_step", 1)
        is_sparse = (layer + 1) % step == 0
        if config.get("moe_layers") is not None:
            is_sparse = layer in config.read_checked(
                "moe_layers",
                None,
                "a list of layer numbers",
                lambda v: type(v) is list and all(type(number) is int for number in v),
            )
        if not is_sparse:
            field = "intermediate_size_mlp"
            size = config.read_integer(field, 16384)
            return MlpSpec(size, module="feed_forward", size_field=field)
        experts = read_experts(config, ("num_local_experts", "num_experts"), 16)
        chosen = read_experts_per_token(config, 1, experts)
        inner = config.read_integer("intermediate_size", 8192)
        shared = MlpSpec(inner, module="feed_forward.shared_expert")
        return MoeSpec(
            RouterSpec(experts, chosen, scoring="sigmoid_of_chosen"),
            inner,
            size_field="intermediate_size",
            names=_NAMES,
            layout=JointLayout(is_transposed=True),
            shared=shared,
            form=ExpertForm(weighs_inputs=True),
        )
