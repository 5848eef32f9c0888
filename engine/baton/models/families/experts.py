"""Fields about experts that several families read alike. No torch here."""

from __future__ import annotations

from baton.models.config_file import MAX_EXPERTS, MAX_LAYERS, ModelConfig
from baton.models.spec.mlp import MlpSpec
from baton.models.spec.moe import RouterSpec


def read_experts(config: ModelConfig, names: tuple[str, ...], default: int | None) -> int:
    """The number of experts, under one of its `names`; two that disagree are refused."""
    given = [name for name in names if config.get(name) is not None]
    counts = {name: config.read_integer(name, most=MAX_EXPERTS) for name in given}
    if len(set(counts.values())) > 1:
        first, second = given[:2]
        config.refuse(second, counts[second], f"{first} says {counts[first]}; make them agree")
    if counts:
        return next(iter(counts.values()))
    return config.read_integer(names[0], default, most=MAX_EXPERTS)


def read_experts_per_token(config: ModelConfig, default: int | None, experts: int) -> int:
    """`num_experts_per_tok`, at most the number of experts."""
    return config.read_integer("num_experts_per_tok", default, most=experts)


def is_sparse(config: ModelConfig, layer: int) -> bool:
    """Return whether a layer has experts: each `decoder_sparse_step`-th one that `mlp_only_layers`
    does not list."""
    dense = config.read_checked(
        "mlp_only_layers",
        [],
        "a list of layer numbers",
        lambda v: type(v) is list and all(type(number) is int for number in v),
    )
    step = config.read_integer("decoder_sparse_step", 1)
    return layer not in dense and (layer + 1) % step == 0


def read_dense_layers(config: ModelConfig, default: int | None) -> set[int]:
    """Layers that `mlp_layer_types` calls dense, not sparse.

    Args: `default`: how many of the first layers are dense if the field is absent.
    """
    count = config.read_integer("num_hidden_layers", most=MAX_LAYERS)
    stated = ["dense" if layer < (default or 0) else "sparse" for layer in range(count)]
    types = config.read_names("mlp_layer_types", stated)
    if len(types) != count or not set(types) <= {"dense", "sparse"}:
        config.refuse("mlp_layer_types", types, f"supported: {count} times dense or sparse")
    dense = {layer for layer, kind in enumerate(types) if kind == "dense"}
    first_sparse = config.read_index("first_k_dense_replace")
    if first_sparse is not None and dense != set(range(min(first_sparse, count))):
        # Classes with the first field do not read the other one, or prefer the first.
        config.refuse("first_k_dense_replace", first_sparse, f"mlp_layer_types says {types}")
    return dense


def read_biased_router(
    config: ModelConfig,
    *,
    experts: int | None,
    chosen: int | None,
    normalizes: bool,
    groups: int = 1,
    kept_groups: int = 1,
    scaling_factor: float = 1.0,
) -> RouterSpec:
    """The router of `deepseek_v3` and its followers: sigmoid scores, a bias for the choice, groups.

    Args: defaults of the class if config.json is silent; None: the field must be there.
    """
    count = read_experts(config, ("n_routed_experts", "num_local_experts"), experts)
    num_groups = config.read_integer("n_group", groups)
    if count % num_groups or count // num_groups < 2:
        config.refuse(
            "n_group", num_groups, f"groups of at least 2 of the {count} experts are needed"
        )
    return RouterSpec(
        count,
        read_experts_per_token(config, chosen, count),
        scoring="sigmoid",
        normalizes=config.read_flag("norm_topk_prob", normalizes),
        rounds_weights=False,
        has_bias=True,
        num_groups=num_groups,
        kept_groups=config.read_integer("topk_group", kept_groups, most=num_groups),
        scaling_factor=config.read_number("routed_scaling_factor", scaling_factor),
    )


def read_shared_experts(config: ModelConfig, inner_size: int, default: int | None) -> MlpSpec:
    """`n_shared_experts` of `inner_size` as the one MLP that checkpoints make of them."""
    count = config.read_integer("n_shared_experts", default)
    size_field = "n_shared_experts * moe_intermediate_size"
    return MlpSpec(count * inner_size, module="mlp.shared_experts", size_field=size_field)
