"""Reader of a checkpoint's config.json, the only one: limits and arithmetic come from the same
fields. No torch here.

Where config.json has two spellings of one fact, the reader goes by transformers 5, or refuses:

| fact | spellings | what counts |
|---|---|---|
| family | `model_type`, `architectures` | either alone; two that disagree are refused |
| type of the weights | `dtype`, `torch_dtype` | the first that is not null, else the first tensor's type |
| rotary embedding | `rope_scaling`, `rope_parameters`, `rope_theta` | see `families.rope_config` |
| longest context | `max_position_embeddings`, stretched by the rotary embedding | the longer one |

What differs between families stands in a file each (`models.families`); here is what all have
alike.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from baton.config.files import is_given, read_regular_file
from baton.errors import ConfigError
from baton.layers.kv_spec import FP8, KvScales
from baton.layers.spec import DTYPE_BYTES
from baton.models.config_file import (
    ModelConfig,
    read_generation_config,
    read_json,
    read_model_config,
)
from baton.models.families import FAMILIES, SUPPORTED
from baton.models.families.multimodal import MULTIMODAL, Multimodal
from baton.models.quantized.forms import ON_LOAD_FORMS
from baton.models.quantized.kv_scales import read_kv_scales
from baton.models.quantized.methods import read_quantization
from baton.models.quantized.scheme import QuantizationScheme
from baton.models.spec.delta_net import DeltaBlockSpec
from baton.models.spec.mla import MlaBlockSpec
from baton.models.spec.model import LayerSpec, ModelSpec
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
"""Context length of a family that we do not know and that names none: the shortest of the families
we load."""


def read_spec(
    path: str | Path,
    dtype: str = "auto",
    load_format: str = "auto",
    seed: int = 0,
    *,
    context_length: int | None = None,
    on_cpu: bool = True,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
) -> ModelSpec:
    """Read and check a Hugging Face model directory.

    Args:
        dtype: auto takes the checkpoint's type, on a CPU bfloat16 for float16 (CPUs compute that
        ten times slower).
        quantization: int8 or int4, made of plain matrices at load; enters `model_hash`.
        kv_cache_dtype: auto keeps K and V in the compute type; fp8_e4m3 makes codes of them with the
        scales of the checkpoint.
        load_format, seed: enter `model_hash` only, so that dummy weights of two seeds are never
        paired.
        context_length: tokens of the longest prompt + answer that is served; None: as many as the
        model was made for.
    Raises:
        ConfigError: missing or unreadable files, or anything the decoder would not compute exactly.
    """
    root = Path(path)
    whole = read_model_config(root)
    architecture = read_architecture(whole)
    family = FAMILIES[architecture]
    parts = find_parts(whole)
    config = whole.text_part()
    _refuse_unknown_arithmetic(config)

    scheme = read_quantization(config, root)
    if quantization is not None:
        _check_quantization(quantization, scheme, load_format)
    layers = family.read_layers(config)
    max_context = family.read_max_context(config)
    layers, is_long = _rotate_for_context(layers, context_length or max_context)
    chosen_dtype = compute_dtype(dtype, checkpoint_dtype(config, root), on_cpu=on_cpu)
    if chosen_dtype == "float16" and family.overflows_float16:
        raise ConfigError(
            f"--dtype float16: activations of {architecture} exceed its range, and answers would "
            "be NaN; use bfloat16 or float32"
        )
    kv_scales: tuple[KvScales, ...] = ()
    if kv_cache_dtype == FP8:
        _check_fp8_cache(layers)
        kv_scales = read_kv_scales(config, root, len(layers), load_format)
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.read_integer("vocab_size", family.vocab_size),
        hidden_size=config.read_integer("hidden_size"),
        layers=layers,
        max_context=max_context,
        norm=family.read_norm(config),
        stream=family.read_stream(config),
        tied=_is_tied(whole, root, load_format, default=(parts or family).tied),
        dtype=chosen_dtype,
        eos_token_ids=read_eos_token_ids(config, read_generation_config(root)),
        bos_token_id=config.read_index("bos_token_id"),
        model_hash=hash_model(root, load_format, seed, quantization, is_long=is_long),
        has_draft_layers=family.has_draft_layers,
        has_other_parts=parts is not None,
        quantization=scheme,
        form_on_load=None if quantization is None else ON_LOAD_FORMS[quantization],
        kv_scales=kv_scales,
    )


def _check_fp8_cache(layers: tuple[LayerSpec, ...]) -> None:
    """Raise ConfigError where K and V cannot be kept as codes."""
    problem = None
    if any(isinstance(layer.attention, MlaBlockSpec) for layer in layers):
        problem = "latent attention keeps latents in the compute type in this version"
    elif any(isinstance(layer.attention, DeltaBlockSpec) for layer in layers):
        problem = "models with states of sequences keep K and V in the compute type in this version"
    if problem is not None:
        raise ConfigError(f"--kv-cache-dtype {FP8}: {problem}; use --kv-cache-dtype auto")


def _rotate_for_context(
    layers: tuple[LayerSpec, ...], context: int
) -> tuple[tuple[LayerSpec, ...], bool]:
    """The layers as they serve contexts of so many tokens, and whether their rotary embeddings have
    factors of their own for it (`families.longrope`)."""
    resolved: dict[LayerSpec, LayerSpec] = {}
    is_long = False
    for layer in dict.fromkeys(layers):
        block = layer.attention
        resolved[layer] = layer
        if isinstance(block, DeltaBlockSpec):
            continue
        rope = block.rope
        if rope is None or not rope.is_long_for(context):
            continue
        if not is_long:
            log.info(
                "rotary embedding: long factors for all prompts, because --context-length %d "
                "exceeds %d; transformers turns shorter prompts by the short ones, as a lower "
                "--context-length does",
                context, rope.original_max_position,
            )  # fmt: skip
        is_long = True
        attention = block.with_rope(rope.for_context(context))
        resolved[layer] = replace(layer, attention=attention)
    return tuple(resolved[layer] for layer in layers), is_long


def _check_quantization(
    quantization: str, scheme: QuantizationScheme | None, load_format: str
) -> None:
    """Raise ConfigError where plain matrices cannot be quantized at load."""
    flag = f"--quantization {quantization}"
    if scheme is not None:
        raise ConfigError(
            f"{flag}: the checkpoint is quantized already ({scheme.method}); leave the flag "
            "out, or use the unquantized checkpoint"
        )
    if load_format == "dummy":
        raise ConfigError(f"{flag}: --load-format dummy has no weights to quantize; leave one out")


def find_architecture(config: ModelConfig) -> str | None:
    """The supported architecture that config.json names, if any: of several parts, that of the one
    for text.

    transformers chooses the class by `model_type`, other servers by `architectures`. Raises ConfigError where that
    would not be the same class.
    """
    text = config.text_part()
    if text is not config and find_parts(config) is None:
        return None
    types = {
        name: (family.model_type, *family.other_model_types) for name, family in FAMILIES.items()
    }
    return _find_named(text, types)


def find_parts(config: ModelConfig) -> Multimodal | None:
    """The checkpoint's class, if it is one of those whose text part is served without the others.
    Raises ConfigError as `find_architecture` does."""
    types = {name: (parts.model_type,) for name, parts in MULTIMODAL.items()}
    name = _find_named(config, types)
    return None if name is None else MULTIMODAL[name]


def _find_named(config: ModelConfig, types: Mapping[str, tuple[str, ...]]) -> str | None:
    """The architecture of `types` that config.json names. Args: `types`: model types of each, the
    usual one first."""
    names = config.read_names("architectures", [])
    named = next((name for name in names if name in types), None)
    model_type = config.get("model_type")
    if model_type is None:
        return named
    typed = next((name for name, known in types.items() if model_type in known), None)
    if named is not None and model_type not in types[named]:
        config.refuse(
            "model_type",
            model_type,
            f"architectures says {named}, which is {types[named][0]}; make them agree",
        )
    return named if names else typed


def read_architecture(config: ModelConfig) -> str:
    """The architecture that the decoder computes. Raises ConfigError for any other."""
    architecture = find_architecture(config)
    if architecture is None:
        config.refuse("architectures", config.read_names("architectures", []), SUPPORTED)
    return architecture


def read_vocab_size(config: ModelConfig) -> int:
    """Token ids of the model, as far as config.json or its family says."""
    architecture = find_architecture(config)
    text = config.text_part()
    default = (
        config.get("vocab_size") if architecture is None else FAMILIES[architecture].vocab_size
    )
    return text.read_integer("vocab_size", default)


def read_max_context(config: ModelConfig) -> int:
    """Longest prompt + answer the model was made for [tokens].

    A family without blocks of our own has what it states, unstretched.
    """
    architecture = find_architecture(config)
    if architecture is not None:
        return FAMILIES[architecture].read_max_context(config.text_part())
    return config.text_part().read_integer("max_position_embeddings", UNKNOWN_MAX_POSITION)


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
    if named := config.get("transformers_weights"):
        supported = "supported: model.safetensors, or the files of its index"
        config.refuse("transformers_weights", named, supported)


def checkpoint_dtype(config: ModelConfig, root: Path) -> str:
    """`dtype` (transformers 5), `torch_dtype` (4), or the type of the first tensor on disk."""
    named = config.get("dtype", config.get("torch_dtype"))
    if named is None:
        named = first_float_type(root)
    if named not in ("float32", "float16", "bfloat16"):
        config.refuse("dtype", named, "supported: float32, float16, bfloat16")
    return str(named)


def _is_tied(config: ModelConfig, root: Path, load_format: str, *, default: bool) -> bool:
    """Read `tie_word_embeddings`, which a head of other content in the files overrules.

    Merged adapters leave such heads behind; transformers 5 (`tie_weights`) and vLLM keep them, too.
    """
    if not config.read_flag("tie_word_embeddings", default):
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


def compute_dtype(dtype: str, checkpoint: str, *, on_cpu: bool) -> str:
    if dtype == "auto":
        return "bfloat16" if checkpoint == "float16" and on_cpu else checkpoint
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"--dtype {dtype}: supported: auto, {', '.join(DTYPE_BYTES)}")
    return dtype


_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "tekken.json", "tiktoken.model", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
_VOLATILE_FIELDS = ("_name_or_path", "transformers_version", "use_cache")
_SAMPLES = 64
_SAMPLE_BYTES = 4096
_QUANTIZED_PRODUCTS = "scales of sums"
"""How products with quantized weights are defined: another value where their bits change."""


def hash_model(
    root: Path,
    load_format: str = "auto",
    seed: int = 0,
    quantization: str | None = None,
    *,
    is_long: bool = False,
) -> str:
    """32 hex digits that differ between models whose KV pages must not be mixed.

    Covers config.json (less fields that say who wrote it), the tokenizer's files, and of each weight file its header,
    length and 64 samples of 4 KiB: two fine-tunes of one model differ nearly everywhere, and reading whole files would
    cost a start of seconds. Dummy weights are covered by their seed, weights quantized at load by
    how that is done, quantized ones also by how products with them are defined.

    Args: `is_long`: keys turn by factors for long contexts, which the flags decide.
    """
    digest = hashlib.sha256()

    def add_content(name: str, content: bytes) -> None:
        digest.update(f"{name}:{len(content)}:".encode() + content)

    if is_long:
        add_content("rope", b"long")
    if quantization is not None:
        add_content("quantization", str(ON_LOAD_FORMS[quantization]).encode())
    config = {k: v for k, v in read_json(root / "config.json").items() if k not in _VOLATILE_FIELDS}
    if quantization is not None or "quantization_config" in config:
        add_content("products", _QUANTIZED_PRODUCTS.encode())
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
