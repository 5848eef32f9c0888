"""FP8 in blocks, per tensor or per row. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from baton.models.config_file import ModelConfig
from baton.models.quantized.forms import MatrixForm, ScaledForm
from baton.models.quantized.methods.fields import refuse_unknown_fields
from baton.models.quantized.scheme import Exclusions

_KNOWN = {
    "quant_method", "activation_scheme", "weight_block_size", "fmt", "scale_fmt",
    "modules_to_not_convert", "ignored_layers", "modules_to_convert", "dequantize", "expert_dtype",
    "kv_cache_scheme",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """All linear modules but the excluded ones have one form."""

    form: ScaledForm
    exclusions: tuple[Exclusions, ...]
    method: str = "fp8"

    def form_of(self, module: str) -> MatrixForm | None:
        return self.form

    def find_exclusion(self, module: str, *, loosely: bool = False) -> str | None:
        found = (entries.find(module, loosely=loosely) for entries in self.exclusions)
        return next((entry for entry in found if entry), None)


def read_scheme(config: ModelConfig) -> Fp8Scheme:
    refuse_unknown_fields(config, _KNOWN)
    config.read_checked(
        "activation_scheme", "dynamic", "dynamic or static", ("dynamic", "static").__contains__
    )
    config.read_checked("fmt", "e4m3", "e4m3", ("e4m3", "float8_e4m3fn").__contains__)
    config.read_checked("expert_dtype", "fp8", "fp8", lambda v: v == "fp8")
    config.read_checked("modules_to_convert", [], "an empty list", lambda v: v == [])
    scale_format = config.read_checked(
        "scale_fmt", "float", "float or ue8m0", ("float", "ue8m0").__contains__
    )
    block = config.read_checked(
        "weight_block_size",
        None,
        "a list of two positive integers, or null",
        lambda v: (
            v is None
            or (type(v) is list and len(v) == 2 and all(type(n) is int and n > 0 for n in v))
        ),
    )
    form = ScaledForm(
        "F8_E4M3",
        tuple(block) if block else None,
        ("weight_scale_inv", "weight_scale"),
        takes_exponents=scale_format == "ue8m0",
    )
    lists = ("modules_to_not_convert", "ignored_layers")
    return Fp8Scheme(form, tuple(Exclusions(config, field) for field in lists))
