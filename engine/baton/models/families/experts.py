"""Fields about experts that several families read alike. No torch here."""

from __future__ import annotations

from baton.models.config_file import ModelConfig


def read_experts(config: ModelConfig, names: tuple[str, ...], default: int) -> int:
    """The number of experts, under one of its `names`; two that disagree are refused."""
    given = [name for name in names if config.get(name) is not None]
    counts = {name: config.read_integer(name) for name in given}
    if len(set(counts.values())) > 1:
        first, second = given[:2]
        config.refuse(second, counts[second], f"{first} says {counts[first]}; make them agree")
    return next(iter(counts.values()), default)


def read_experts_per_token(config: ModelConfig, default: int, experts: int) -> int:
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
