"""Reader of a checkpoint's config.json, the only one: limits and arithmetic come from the same fields. No torch here.

Where config.json has two spellings of one fact, the reader goes by transformers 5, or refuses:

| fact | spellings | what counts |
|---|---|---|
| family | `model_type`, `architectures` | either alone; two that disagree are refused |
| type of the weights | `dtype`, `torch_dtype` | the first that is not null, else the first tensor's type |
| rotary embedding | `rope_scaling`, `rope_parameters`, `rope_theta` | see `models.rope_config` |
| longest context | `max_position_embeddings`, stretched by the rotary embedding | the longer one |

A field that is absent means what it means to the family's class in transformers (`FAMILIES`). So does null, but for
the fields where the class takes null for a value of its own: `ModelConfig.is_null` tells the two apart.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path

from baton.config.files import is_given, read_regular_file
from baton.errors import ConfigError
from baton.layers.model_spec import DTYPE_BYTES, ModelSpec
from baton.models.config_file import (
    MAX_LAYERS,
    ModelConfig,
    read_generation_config,
    read_json,
    read_model_config,
)
from baton.models.rope_config import read_rope, stretched_context
from baton.models.weight_files import (
    find_tensor,
    first_float_type,
    have_equal_content,
    refuse_unreadable,
    safetensors_header,
    weight_files,
)

log = logging.getLogger("baton.spec")

UNKNOWN_MAX_POSITION = 2048
"""Context length of a family that we do not know and that names none: the shortest of the families we load."""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Defaults of transformers' class of an architecture where config.json has no value."""

    model_type: str
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


FAMILIES = {
    "LlamaForCausalLM": ModelFamily("llama", kv_heads=None, max_position=2048, mlp_bias_field=True),
    "MistralForCausalLM": ModelFamily(
        "mistral",
        kv_heads=8,
        max_position=131072,
        window=4096,
        always_windowed=True,
        qkv_bias=False,
    ),
    "Qwen2ForCausalLM": ModelFamily(
        "qwen2", kv_heads=32, max_position=32768, window=4096, qkv_bias=True
    ),
    "Qwen3ForCausalLM": ModelFamily(
        "qwen3", kv_heads=32, max_position=32768, head_dim=128, window=4096, qk_norm=True
    ),
}


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
    config = read_model_config(root)
    architecture = read_architecture(config)
    family = FAMILIES[architecture]
    _refuse_unknown_arithmetic(config)

    hidden = config.read_integer("hidden_size")
    heads = config.read_integer("num_attention_heads")
    default_kv_heads = heads if config.is_null("num_key_value_heads") else family.kv_heads or heads
    kv_heads = config.read_integer("num_key_value_heads", default_kv_heads)
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
    head_dim = config.read_integer("head_dim", family.head_dim or hidden // heads)
    if head_dim % 2:
        config.refuse("head_dim", head_dim, "rotary embedding needs an even size")

    layers = config.read_integer("num_hidden_layers", most=MAX_LAYERS)
    attention_bias = config.read_flag("attention_bias", False) if family.qkv_bias is None else False
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.read_integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.read_integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_context=read_max_context(config),
        rms_eps=config.read_number("rms_norm_eps", 1e-6),
        rope=read_rope(config, read_max_position(config)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias,
        mlp_bias=config.read_flag("mlp_bias", False) if family.mlp_bias_field else False,
        qk_norm=family.qk_norm,
        tied=_is_tied(config, root, load_format),
        windows=_read_windows(config, family, layers),
        dtype=_compute_dtype(dtype, _checkpoint_dtype(config, root), on_cpu=on_cpu),
        eos_token_ids=read_eos_token_ids(config, read_generation_config(root)),
        bos_token_id=config.read_index("bos_token_id"),
        model_hash=hash_model(root, load_format, seed),
    )


def find_architecture(config: ModelConfig) -> str | None:
    """The supported architecture that config.json names, if any.

    transformers chooses the class by `model_type`, other servers by `architectures`. Raises ConfigError where that
    would not be the same class.
    """
    names = config.read_names("architectures", [])
    named = next((name for name in names if name in FAMILIES), None)
    model_type = config.get("model_type")
    if model_type is None:
        return named
    typed = next(
        (name for name, family in FAMILIES.items() if family.model_type == model_type), None
    )
    if named is not None and named != typed:
        config.refuse(
            "model_type",
            model_type,
            f"architectures says {named}, which is {FAMILIES[named].model_type}; make them agree",
        )
    return named if names else typed


def read_architecture(config: ModelConfig) -> str:
    """The architecture that the decoder computes. Raises ConfigError for any other."""
    architecture = find_architecture(config)
    if architecture is None:
        supported = "supported: " + ", ".join(FAMILIES)
        config.refuse("architectures", config.read_names("architectures", []), supported)
    return architecture


def read_max_position(config: ModelConfig) -> int:
    """`max_position_embeddings`, or the family's default [tokens]."""
    architecture = find_architecture(config)
    default = UNKNOWN_MAX_POSITION if architecture is None else FAMILIES[architecture].max_position
    return config.read_integer("max_position_embeddings", default)


def read_max_context(config: ModelConfig) -> int:
    """Longest prompt + answer the model was made for [tokens]."""
    max_position = read_max_position(config)
    return stretched_context(read_rope(config, max_position), max_position)


def read_eos_token_ids(*sources: ModelConfig) -> tuple[int, ...]:
    """Ids of all `sources` together (config.json and generation_config.json), as both peers do."""
    token_ids: dict[int, None] = {}
    for source in sources:
        value = source.get("eos_token_id", [])
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            source.refuse("eos_token_id", value, "a token id or a list of them is needed")
        token_ids.update(dict.fromkeys(ids))
    return tuple(token_ids)


def _refuse_unknown_arithmetic(config: ModelConfig) -> None:
    """Fields whose usual value means nothing to do and whose other values we do not compute."""
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        config.refuse("hidden_act", config.get("hidden_act"), "supported: silu")
    if method := config.get("quantization_config"):
        method = method.get("quant_method", method) if isinstance(method, dict) else method
        config.refuse("quantization_config", method, "use the unquantized checkpoint")
    if named := config.get("transformers_weights"):
        supported = "supported: model.safetensors, or the files of its index"
        config.refuse("transformers_weights", named, supported)


def _checkpoint_dtype(config: ModelConfig, root: Path) -> str:
    """`dtype` (transformers 5), `torch_dtype` (4), or the type of the first tensor on disk."""
    named = config.get("dtype", config.get("torch_dtype"))
    if named is None:
        named = first_float_type(root)
    if named not in ("float32", "float16", "bfloat16"):
        config.refuse("dtype", named, "supported: float32, float16, bfloat16")
    return str(named)


def _is_tied(config: ModelConfig, root: Path, load_format: str) -> bool:
    """Read `tie_word_embeddings`, which a head of other content in the files overrules.

    Merged adapters leave such heads behind; transformers 5 (`tie_weights`) and vLLM keep them, too.
    """
    if not config.read_flag("tie_word_embeddings", False):
        return False
    if load_format == "dummy":
        return True
    head = find_tensor(root, "lm_head.weight")
    embedding = find_tensor(root, "model.embed_tokens.weight")
    if head is None or embedding is None or have_equal_content(head, embedding):
        return True
    log.warning(
        "%s says tie_word_embeddings, but lm_head.weight differs from model.embed_tokens.weight: "
        "the head of the files is used",
        config.path,
    )
    return False


def _compute_dtype(dtype: str, checkpoint: str, *, on_cpu: bool) -> str:
    if dtype == "auto":
        return "bfloat16" if checkpoint == "float16" and on_cpu else checkpoint
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"--dtype {dtype}: supported: auto, {', '.join(DTYPE_BYTES)}")
    return dtype


