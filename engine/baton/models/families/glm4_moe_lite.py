"""GLM 4.7 Flash (transformers' Glm4MoeLiteForCausalLM)."""

from __future__ import annotations

from baton.models.config_file import MAX_LAYERS, ModelConfig
from baton.models.families.experts import read_biased_router, read_shared_experts
from baton.models.families.mla import MlaFamily
from baton.models.spec.mlp import MlpSpec
from baton.models.spec.moe import MoeSpec

_DENSE = "dense"
_SPARSE = "sparse"


class Glm4MoeLiteFamily(MlaFamily):
    """Latent attention; config.json says which layers are dense, by default the first one."""

    architecture = "Glm4MoeLiteForCausalLM"
    model_type = "glm4_moe_lite"
    max_position = 202752
    rms_eps = 1e-5
    q_rank = 768
    plain_dim = 192
    value_dim = 256
    has_draft_layers = True
    feed_forward = "experts and shared experts, or a gated MLP, by layer"

    def read_mlp(self, config: ModelConfig, layer: int) -> MlpSpec | MoeSpec:
        if self._read_layer_types(config)[layer] == _DENSE:
            return MlpSpec(config.read_integer("intermediate_size", 10240))
        self.check_router(config, "sigmoid", ("noaux_tc",))
        router = read_biased_router(
            config, experts=64, chosen=4, normalizes=True, scaling_factor=1.8
        )
        inner = config.read_integer("moe_intermediate_size", 1536)
        return MoeSpec(router, inner, shared=read_shared_experts(config, inner, 1))

    def _read_layer_types(self, config: ModelConfig) -> list[str]:
        count = config.read_integer("num_hidden_layers", most=MAX_LAYERS)
        default = [_DENSE, *[_SPARSE] * (count - 1)]
        types = config.read_names("mlp_layer_types", default)
        if len(types) != count or not set(types) <= {_DENSE, _SPARSE}:
            config.refuse("mlp_layer_types", types, f"supported: {count} times dense or sparse")
        first_sparse = config.read_index("first_k_dense_replace")
        stated = [_DENSE if layer < (first_sparse or 0) else _SPARSE for layer in range(count)]
        if first_sparse is not None and types != stated:
            # The class does not read the field, which its predecessors have.
            config.refuse("first_k_dense_replace", first_sparse, f"mlp_layer_types says {types}")
        return types
