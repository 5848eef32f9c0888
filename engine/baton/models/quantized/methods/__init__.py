"""Methods of quantization: one file each says what `quantization_config` means to it. No torch
here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton.config.files import is_given
from baton.models.config_file import ModelConfig
from baton.models.quantized.methods import awq, compressed_tensors, fp8, gptq, mxfp4
from baton.models.quantized.scheme import QuantizationScheme
from baton.models.weight_files import text_name

FIELD = "quantization_config"
MODELOPT_FILE = "hf_quant_config.json"
_READERS: dict[str, Callable[[ModelConfig], QuantizationScheme]] = {
    "fp8": fp8.read_scheme,
    "awq": awq.read_scheme,
    "gptq": gptq.read_scheme,
    "compressed-tensors": compressed_tensors.read_scheme,
    "mxfp4": mxfp4.read_scheme,
}
_DEQUANTIZE = "load it with transformers, call model.dequantize(), and save_pretrained the result"
_REMEDIES = {
    "bitsandbytes": f"{_DEQUANTIZE}; or use the unquantized, an FP8, AWQ or GPTQ checkpoint",
    "gguf": "load it with transformers (from_pretrained with gguf_file), and save_pretrained the "
    "result; or use the unquantized, an FP8, AWQ or GPTQ checkpoint",
}


def read_quantization(config: ModelConfig, root: Path) -> QuantizationScheme | None:
    """How the checkpoint in `root` is quantized; None: not at all.

    Raises ConfigError for methods, packings and fields that are not known.
    """
    values = config.get(FIELD)
    if values is None:
        if is_given(root / MODELOPT_FILE):
            ModelConfig(root / MODELOPT_FILE, {}).refuse(
                "producer", "modelopt", _supported("modelopt")
            )
        return None
    if not isinstance(values, dict):
        config.refuse(FIELD, values, "an object is needed")
    nested = ModelConfig(config.path, _in_text_names(values))
    method = nested.get("quant_method")
    if method not in _READERS:
        config.refuse(f"{FIELD}.quant_method", method, _supported(str(method)))
    return _READERS[method](nested)


def _in_text_names(value: Any) -> Any:
    """The JSON value with names of modules as a checkpoint of the text part alone has them."""
    if isinstance(value, list):
        return [_in_text_names(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _in_text_names(entry) for name, entry in value.items()}
    return text_name(value) if isinstance(value, str) else value


def _supported(method: str) -> str:
    remedy = _REMEDIES.get(method, "use the unquantized checkpoint")
    return f"supported: {', '.join(_READERS)}; {remedy}"
