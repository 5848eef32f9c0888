"""MXFP4 as gpt-oss has it: the matrices of all experts, and no others. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from baton.models.config_file import ModelConfig
from baton.models.quantized.forms import MatrixForm, Mxfp4Form
from baton.models.quantized.methods.fields import refuse_unknown_fields
from baton.models.quantized.scheme import Exclusions

_KNOWN = {"quant_method", "modules_to_not_convert", "dequantize"}
_JOINT = (".experts.gate_up_proj", ".experts.down_proj")
"""Ends of the names of tensors that have the matrices of all experts."""


@dataclass(frozen=True, slots=True)
class Mxfp4Scheme:
    """The joint matrices of experts have one form."""

    exclusions: Exclusions
    method: str = "mxfp4"

    def form_of(self, module: str) -> MatrixForm | None:
        return Mxfp4Form() if module.endswith(_JOINT) else None

    def find_exclusion(self, module: str, *, loosely: bool = False) -> str | None:
        return self.exclusions.find(module, loosely=loosely)


def read_scheme(config: ModelConfig) -> Mxfp4Scheme:
    refuse_unknown_fields(config, _KNOWN)
    return Mxfp4Scheme(Exclusions(config, "modules_to_not_convert"))
