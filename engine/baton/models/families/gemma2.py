"""Gemma 2 (transformers' Gemma2ForCausalLM)."""

from __future__ import annotations

import math
from dataclasses import replace

from baton.models.config_file import ModelConfig
from baton.models.families.base import ModelFamily
from baton.models.families.windows import types_with_full_every, window_by_layer_types
from baton.models.spec.attention import AttentionBlockSpec
from baton.models.spec.mlp import MlpSpec
from baton.models.spec.model import StreamSpec
from baton.models.spec.norm import NormSpec


class Gemma2Family(ModelFamily):
    """Norms around the blocks with a weight of 1 + w, soft caps of scores and logits, a window in
    every second layer."""

    architecture = "Gemma2ForCausalLM"
    model_type = "gemma2"
    max_position = 8192
    kv_heads = 4
    head_dim = 256
    norm_places = "around"
    tied = True
    overflows_float16 = True
    score_soft_cap: float | None = 50.0
    """Default attn_logit_softcapping; None: the class does not read the field."""
    logits_soft_cap = 30.0
    full_every = 2
    """Every so many layers see everything."""
    attention = (
        "grouped queries, soft cap of scores, sliding window in every second layer; norms around "
        "the blocks, soft cap of logits"
    )
    feed_forward = "gated MLP with GELU"

    def read_attention(self, config: ModelConfig) -> AttentionBlockSpec:
        if config.read_flag("use_bidirectional_attention", False):
            config.refuse("use_bidirectional_attention", True, "tokens see earlier tokens alone")
        block = super().read_attention(config)
        scalar = config.read_number("query_pre_attn_scalar", 256)
        cap = self._read_cap(config, "attn_logit_softcapping", self.score_soft_cap or 0.0)
        # The class computes without it.
        if cap and self.score_soft_cap is None:
            config.refuse("attn_logit_softcapping", cap, "supported: null")
        heads = replace(block.heads, factor=scalar**-0.5, soft_cap=cap)
        return replace(block, heads=heads)

    def read_stream(self, config: ModelConfig) -> StreamSpec:
        return StreamSpec(
            embedding_factor=math.sqrt(config.read_integer("hidden_size")),
            rounds_embedding_factor=True,
            logits_soft_cap=self._read_cap(config, "final_logit_softcapping", self.logits_soft_cap),
        )

    def _read_cap(self, config: ModelConfig, field: str, default: float) -> float:
        """A soft cap; null is none, as 0 is for our blocks."""
        if config.is_null(field) or (default == 0.0 and field not in config.values):
            return 0.0
        return config.read_number(field, default)

    def read_norm(self, config: ModelConfig) -> NormSpec:
        return replace(super().read_norm(config), is_float32=True, adds_one=True)

    def read_windows(self, config: ModelConfig, layers: int) -> tuple[int, ...]:
        return window_by_layer_types(config, layers, 4096, self.default_types(config, layers))

    def default_types(self, config: ModelConfig, layers: int) -> list[str]:
        """`layer_types` if config.json is silent."""
        return types_with_full_every(self.full_every, layers)

    def check_activation(self, config: ModelConfig) -> None:
        # The class reads this field, and not hidden_act.
        name = config.get("hidden_activation", "gelu_pytorch_tanh")
        if name != "gelu_pytorch_tanh":
            config.refuse("hidden_activation", name, "supported: gelu_pytorch_tanh")

    def read_mlp(self, config: ModelConfig, layer: int) -> MlpSpec:
        return MlpSpec(config.read_integer("intermediate_size"), activation="gelu_tanh")
