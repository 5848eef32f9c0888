"""Kimi-Linear (transformers' KimiLinearForCausalLM)."""

from __future__ import annotations

from dataclasses import replace

from baton.layers.spec import DeltaSpec
from baton.models.config_file import ModelConfig
from baton.models.families.delta_net import FULL, MOST_TAPS, STATE, place_states
from baton.models.families.experts import (
    read_biased_router,
    read_dense_layers,
    read_shared_experts,
)
from baton.models.families.mixtral import MIXTRAL_NAMES
from baton.models.families.mla import MlaFamily
from baton.models.spec.delta_net import KimiDeltaBlockSpec
from baton.models.spec.mla import MlaBlockSpec
from baton.models.spec.mlp import MlpSpec
from baton.models.spec.model import LayerSpec
from baton.models.spec.moe import MoeSpec
from baton.models.spec.norm import NormSpec
from baton.models.spec.rope import RopeSpec

_NESTED = "linear_attn_config"
_SPELLINGS = {
    "max_position_embeddings": "model_max_length",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "n_shared_experts": "num_shared_experts",
    "scoring_func": "moe_router_activation_func",
    "linear_head_dim": f"{_NESTED}.head_dim",
    "linear_num_heads": f"{_NESTED}.num_heads",
    "linear_conv_kernel_dim": f"{_NESTED}.short_conv_kernel_size",
}
_SPARSE_MODULE = "block_sparse_moe"


class KimiLinearFamily(MlaFamily):
    """Kimi delta attention, and in some layers latent attention without positions; the first layers
    are dense, the others have experts beside shared ones."""

    architecture = "KimiLinearForCausalLM"
    model_type = "kimi_linear"
    max_position = 1048576
    rms_eps = 1e-5
    q_rank = None
    attention = (
        "Kimi delta attention (a state per sequence, whose rows decay by themselves); in some "
        "layers latents (MLA), without rotation"
    )
    feed_forward = "experts and shared experts, or a gated MLP, by layer"

    def read_layers(self, config: ModelConfig) -> tuple[LayerSpec, ...]:
        config = _read_spellings(config)
        layers = super().read_layers(config)
        return place_states(
            config, layers, self._read_delta(config), _default_types(config, len(layers))
        )

    def _read_delta(self, config: ModelConfig) -> KimiDeltaBlockSpec:
        heads = config.read_integer("linear_num_heads", 32)
        head_dim = config.read_integer("linear_head_dim", 128)
        taps = config.read_integer("linear_conv_kernel_dim", 4, most=MOST_TAPS)
        delta = DeltaSpec(heads, heads, head_dim, head_dim, taps=taps)
        return KimiDeltaBlockSpec(delta, NormSpec(self.read_norm(config).eps, is_float32=True))

    def read_max_context(self, config: ModelConfig) -> int:
        return self.read_max_position(_read_spellings(config))

    def read_ropes(
        self, config: ModelConfig, windows: tuple[int, ...]
    ) -> tuple[RopeSpec | None, ...]:
        if not config.read_flag("mla_use_nope", True):
            config.refuse("mla_use_nope", False, "supported: true")
        return (None,) * len(windows)

    def read_attention_block(self, config: ModelConfig) -> MlaBlockSpec:
        # Published files say hidden_size / num_attention_heads there, which nothing is as large as.
        values = {name: value for name, value in config.values.items() if name != "head_dim"}
        return super().read_attention_block(ModelConfig(config.path, values))

    def read_mlp(self, config: ModelConfig, layer: int) -> MlpSpec | MoeSpec:
        if layer in read_dense_layers(config, config.read_index("first_k_dense_replace", 1)):
            # transformers renames all blocks alike when it saves.
            size = config.read_integer("intermediate_size", 9216)
            return MlpSpec(size, other_module=_SPARSE_MODULE)
        self.check_router(config, "sigmoid", ("noaux_tc",))
        router = read_biased_router(
            config, experts=256, chosen=8, normalizes=True, scaling_factor=2.446
        )
        inner = config.read_integer("moe_intermediate_size", 1024)
        shared = read_shared_experts(config, inner, 1)
        shared = replace(shared, module=f"{_SPARSE_MODULE}.shared_experts")
        return MoeSpec(router, inner, names=MIXTRAL_NAMES, shared=shared)


def _read_spellings(config: ModelConfig) -> ModelConfig:
    """config.json with the names that published files and transformers' own give to fields."""
    nested = config.read_checked(_NESTED, {}, "an object", lambda v: type(v) is dict)
    values = config.values | {f"{_NESTED}.{name}": value for name, value in nested.items()}
    return ModelConfig(config.path, values, _SPELLINGS)


def _default_types(config: ModelConfig, layers: int) -> list[str]:
    """The lists of `linear_attn_config`, which count from 1, or else every fourth layer but the
    first."""
    fields = (f"{_NESTED}.kda_layers", f"{_NESTED}.full_attn_layers")
    # To the class one list alone is none.
    if any(config.get(field) is None for field in fields):
        return [FULL if number and number % 4 == 0 else STATE for number in range(layers)]
    states, full = (
        config.read_checked(
            field,
            None,
            "a list of layer numbers",
            lambda v: type(v) is list and all(type(number) is int for number in v),
        )
        for field in fields
    )
    numbers = range(1, layers + 1)
    if sorted(states + full) != list(numbers):
        config.refuse(
            fields[0], states, f"with {full} each layer from 1 to {layers} is needed once"
        )
    return [FULL if number in full else STATE for number in numbers]
