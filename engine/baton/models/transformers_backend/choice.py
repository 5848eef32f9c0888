"""Which implementation serves a checkpoint: blocks of our own, or transformers' module. No torch.

Importing transformers imports torch, so a start that is bound to fail is refused by config.json
alone where that is possible; the module itself is asked when it is loaded
(`transformers_backend.model`).
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Literal, NoReturn

from baton.config import EngineConfig
from baton.errors import ConfigError
from baton.models.config_file import ModelConfig, read_model_config
from baton.models.families import SUPPORTED
from baton.models.families.mla import refuse_indexer
from baton.models.spec_reader import find_architecture, read_architecture

ModelImpl = Literal["native", "transformers"]
EXTRA = "pip install 'baton-serve[transformers]'"
_TABLE = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict("
_TABLE_MODULE = "modeling_auto"
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_ROPES_BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on the longest row of a batch."""


def choose_impl(config: EngineConfig, path: Path) -> ModelImpl:
    """The implementation that serves the checkpoint at `path`.

    Raises ConfigError when --model-impl, config.json and what is installed leave none.
    """
    model_config = read_model_config(path)
    if config.model_impl == "native":
        read_architecture(model_config)
        return "native"
    if config.model_impl == "auto":
        if find_architecture(model_config) is not None:
            return "native"
        if importlib.util.find_spec("transformers") is None:
            # A user without the extra learns of it here, beside the families that have blocks.
            names = model_config.read_names("architectures", [])
            model_config.refuse("architectures", names, f"{SUPPORTED}; some others after {EXTRA}")
        if not _is_known(model_config):
            read_architecture(model_config)
    _check_served(config, model_config)
    return "transformers"


def _is_known(config: ModelConfig) -> bool:
    """Return whether the installed transformers has a class for the model_type.

    Its table is read as text, because importing it would import torch.
    """
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None:
        return False
    table = Path(package.origin).parent.joinpath("models", "auto", f"{_TABLE_MODULE}.py")
    _, found, rest = table.read_text(encoding="utf-8").partition(_TABLE)
    if not found:
        raise ConfigError(
            f"--model-impl transformers: {table} has no {_TABLE.split()[0]}; {EXTRA} installs a "
            "version that is known"
        )
    names = re.findall(r'^ *\("([\w-]+)", ', rest.partition("\n)\n")[0], re.MULTILINE)
    return config.get("model_type") in names


def _check_served(config: EngineConfig, model_config: ModelConfig) -> None:
    """Raise ConfigError for what transformers' modules cannot do in this engine."""

    def refuse(problem: str) -> NoReturn:
        raise ConfigError(f"--model-impl transformers: {problem}")

    if importlib.util.find_spec("transformers") is None:
        refuse(f"transformers is not installed; {EXTRA}")
    if config.tp_size > 1:
        refuse(f"a module runs in one process, not --tp-size {config.tp_size}; use --tp-size 1")
    if config.quantization is not None:
        refuse("modules are not quantized at load; leave --quantization out")
    if config.device == "cuda":
        refuse("modules are computed on the CPU in this version; use --device cpu")
    if not _is_known(model_config):
        # Code of a checkpoint (auto_map) is never executed.
        model_config.refuse(
            "model_type",
            model_config.get("model_type"),
            "the installed transformers has no class for it, "
            "and code of a checkpoint is not executed",
        )
    if model_config.get("text_config") is not None:
        model_config.refuse(
            "text_config",
            "…",
            "modules compute models of one part; blocks of this engine serve the text part of some "
            "(docs/models.md)",
        )
    if model_config.read_flag("is_encoder_decoder", False):
        model_config.refuse("is_encoder_decoder", True, "cross attention is not served")
    refuse_indexer(model_config)
    kinds = set(model_config.read_names("layer_types", []))
    if other := sorted(kinds - _KNOWN_LAYERS):
        model_config.refuse("layer_types", other, f"supported: {', '.join(sorted(_KNOWN_LAYERS))}")
    if method := model_config.get("quantization_config"):
        method = method.get("quant_method", method) if isinstance(method, dict) else method
        model_config.refuse("quantization_config", method, "use the unquantized checkpoint")
    _check_rope(model_config)


def _check_rope(config: ModelConfig) -> None:
    for field in ("rope_scaling", "rope_parameters"):
        params = config.get(field, {})
        if not isinstance(params, dict):
            config.refuse(field, params, "an object is needed")
        groups = [value for value in params.values() if isinstance(value, dict)] or [params]
        for group in groups:
            kind = group.get("rope_type", group.get("type"))
            if kind in _ROPES_BY_LENGTH:
                config.refuse(
                    f"{field}.rope_type",
                    kind,
                    "its angles depend on the longest row of a batch, and answers would, too",
                )