def _read_windows(config: ModelConfig, family: ModelFamily, layers: int) -> tuple[int, ...]:
    """Which layers see only the last `sliding_window` tokens."""
    if family.window is None:
        return (0,) * layers
    if family.always_windowed:
        window = config.values.get("sliding_window", family.window)
        return (
            (config.read_integer("sliding_window", window) if window is not None else 0),
        ) * layers
    if not config.read_flag("use_sliding_window", False):
        types = config.read_names("layer_types", [])
        if "sliding_attention" in types:
            config.refuse("layer_types", types, "sliding_attention needs use_sliding_window true")
        return (0,) * layers
    if config.is_null("sliding_window"):
        return (0,) * layers
    window = config.read_integer("sliding_window", family.window)
    first = config.read_index("max_window_layers", 28) or 0
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    types = config.read_names("layer_types", default)
    if len(types) != layers or not set(types) <= {"full_attention", "sliding_attention"}:
        config.refuse(
            "layer_types", types, f"supported: {layers} times full_attention or sliding_attention"
        )
    return tuple(window if t == "sliding_attention" else 0 for t in types)


_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_VOLATILE_FIELDS = ("_name_or_path", "transformers_version", "use_cache")
_SAMPLES = 64
_SAMPLE_BYTES = 4096


def hash_model(root: Path, load_format: str = "auto", seed: int = 0) -> str:
    """32 hex digits that differ between models whose KV pages must not be mixed.

    Covers config.json (less fields that say who wrote it), the tokenizer's files, and of each weight file its header,
    length and 64 samples of 4 KiB: two fine-tunes of one model differ nearly everywhere, and reading whole files would
    cost a start of seconds. Dummy weights are covered by their seed.
    """
    digest = hashlib.sha256()

    def add_content(name: str, content: bytes) -> None:
        digest.update(f"{name}:{len(content)}:".encode() + content)

    config = {k: v for k, v in read_json(root / "config.json").items() if k not in _VOLATILE_FIELDS}
    add_content("config", json.dumps(config, sort_keys=True).encode())
    for name in _TOKENIZER_FILES:
        if is_given(root / name):
            with refuse_unreadable(root / name):
                add_content(name, read_regular_file(root / name))
    if load_format == "dummy":
        add_content("dummy", str(seed).encode())
        return digest.hexdigest()[:32]
    for file in weight_files(root):
        with refuse_unreadable(file):
            size = file.stat().st_size
            add_content(file.name, safetensors_header(file) + size.to_bytes(8, "little"))
            with file.open("rb") as f:
                for i in range(_SAMPLES):
                    f.seek(size * i // _SAMPLES)
                    add_content("sample", f.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
