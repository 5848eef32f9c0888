"""Qwen3.5 (transformers' Qwen3_5ForCausalLM)."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config_file import ModelConfig
from baton.models.families.qwen3_next import Qwen3NextFamily
from baton.models.spec.delta_net import DeltaBlockSpec
from baton.models.spec.mlp import MlpSpec
from baton.models.spec.moe import MoeSpec
from baton.models.spec.rope import RopeSpec

_ROPE_FIELDS = ("rope_parameters", "rope_scaling")
_OF_IMAGES = ("mrope_interleaved", "mrope_section")
"""How three positions share a rotation. Those of a text's token are equal."""


class Qwen35Family(Qwen3NextFamily):
    """Qwen3-Next's blocks of other tensors, without experts."""

    architecture = "Qwen3_5ForCausalLM"
    model_type = "qwen3_5_text"
    kv_heads = 4
    feed_forward = "gated MLP"

    def read_delta(self, config: ModelConfig) -> DeltaBlockSpec:
        return replace(super().read_delta(config), is_grouped=False)

    def read_rope(self, config: ModelConfig) -> RopeSpec:
        values = dict(config.values)
        for field in _ROPE_FIELDS:
            if isinstance(params := values.get(field), dict):
                values[field] = {k: v for k, v in params.items() if k not in _OF_IMAGES}
        return super().read_rope(ModelConfig(config.path, values))

    def read_mlp(self, config: ModelConfig, layer: int) -> MlpSpec | MoeSpec:
        return MlpSpec(config.read_integer("intermediate_size", 12288))
