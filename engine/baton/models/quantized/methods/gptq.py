"""GPTQ: zeros of both versions, reordered columns, rules by module. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from baton.models.config_file import ModelConfig
from baton.models.quantized.forms import GptqForm, MatrixForm
from baton.models.quantized.methods.fields import read_group_size, refuse_unknown_fields

_BITS = (2, 3, 4, 8)
WITHOUT_EFFECT = {
    "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment",
    "damp_percent", "dataset", "disable_exllama", "exllama_config", "act_group_aware",
    "is_marlin_format", "max_input_length", "meta", "model_file_base_name", "model_name_or_path",
    "model_seqlen", "module_name_preceding_first_block", "mse", "pad_token_id", "pack_impl",
    "static_groups", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama", "v2",
    "do_fuse", "exllama_version", "fuse_max_seq_len", "modules_to_fuse", "quantizer", "tag",
}  # fmt: skip
"""Fields that say how a checkpoint was made, or with which kernels it is computed."""
_KNOWN = {
    "quant_method", "bits", "group_size", "desc_act", "sym", "checkpoint_format", "format",
    "dynamic", "lm_head", "pack_dtype", "modules_in_block_to_quantize", *WITHOUT_EFFECT,
}  # fmt: skip
_RULE_KNOWN = {"bits", "group_size", "desc_act", "sym", *WITHOUT_EFFECT}
_FORMATS = {"gptq": 1, "gptq_v2": 0}
"""By checkpoint_format, what is added to a stored zero."""


@dataclass(frozen=True, slots=True)
class GptqRule:
    """An entry of `dynamic`."""

    entry: str
    pattern: re.Pattern[str]
    form: GptqForm | None
    """None excludes the modules."""


@dataclass(frozen=True, slots=True)
class GptqScheme:
    """All linear modules have one form, but where a rule says otherwise."""

    form: GptqForm
    rules: tuple[GptqRule, ...]
    """The first that matches the start of a module's name counts."""
    block_modules: tuple[str, ...] | None
    """Names of modules within a layer that are quantized; None: all."""
    has_quantized_head: bool
    method: str = "gptq"

    def _rule_of(self, module: str) -> GptqRule | None:
        return next((rule for rule in self.rules if rule.pattern.match(module)), None)

    def form_of(self, module: str) -> MatrixForm | None:
        rule = self._rule_of(module)
        return self.form if rule is None or rule.form is None else rule.form

    def find_exclusion(self, module: str, *, loosely: bool = False) -> str | None:
        rule = self._rule_of(module)
        if rule is not None and rule.form is None:
            return f'dynamic lists "{rule.entry}"'
        if module == "lm_head":
            return None if self.has_quantized_head else "lm_head is false"
        if self.block_modules is not None and not module.endswith(self.block_modules):
            return "modules_in_block_to_quantize does not list it"
        return None


def read_scheme(config: ModelConfig) -> GptqScheme:
    refuse_unknown_fields(config, _KNOWN)
    config.read_checked("pack_dtype", "int32", "int32", lambda v: v == "int32")
    config.read_checked("is_marlin_format", False, "false", lambda v: v is False)
    config.read_flag("sym", True)
    field = "format" if config.get("checkpoint_format") is None else "checkpoint_format"
    version = config.read_checked(field, "gptq", "gptq or gptq_v2", _FORMATS.__contains__)
    form = _read_form(config, _FORMATS[version], None)
    rules = config.read_checked("dynamic", {}, "an object", lambda v: type(v) is dict)
    return GptqScheme(
        form,
        tuple(_read_rule(config, entry, changes, form) for entry, changes in rules.items()),
        _read_block_modules(config),
        config.read_flag("lm_head", False),
    )


def _read_form(config: ModelConfig, zero_offset: int, default: GptqForm | None) -> GptqForm:
    """Args: `default`: of fields that are absent; None: the class's."""
    bits = config.read_checked(
        "bits",
        default.bits if default else None,
        f"one of {', '.join(map(str, _BITS))}",
        lambda v: type(v) is int and v in _BITS,
    )
    group_size = read_group_size(config, default=(default.group_size or -1) if default else 128)
    is_reordered = config.read_flag("desc_act", default.is_reordered if default else False)
    return GptqForm(bits, group_size, zero_offset, is_reordered)


def _read_rule(config: ModelConfig, entry: str, changes: object, form: GptqForm) -> GptqRule:
    excludes = entry.startswith("-:")
    text = entry[2:] if entry.startswith(("-:", "+:")) else entry
    try:
        pattern = re.compile(text)
    except re.error as err:
        config.refuse("dynamic", entry, f"a regular expression is needed ({err})")
    if excludes:
        return GptqRule(entry, pattern, None)
    if not isinstance(changes, dict):
        config.refuse(f"dynamic.{entry}", changes, "an object is needed")
    nested = ModelConfig(config.path, changes)
    refuse_unknown_fields(nested, _RULE_KNOWN, f"dynamic.{entry}.")
    return GptqRule(entry, pattern, _read_form(nested, form.zero_offset, form))


def _read_block_modules(config: ModelConfig) -> tuple[str, ...] | None:
    field = "modules_in_block_to_quantize"
    lists = config.read_checked(
        field,
        [],
        "a list of lists of names",
        lambda v: type(v) is list and all(type(names) is list for names in v),
    )
    names = [f".{name}" for group in lists for name in group]
    return tuple(names) or None
