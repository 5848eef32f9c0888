"""Description of a checkpoint's model, read and checked: `config.json` in, `ModelSpec` out. No torch here.

1. `read_spec(path)` reads config.json and generation_config.json as written by transformers 4 or 5.
2. Every field that changes the arithmetic is either understood or refused with a ConfigError that names file, field,
   value and what is supported; a model that starts is a model we compute exactly.

A field absent from config.json means what it means to the family's class in transformers (`_FAMILIES`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from baton.errors import ConfigError
from baton.layers.model_spec import DTYPE_BYTES, ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class _Family:
    """Defaults of transformers' class of this architecture where config.json is silent."""

    kv_heads: int | None
    """Default num_key_value_heads; None: num_attention_heads."""
    max_position: int
    head_dim: int | None = None
    window: int | None = None
    always_windowed: bool = False
    """sliding_window applies to all layers whenever it is set (Mistral), else use_sliding_window decides (Qwen)."""
    qkv_bias: bool | None = None
    """None: attention_bias decides, for q, k, v and o."""
    mlp_bias_field: bool = False
    qk_norm: bool = False


_FAMILIES = {
    "LlamaForCausalLM": _Family(kv_heads=None, max_position=2048, mlp_bias_field=True),
    "MistralForCausalLM": _Family(
        kv_heads=8, max_position=131072, window=4096, always_windowed=True, qkv_bias=False
    ),
    "Qwen2ForCausalLM": _Family(kv_heads=32, max_position=32768, window=4096, qkv_bias=True),
    "Qwen3ForCausalLM": _Family(
        kv_heads=32, max_position=32768, head_dim=128, window=4096, qk_norm=True
    ),
}

_ROPE_FIELDS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
        "original_max_position_embeddings",
    },
}  # fmt: skip


