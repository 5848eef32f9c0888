"""AWQ in its gemm packing. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from baton.models.config_file import ModelConfig
from baton.models.quantized.forms import AwqForm, MatrixForm
from baton.models.quantized.methods.fields import read_group_size, refuse_unknown_fields
from baton.models.quantized.methods.gptq import WITHOUT_EFFECT
from baton.models.quantized.scheme import Exclusions

_KNOWN = {
    "quant_method", "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version",
    "format", "modules_to_not_convert", *WITHOUT_EFFECT,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AwqScheme:
    """All linear modules but the excluded ones have one form."""

    form: AwqForm
    exclusions: Exclusions
    method: str = "awq"

    def form_of(self, module: str) -> MatrixForm | None:
        return self.form

    def find_exclusion(self, module: str, *, loosely: bool = False) -> str | None:
        return self.exclusions.find(module, loosely=loosely)


def read_scheme(config: ModelConfig) -> AwqScheme:
    refuse_unknown_fields(config, _KNOWN)
    for field in ("bits", "w_bit"):
        config.read_checked(field, 4, "4", lambda v: v == 4)
    for field in ("version", "format"):
        config.read_checked(
            field,
            "gemm",
            'the packing "gemm"',
            lambda v: type(v) is str and v.lower() == "gemm",
        )
    # Without zero points the gemm packing still stores them, all alike.
    config.read_flag("zero_point", True)
    field = "q_group_size" if config.get("group_size") is None else "group_size"
    return AwqScheme(
        AwqForm(read_group_size(config, field)), Exclusions(config, "modules_to_not_convert")
    )
