"""longrope, the rotary embedding of Phi-3 and its followers (arXiv 2402.13753). No torch here.

It has two lists of factors: one for contexts up to original_max_position_embeddings, one for longer
ones. transformers takes one of them for each forward pass, by its longest row, and computes a
request anew that crosses the border. Cached keys cannot, so the context that is served decides for
all requests (`RopeSpec.for_context`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from baton.models.config_file import ModelConfig
from baton.models.families.rope_config import (
    NAMES_OF_KIND,
    read_partial,
    read_required_number,
    read_rope,
)
from baton.models.spec.rope import LONGROPE, RopeSpec

_NAMES = ("default", LONGROPE, "su", "yarn")
"""All but the first mean longrope to these classes."""
_FIELDS = {
    "short_factor", "long_factor", "factor", "attention_factor", "original_max_position_embeddings",
    "rope_theta", "partial_rotary_factor",
}  # fmt: skip
_MSCALES = {"short_mscale", "long_mscale"}


@dataclass(frozen=True, slots=True)
class LongropeClass:
    """How a class of transformers reads its rotary embedding."""

    theta: float
    """Default rope_theta."""
    partial: float | None
    """Default partial_rotary_factor; None: the class does not read the field."""
    original: int | None
    """Default original_max_position_embeddings, beside the object; None: the class has none."""
    has_mscales: bool
    """The object states what multiplies cos and sin; the short factors hold for all contexts."""


def read_rope_or_longrope(
    config: ModelConfig, max_position: int, reader: LongropeClass
) -> RopeSpec:
    """The rotary embedding: default, or longrope. Raises ConfigError.

    Args: `max_position`: the model's max_position_embeddings.
    """
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    params = config.get(field, {})
    if not isinstance(params, dict):
        config.refuse(field, params, "an object is needed")
    name = params.get("rope_type", params.get("type", "default"))
    if not isinstance(name, str) or name not in _NAMES:
        config.refuse(f"{field}.rope_type", name, "supported: " + ", ".join(_NAMES))
    if name == "default":
        return read_rope(config, max_position, reader.partial, default_theta=reader.theta)
    rope = ModelConfig(config.path, {k: v for k, v in params.items() if k not in NAMES_OF_KIND})
    _refuse_unknown(rope, field, reader)
    original = config.read_index("original_max_position_embeddings", reader.original)
    if not original:
        original = rope.read_integer("original_max_position_embeddings", max_position)
    return _read_longrope(config, rope, field, max_position, original, reader)


def _refuse_unknown(rope: ModelConfig, field: str, reader: LongropeClass) -> None:
    """Raise ConfigError for parameters that transformers warns of and computes without."""
    known = _FIELDS | _MSCALES if reader.has_mscales else _FIELDS
    for name in rope.values.keys() - known:
        if rope.values[name] is not None:
            taken = f"rope_type {LONGROPE} takes {sorted(known)}"
            rope.refuse(f"{field}.{name}", rope.values[name], taken)


def _read_longrope(
    config: ModelConfig,
    rope: ModelConfig,
    field: str,
    max_position: int,
    original: int,
    reader: LongropeClass,
) -> RopeSpec:
    partial = read_partial(config, rope, reader.partial)
    heads = config.read_integer("num_attention_heads")
    head_dim = config.read_integer("head_dim", max(config.read_integer("hidden_size") // heads, 1))
    pairs = int(head_dim * partial) // 2
    short = _read_factors(rope, f"{field}.short_factor", rope.get("short_factor"), pairs)
    long = _read_factors(rope, f"{field}.long_factor", rope.get("long_factor"), pairs)
    if reader.has_mscales:
        short_scale = read_required_number(rope, field, LONGROPE, "short_mscale")
        long_scale = read_required_number(rope, field, LONGROPE, "long_mscale")
        long = short
    else:
        short_scale = _read_scale(rope, max_position, original)
        long_scale = short_scale
    return RopeSpec(
        rope.read_number("rope_theta", config.read_number("rope_theta", reader.theta)),
        LONGROPE,
        original_max_position=original,
        attention_factor=short_scale,
        partial=partial,
        factors=short,
        long_factors=long,
        long_attention_factor=long_scale,
    )


def _read_scale(rope: ModelConfig, max_position: int, original: int) -> float:
    """What multiplies cos and sin: a field, or sqrt(1 + ln(factor) / ln(original))."""
    factor = rope.read_number("factor", max_position / original)
    scale = 1.0
    if factor > 1.0 and original > 1:
        scale = math.sqrt(1 + math.log(factor) / math.log(original))
    return rope.read_number("attention_factor", scale)


def _read_factors(rope: ModelConfig, place: str, values: Any, count: int) -> tuple[float, ...]:
    """One factor for each pair of dimensions that turns."""
    is_list = type(values) is list and all(
        type(x) in (int, float) and 0 < x < math.inf for x in values
    )
    if not is_list or len(values) != count:
        rope.refuse(place, values, f"a list of {count} positive numbers is needed")
    return tuple(float(x) for x in values)