class _Config:
    """config.json with typed access; every complaint names the file and the field."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    def refuse(self, field: str, value: object, supported: str) -> NoReturn:
        raise ConfigError(
            f"{self.path}: {field} = {json.dumps(value)} is not supported; {supported}"
        )

    def get(self, field: str, default: Any = None) -> Any:
        value = self.values.get(field)
        return default if value is None else value

    def checked(
        self, field: str, default: Any, needed: str, is_valid: Callable[[Any], bool]
    ) -> Any:
        value = self.get(field, default)
        if not is_valid(value):
            self.refuse(field, value, f"{needed} is needed")
        return value

    def integer(self, field: str, default: int | None = None) -> int:
        return self.checked(
            field, default, "a positive integer", lambda v: type(v) is int and v > 0
        )

    def number(self, field: str, default: float) -> float:
        found = self.checked(
            field,
            default,
            "a positive number",
            lambda v: type(v) in (int, float) and 0 < v < math.inf,
        )
        return float(found)

    def index(self, field: str, default: int | None = None) -> int | None:
        """A layer number or token id, or None when absent."""
        return self.checked(
            field,
            default,
            "an integer from 0 up",
            lambda v: v is None or (type(v) is int and v >= 0),
        )

    def names(self, field: str, default: list[str]) -> list[str]:
        return self.checked(
            field,
            default,
            "a list of names",
            lambda v: type(v) is list and all(type(name) is str for name in v),
        )

    def flag(self, field: str, default: bool) -> bool:
        return self.checked(field, default, "true or false", lambda v: type(v) is bool)


def read_spec(
    path: str | Path,
    dtype: str = "auto",
    load_format: str = "auto",
    seed: int = 0,
    *,
    on_cpu: bool = True,
) -> ModelSpec:
    """Read and check a Hugging Face model directory.

    Args:
        dtype: auto takes the checkpoint's type, on a CPU bfloat16 for float16 (CPUs compute that ten times slower).
        load_format, seed: enter `model_hash` only, so that dummy weights of two seeds are never paired.
    Raises:
        ConfigError: missing or unreadable files, or anything the decoder would not compute exactly.
    """
    root = Path(path)
    config = _Config(root / "config.json", _read_json(root / "config.json"))
    architecture, family = _architecture(config)
    _refuse_unknown_arithmetic(config)

    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", family.kv_heads or heads)
    if heads % kv_heads:
        config.refuse(
            "num_key_value_heads", kv_heads, f"it must divide num_attention_heads ({heads})"
        )
    if "head_dim" not in config.values and family.head_dim is None and hidden % heads:
        config.refuse(
            "hidden_size",
            hidden,
            f"without head_dim it must be a multiple of num_attention_heads ({heads})",
        )
    head_dim = config.integer("head_dim", family.head_dim or hidden // heads)
    if head_dim % 2:
        config.refuse("head_dim", head_dim, "rotary embedding needs an even size")

    layers = config.integer("num_hidden_layers")
    max_context = config.integer("max_position_embeddings", family.max_position)
    attention_bias = config.flag("attention_bias", False) if family.qkv_bias is None else False
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_context=max_context,
        rms_eps=config.number("rms_norm_eps", 1e-6),
        rope=_rope(config, max_context),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", False) if family.mlp_bias_field else False,
        qk_norm=family.qk_norm,
        tied=config.flag("tie_word_embeddings", False),
        windows=_windows(config, family, layers),
        dtype=_compute_dtype(dtype, _checkpoint_dtype(config, root), on_cpu=on_cpu),
        eos_token_ids=_eos_token_ids(config, root),
        bos_token_id=config.index("bos_token_id"),
        model_hash=hash_model(root, load_format, seed),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise ConfigError(
            f"{path}: {err.strerror}; give --model-path a Hugging Face model directory"
        ) from err
    except ValueError as err:
        raise ConfigError(f"{path}: not valid JSON ({err}); download the file again") from err
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a JSON object is needed, found {type(values).__name__}")
    return values


def _architecture(config: _Config) -> tuple[str, _Family]:
    names = config.names("architectures", [])
    for name in names:
        if name in _FAMILIES:
            return name, _FAMILIES[name]
    config.refuse("architectures", names, "supported: " + ", ".join(_FAMILIES))


def _refuse_unknown_arithmetic(config: _Config) -> None:
    """Fields whose usual value means nothing to do and whose other values we do not compute."""
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        config.refuse("hidden_act", config.get("hidden_act"), "supported: silu")
    if method := config.get("quantization_config"):
        method = method.get("quant_method", method) if isinstance(method, dict) else method
        config.refuse("quantization_config", method, "use the unquantized checkpoint")


def _checkpoint_dtype(config: _Config, root: Path) -> str:
    """`dtype` (transformers 5), `torch_dtype` (4), or the type of the first tensor on disk."""
    named = config.get("dtype", config.get("torch_dtype"))
    if named is None:
        named = _first_tensor_dtype(root)
    if named not in ("float32", "float16", "bfloat16"):
        config.refuse("dtype", named, "supported: float32, float16, bfloat16")
    return str(named)


def _first_tensor_dtype(root: Path) -> str:
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    for file in sorted(root.glob("*.safetensors")):
        try:
            tensors = json.loads(safetensors_header(file))
        except ValueError as err:
            raise ConfigError(
                f"{file}: no readable header ({err}); the file is damaged, download it again"
            ) from err
        for name, entry in tensors.items():
            if name != "__metadata__":
                return str(names.get(entry["dtype"], entry["dtype"]))
    return "float32"


def safetensors_header(file: Path) -> bytes:
    """The JSON header: 8 bytes little-endian length, then that many bytes."""
    with file.open("rb") as f:
        size = int.from_bytes(f.read(8), "little")
        if size > 100_000_000:
            raise ConfigError(
                f"{file}: header of {size} bytes; this is not a safetensors file, download it again"
            )
        return f.read(size)


def _compute_dtype(wanted: str, checkpoint: str, *, on_cpu: bool) -> str:
    if wanted == "auto":
        return "bfloat16" if checkpoint == "float16" and on_cpu else checkpoint
    if wanted not in DTYPE_BYTES:
        raise ConfigError(f"--dtype {wanted}: supported: auto, {', '.join(DTYPE_BYTES)}")
    return wanted


def _windows(config: _Config, family: _Family, layers: int) -> tuple[int, ...]:
    """Which layers see only the last `sliding_window` tokens."""
    if family.window is None:
        return (0,) * layers
    if family.always_windowed:
        window = config.values.get("sliding_window", family.window)
        return ((config.integer("sliding_window", window) if window is not None else 0),) * layers
    if not config.flag("use_sliding_window", False):
        types = config.names("layer_types", [])
        if "sliding_attention" in types:
            config.refuse("layer_types", types, "sliding_attention needs use_sliding_window true")
        return (0,) * layers
    window = config.integer("sliding_window", family.window)
    first = config.index("max_window_layers", 28) or 0
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    types = config.names("layer_types", default)
    if len(types) != layers or not set(types) <= {"full_attention", "sliding_attention"}:
        config.refuse(
            "layer_types", types, f"supported: {layers} times full_attention or sliding_attention"
        )
    return tuple(window if t == "sliding_attention" else 0 for t in types)


def _rope(config: _Config, max_context: int) -> RopeSpec:
    """From rope_parameters (transformers 5) or rope_theta and rope_scaling (4)."""
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    params = config.get(field, {})
    if not isinstance(params, dict) or any(isinstance(v, dict) for v in params.values()):
        config.refuse(field, params, "one set of parameters for all layers is needed")
    kind = params.get("rope_type", params.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_FIELDS:
        config.refuse(f"{field}.rope_type", kind, "supported: " + ", ".join(_ROPE_FIELDS))
    rope = _Config(config.path, {k: v for k, v in params.items() if k not in ("rope_type", "type")})
    for name in (rope.values.keys() - _ROPE_FIELDS[kind]) - {"rope_theta", "partial_rotary_factor"}:
        # transformers warns about such keys and computes without them.
        if rope.values[name] is not None and name != "original_max_position_embeddings":
            config.refuse(
                f"{field}.{name}",
                rope.values[name],
                f"rope_type {kind} takes {sorted(_ROPE_FIELDS[kind])}",
            )
    partial = params.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        config.refuse("partial_rotary_factor", partial, "supported: 1.0")
    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    if kind == "default":
        return RopeSpec(theta)
    return _scaled_rope(
        rope, kind, theta, field, config.index("original_max_position_embeddings"), max_context
    )


def _scaled_rope(
    rope: _Config, kind: str, theta: float, field: str, original: int | None, max_context: int
) -> RopeSpec:
    """A stretched kind; `original` is the config's top-level field, which transformers prefers to the nested one."""

    def required(name: str) -> float:
        if rope.get(name) is None:
            raise ConfigError(f"{rope.path}: {field}.{name} is missing; rope_type {kind} needs it")
        return rope.number(name, 0.0)

    if kind == "linear":
        return RopeSpec(theta, kind, factor=required("factor"))
    original = original or rope.integer("original_max_position_embeddings", max_context)
    if kind == "llama3":
        low, high = required("low_freq_factor"), required("high_freq_factor")
        if low >= high:
            rope.refuse(
                f"{field}.high_freq_factor", high, f"it must exceed low_freq_factor ({low})"
            )
        return RopeSpec(
            theta, kind, required("factor"), original, low_freq_factor=low, high_freq_factor=high
        )
    factor = rope.number("factor", max_context / original)
    return RopeSpec(
        theta, kind, factor, original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", _yarn_attention_factor(rope, factor)),
    )  # fmt: skip


