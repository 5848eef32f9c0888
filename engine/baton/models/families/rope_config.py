"""Rotary embedding of a config.json: its frequencies, and the context length they were made for. No
torch here.

As transformers 5 reads it (`RotaryEmbeddingConfigMixin.convert_rope_params_to_dict`):

1. `rope_scaling`, if it is not empty, replaces `rope_parameters` as a whole;
2. `rope_theta` in that object counts before the one beside it; without either it is 10000;
3. `rope_type` counts before `type`;
4. `original_max_position_embeddings` beside the object counts before the one in it; without either
it is
   max_position_embeddings.

Parameters that transformers warns of and does not use are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baton.errors import ConfigError
from baton.models.config_file import ModelConfig
from baton.models.spec.rope import RopeSpec

_ROPE_FIELDS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
        "original_max_position_embeddings",
    },
}  # fmt: skip
NAMES_OF_KIND = ("rope_type", "type")
"""Fields of an object that say its kind, the first one if both do."""


def read_rope(
    config: ModelConfig,
    max_position: int,
    default_partial: float | None = None,
    *,
    default_theta: float = 10000.0,
) -> RopeSpec:
    """The rotary embedding of a model with `max_position` as its max_position_embeddings. Raises
    ConfigError.

    Args: defaults of the class if config.json is silent. `default_partial`: the share of a head's
    dimensions that turns; None: all turn, because the class does not read the field.
    """
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    params = config.get(field, {})
    if not isinstance(params, dict) or any(isinstance(v, dict) for v in params.values()):
        config.refuse(field, params, "one set of parameters for all layers is needed")
    theta = config.read_number("rope_theta", default_theta)
    original = config.read_index("original_max_position_embeddings")
    if original:
        params = params | {"original_max_position_embeddings": original}
    return _read_params(config, field, params, max_position, default_partial, theta)


def read_ropes_by_type(
    config: ModelConfig, max_position: int, thetas: Mapping[str, float]
) -> dict[str, RopeSpec]:
    """Rotary embeddings of the types of layers that `layer_types` names, for classes that have one
    for each. Raises ConfigError.

    `rope_parameters` has an object for each type. `rope_scaling`, the older spelling, changes that
    of full_attention.

    Args: `thetas`: rope_theta where an object has none, by type.
    """
    field = "rope_parameters"
    by_type = config.get(field, {})
    if not isinstance(by_type, dict) or not by_type.keys() <= thetas.keys():
        config.refuse(field, by_type, f"an object for each of {', '.join(thetas)} is needed")
    scaling = config.get("rope_scaling", {})
    # The class goes on with the name that its own default has.
    if not isinstance(scaling, dict) or (scaling and "rope_type" not in scaling):
        config.refuse("rope_scaling", scaling, "an object with rope_type is needed")
    ropes = {}
    for name, theta in thetas.items():
        params = by_type.get(name) or {}
        if not isinstance(params, dict):
            config.refuse(f"{field}.{name}", params, "an object is needed")
        if name == "full_attention":
            params = params | scaling
        place = f"{field}.{name}"
        ropes[name] = _read_params(config, place, params, max_position, None, theta)
    return ropes


def _read_params(
    config: ModelConfig,
    field: str,
    params: dict[str, Any],
    max_position: int,
    default_partial: float | None,
    default_theta: float,
) -> RopeSpec:
    """The object of parameters that `field` of config.json holds."""
    kind = params.get("rope_type", params.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_FIELDS:
        config.refuse(f"{field}.rope_type", kind, "supported: " + ", ".join(_ROPE_FIELDS))
    rope = ModelConfig(config.path, {k: v for k, v in params.items() if k not in NAMES_OF_KIND})
    for name in (rope.values.keys() - _ROPE_FIELDS[kind]) - {"rope_theta", "partial_rotary_factor"}:
        # transformers warns about such keys and computes without them.
        if rope.values[name] is not None and name != "original_max_position_embeddings":
            config.refuse(
                f"{field}.{name}",
                rope.values[name],
                f"rope_type {kind} takes {sorted(_ROPE_FIELDS[kind])}",
            )
    partial = read_partial(config, rope, default_partial)
    theta = rope.read_number("rope_theta", default_theta)
    if kind == "default":
        return RopeSpec(theta, partial=partial)
    return replace(_scaled_rope(rope, kind, theta, field, max_position), partial=partial)


def read_partial(config: ModelConfig, rope: ModelConfig, default: float | None) -> float:
    """`partial_rotary_factor` in the object or beside it; `default` as in `read_rope`."""
    beside = config.get("partial_rotary_factor", 1.0 if default is None else default)
    if default is not None:
        source = rope if "partial_rotary_factor" in rope.values else config
        partial = source.read_number("partial_rotary_factor", beside)
        if partial > 1.0:
            source.refuse("partial_rotary_factor", partial, "supported: up to 1.0")
        return partial
    partial = rope.values.get("partial_rotary_factor", beside)
    if partial != 1.0:
        config.refuse("partial_rotary_factor", partial, "supported: 1.0")
    return 1.0


def stretched_context(rope: RopeSpec, max_position: int) -> int:
    """Longest context of a model with `rope`, as vLLM derives it (`_get_and_verify_max_len`).

    YaRN is switched on by `rope_scaling` alone, as the model cards of Qwen2.5 and Qwen3 say: max_position_embeddings
    then still is the old limit. llama3 states the stretched one.
    """
    trained = {"linear": max_position, "yarn": rope.original_max_position}
    if rope.kind not in trained:
        return max_position
    return max(max_position, int(trained[rope.kind] * rope.factor))


def read_required_number(rope: ModelConfig, field: str, kind: str, name: str) -> float:
    """A number of the object that `field` holds, which `kind` cannot do without."""
    if rope.get(name) is None:
        raise ConfigError(f"{rope.path}: {field}.{name} is missing; rope_type {kind} needs it")
    return rope.read_number(name, 0.0)


def _scaled_rope(
    rope: ModelConfig, kind: str, theta: float, field: str, max_position: int
) -> RopeSpec:
    """A stretched kind; `rope` is the object that `field` of config.json holds."""

    def read_required(name: str) -> float:
        return read_required_number(rope, field, kind, name)

    if kind == "linear":
        return RopeSpec(theta, kind, factor=read_required("factor"))
    original = rope.read_integer("original_max_position_embeddings", max_position)
    if kind == "llama3":
        low = read_required("low_freq_factor")
        high = read_required("high_freq_factor")
        # Equal ones (Llama 4 Scout) leave no frequencies between the kept and the stretched ones.
        if low > high:
            rope.refuse(
                f"{field}.high_freq_factor", high, f"it must not be below low_freq_factor ({low})"
            )
        return RopeSpec(
            theta,
            kind,
            read_required("factor"),
            original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    factor = rope.read_number("factor", max_position / original)
    has_score_factor = bool(rope.get("mscale_all_dim"))
    all_dims = rope.read_number("mscale_all_dim", 1.0) if has_score_factor else 0.0
    return RopeSpec(
        theta, kind, factor, original,
        beta_fast=rope.read_number("beta_fast", 32.0),
        beta_slow=rope.read_number("beta_slow", 1.0),
        truncate=rope.read_flag("truncate", True),
        attention_factor=rope.read_number("attention_factor", _yarn_attention_factor(rope, factor)),
        # Queries and keys are both multiplied.
        score_factor=_yarn_temperature(factor, all_dims) ** 2,
    )  # fmt: skip


def _yarn_temperature(factor: float, weight: float) -> float:
    """0.1 ln(factor) + 1 of the YaRN paper (arXiv 2309.00071 §3.4), with a weight of the
    logarithm."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_attention_factor(rope: ModelConfig, factor: float) -> float:
    """The temperature, or the ratio of two with mscale weights."""
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return _yarn_temperature(factor, rope.read_number("mscale", 1.0)) / _yarn_temperature(
            factor, rope.read_number("mscale_all_dim", 1.0)
        )
    return _yarn_temperature(factor, 1.0)
