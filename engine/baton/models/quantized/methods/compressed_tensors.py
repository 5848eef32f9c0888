"""What llm-compressor writes: integers packed in words, int8 and FP8 with scales. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from baton.models.config_file import ModelConfig
from baton.models.quantized.forms import MatrixForm, PackedForm, ScaledForm
from baton.models.quantized.methods.fields import read_group_size, refuse_unknown_fields

_KNOWN = {
    "quant_method", "config_groups", "format", "ignore", "kv_cache_scheme", "quantization_status",
    "global_compression_ratio", "version", "run_compressed", "dequantize",
    "use_optimized_inference", "sparsity_config", "transform_config", "moe_sparsity_config",
}  # fmt: skip
_GROUP_KNOWN = {"targets", "weights", "input_activations", "output_activations", "format"}
_WEIGHTS_KNOWN = {
    "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic",
    "actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype",
}  # fmt: skip
_PACKED = "pack-quantized"
_MIXED = "mixed-precision"
_SCALED = ("int-quantized", "float-quantized", "naive-quantized")
_LINEAR = "Linear"
"""Class of all matrices that are multiplied."""


@dataclass(frozen=True, slots=True)
class NamePattern:
    """An entry of `targets` or `ignore`: a module's name, a class, or `re:` and an expression for
    the start of names."""

    entry: str
    pattern: re.Pattern[str] | None

    def rank(self, module: str) -> int | None:
        """How exactly it names a module, 0 at best; None: not at all."""
        if self.entry == module:
            return 0
        if self.pattern is not None:
            return 1 if self.pattern.match(module) else None
        return 2 if self.entry == _LINEAR else None


@dataclass(frozen=True, slots=True)
class TargetGroup:
    """An entry of `config_groups`."""

    targets: tuple[NamePattern, ...]
    form: MatrixForm


@dataclass(frozen=True, slots=True)
class CompressedTensorsScheme:
    """The group whose target names a module most exactly counts, and of equal ones the first."""

    groups: tuple[TargetGroup, ...]
    ignored: tuple[NamePattern, ...]
    method: str = "compressed-tensors"

    def form_of(self, module: str) -> MatrixForm | None:
        best: tuple[int, MatrixForm] | None = None
        for group in self.groups:
            for target in group.targets:
                rank = target.rank(module)
                if rank is not None and (best is None or rank < best[0]):
                    best = (rank, group.form)
        return best[1] if best else None

    def find_exclusion(self, module: str, *, loosely: bool = False) -> str | None:
        for name in self.ignored:
            if name.rank(module) is not None or (loosely and name.entry in module):
                return f'ignore lists "{name.entry}"'
        return None


def read_scheme(config: ModelConfig) -> CompressedTensorsScheme:
    refuse_unknown_fields(config, _KNOWN)
    for field in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        value = config.get(field)
        is_dense = isinstance(value, dict) and value.get("format") == "dense"
        if value and not is_dense:
            config.refuse(field, value, "use a checkpoint that is only quantized")
    # Where the KV cache alone is quantized, there are none.
    may_be_empty = bool(config.get("kv_cache_scheme"))
    groups = config.read_checked(
        "config_groups",
        None,
        "an object with groups",
        lambda v: type(v) is dict and (bool(v) or may_be_empty),
    )
    return CompressedTensorsScheme(
        tuple(_read_group(config, name, values) for name, values in groups.items()),
        tuple(_read_pattern(config, "ignore", entry) for entry in config.read_names("ignore", [])),
    )


def _read_pattern(config: ModelConfig, field: str, entry: str) -> NamePattern:
    if not entry.startswith("re:"):
        return NamePattern(entry, None)
    try:
        return NamePattern(entry, re.compile(entry[3:]))
    except re.error as err:
        config.refuse(field, entry, f"a regular expression is needed ({err})")


def _read_group(config: ModelConfig, name: str, values: object) -> TargetGroup:
    place = f"config_groups.{name}."
    if not isinstance(values, dict):
        config.refuse(place.removesuffix("."), values, "an object is needed")
    group = ModelConfig(config.path, values)
    refuse_unknown_fields(group, _GROUP_KNOWN, place)
    targets = group.read_names("targets", [])
    weights = group.get("weights")
    if not isinstance(weights, dict):
        config.refuse(f"{place}weights", weights, "an object is needed")
    packing = group.get("format", config.get("format"))
    form = _read_form(ModelConfig(config.path, weights), packing, f"{place}weights.")
    patterns = tuple(_read_pattern(group, "targets", entry) for entry in targets)
    return TargetGroup(patterns, form)


def _read_form(weights: ModelConfig, packing: object, place: str) -> MatrixForm:
    refuse_unknown_fields(weights, _WEIGHTS_KNOWN, place)
    if packing != _PACKED and packing not in _SCALED:
        supported = ", ".join((_PACKED, *_SCALED))
        weights.refuse("format", packing, f"supported: {supported}; with {_MIXED}, in each group")
    weights.read_checked("dynamic", False, "false", lambda v: v is False)
    kind = weights.read_checked("type", "int", "int or float", ("int", "float").__contains__)
    bits = weights.read_integer("num_bits", 8)
    has_zeros = not weights.read_flag("symmetric", True)
    group_size = _read_block(weights)
    if packing == _PACKED:
        return _packed_form(weights, kind, bits, group_size, has_zeros)
    code_types = {("int", 8): "I8", ("float", 8): "F8_E4M3"}
    if (kind, bits) not in code_types or packing == {"int": "float", "float": "int"}[kind] + (
        "-quantized"
    ):
        weights.refuse("num_bits", bits, f"supported in {packing}: 8 bits of its own type")
    if kind == "float" and has_zeros:
        weights.refuse("symmetric", False, "FP8 has no zero points")
    return ScaledForm(code_types[kind, bits], group_size, has_zeros=has_zeros)


def _packed_form(
    weights: ModelConfig, kind: str, bits: int, block: tuple[int, int], has_zeros: bool
) -> PackedForm:
    if kind != "int" or not 2 <= bits <= 8:
        weights.refuse("num_bits", bits, f"supported in {_PACKED}: integers of 2 to 8 bits")
    if block[0] != 1:
        strategy = weights.get("strategy")
        weights.refuse("strategy", strategy, f"supported in {_PACKED}: channel, group")
    order = weights.get("actorder")
    if order not in (None, False, True, "group", "dynamic", "weight", "static"):
        weights.refuse("actorder", order, "supported: null, weight, group")
    is_reordered = order in (True, "group", "dynamic")
    return PackedForm(bits, block[1], has_zeros, is_reordered)


def _read_block(weights: ModelConfig) -> tuple[int, int]:
    """Rows and columns that share a scale, 0 for all."""
    group_size = weights.get("group_size")
    default = "group" if group_size is not None and group_size != -1 else "channel"
    if group_size is None:
        default = "tensor"
    strategies = ("tensor", "channel", "group", "block")
    strategy = weights.read_checked(
        "strategy", default, f"one of {', '.join(strategies)}", strategies.__contains__
    )
    if strategy == "tensor":
        return (0, 0)
    if strategy == "channel":
        return (1, 0)
    if strategy == "group":
        return (1, read_group_size(weights))
    block = weights.read_checked(
        "block_structure",
        None,
        "a list of two positive integers",
        lambda v: type(v) is list and len(v) == 2 and all(type(n) is int and n > 0 for n in v),
    )
    return (block[0], block[1])