def _yarn_attention_factor(rope: _Config, factor: float) -> float:
    """0.1 ln(factor) + 1 of the YaRN paper (arXiv 2309.00071 §3.4), or the ratio of two such with mscale weights."""

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return temperature(rope.number("mscale", 1.0)) / temperature(
            rope.number("mscale_all_dim", 1.0)
        )
    return temperature(1.0)


def _eos_token_ids(config: _Config, root: Path) -> tuple[int, ...]:
    """Ids of config.json and generation_config.json together, as both peers do."""
    file = root / "generation_config.json"
    generation = _Config(file, _read_json(file) if file.exists() else {})
    found: dict[int, None] = {}
    for source in (config, generation):
        value = source.get("eos_token_id", [])
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            source.refuse("eos_token_id", value, "a token id or a list of them is needed")
        found.update(dict.fromkeys(ids))
    return tuple(found)


_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_VOLATILE_FIELDS = ("_name_or_path", "transformers_version", "use_cache")
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def hash_model(root: Path, load_format: str = "auto", seed: int = 0) -> str:
    """32 hex digits that differ between models whose KV pages must not be mixed.

    Covers config.json (less fields that say who wrote it), the tokenizer's files, and of each weight file its header,
    length and 64 samples of 4 KiB: two fine-tunes of one model differ nearly everywhere, and reading whole files would
    cost a start of seconds. Dummy weights are covered by their seed.
    """
    digest = hashlib.sha256()

    def add(name: str, content: bytes) -> None:
        digest.update(f"{name}:{len(content)}:".encode() + content)

    config = {
        k: v for k, v in _read_json(root / "config.json").items() if k not in _VOLATILE_FIELDS
    }
    add("config", json.dumps(config, sort_keys=True).encode())
    for name in _TOKENIZER_FILES:
        if (root / name).is_file():
            add(name, (root / name).read_bytes())
    if load_format == "dummy":
        add("dummy", str(seed).encode())
        return digest.hexdigest()[:32]
    for file in sorted(root.glob("*.safetensors")):
        size = file.stat().st_size
        add(file.name, safetensors_header(file) + size.to_bytes(8, "little"))
        with file.open("rb") as f:
            for i in range(_SAMPLES):
                f.seek(size * i // _SAMPLES)
                add("sample", f.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
