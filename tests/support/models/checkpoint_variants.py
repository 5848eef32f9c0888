"""Seeded variants of checkpoint directories: spellings, files, heads, rotary embeddings, tokenizers.

`write_variant(seed, folder)` writes one and returns its name, which lists what was drawn. All weights are random, and
large enough that greedy tokens depend on everything that is computed. `RULES` are the cases that transformers loads and
Baton refuses, each with the words of its sentence; docs/checkpoints.md lists them for users.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tests.support.goldens import added_token_cases
from tests.support.models import checkpoints

VOCAB = 320
MAX_POSITION = 64
FAMILIES = {"Llama": "llama", "Mistral": "mistral", "Qwen2": "qwen2", "Qwen3": "qwen3"}
EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]
Edit = Callable[[Config, Tensors, random.Random], None]

RULES = {
    "head absent": r"missing tensor lm_head\.weight",
    "embedding absent": r"missing tensor model\.embed_tokens\.weight",
    "tensor absent": r"missing tensor model\.layers",
    "tensor unknown": r"unexpected tensor",
    "rotary embedding of another kind": r"rope_type = \"(dynamic|longrope)\" is not supported",
    "rotary parameter that is not used": r"\.finetuned = true is not supported",
    "architecture and model_type disagree": r"model_type = .* make them agree",
    "weights of another name": r"transformers_weights",
    "windows of a model that uses none": r"sliding_attention needs use_sliding_window",
}
"""By name, the sentence of each refusal of a directory that transformers loads."""


@cache
def base_of(family: str) -> tuple[Config, Tensors]:
    """config.json and tensors of a family's tiny model with a head of its own."""
    import transformers

    shape: Config = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": MAX_POSITION,
        "bos_token_id": checkpoints.BOS, "eos_token_id": checkpoints.EOS, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "head_dim": 8,
    }  # fmt: skip
    if family == "Mistral":
        shape["sliding_window"] = None
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**shape)
    )
    generator = torch.Generator().manual_seed(sum(family.encode()))
    tensors = {}
    for name, tensor in model.state_dict().items():
        noise = torch.empty(tensor.shape).normal_(0, 0.3, generator=generator)
        tensors[name] = noise + 1 if name.endswith("norm.weight") else noise
    config = json.loads(model.config.to_json_string(use_diff=False))
    kept = {*shape, "model_type", "rope_parameters"}
    config = {name: value for name, value in config.items() if name in kept}
    return config | {"architectures": [f"{family}ForCausalLM"], "dtype": "float32"}, tensors


# ---- head --------------------------------------------------------------------------------------------------------


def _tie(config: Config, tensors: Tensors, rng: random.Random) -> None:
    config["tie_word_embeddings"] = True
    del tensors[HEAD]


def _tie_with_equal_head(config: Config, tensors: Tensors, rng: random.Random) -> None:
    config["tie_word_embeddings"] = True
    tensors[HEAD] = tensors[EMBED].clone()


def _tie_with_other_head(config: Config, tensors: Tensors, rng: random.Random) -> None:
    config["tie_word_embeddings"] = True


def _tie_with_nearly_equal_head(config: Config, tensors: Tensors, rng: random.Random) -> None:
    _tie_with_equal_head(config, tensors, rng)
    tensors[HEAD][rng.randrange(VOCAB)] *= -3


def _tie_with_head_alone(config: Config, tensors: Tensors, rng: random.Random) -> None:
    config["tie_word_embeddings"] = True
    del tensors[EMBED]


def _drop_head(config: Config, tensors: Tensors, rng: random.Random) -> None:
    del tensors[HEAD]


# ---- rotary embedding ---------------------------------------------------------------------------------------------


def _rope(**params: Any) -> Edit:
    """Rotary parameters of a kind, in a spelling that transformers reads."""

    def edit(config: Config, tensors: Tensors, rng: random.Random) -> None:
        theta = rng.choice([10000.0, 500.0, 7])
        spelling = rng.choice(["new", "old", "type", "beside", "both", "no theta"])
        config.pop("rope_parameters")
        if spelling == "new":
            config["rope_parameters"] = {"rope_type": "default", **params, "rope_theta": theta}
            return
        old = dict(params)
        if spelling == "type" and "rope_type" in old:
            old["type"] = old.pop("rope_type")
        if spelling == "beside":
            config["original_max_position_embeddings"] = 16
        if spelling == "both":
            config["rope_parameters"] = {"rope_type": "default", "rope_theta": 3.0}
        config["rope_scaling"] = old or None
        if spelling != "no theta":
            config["rope_theta"] = theta

    return edit


_ROPES: dict[str, Edit] = {
    "default": _rope(),
    "linear": _rope(rope_type="linear", factor=3.0),
    "yarn": _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
    "yarn of one length": _rope(rope_type="yarn", factor=2),
    "yarn with all fields": _rope(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=24, beta_fast=16.0,
        beta_slow=2.0, mscale=0.7, mscale_all_dim=1.3, truncate=False,
    ),
    "yarn with an attention factor": _rope(rope_type="yarn", factor=4.0, attention_factor=1.5),
    "llama3": _rope(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=32, rope_theta=100.0,
    ),
    "dynamic": _rope(rope_type="dynamic", factor=2.0),
    "longrope": _rope(
        rope_type="longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, factor=2.0,
        original_max_position_embeddings=32,
    ),
    "unused parameter": _rope(rope_type="yarn", factor=4.0, finetuned=True),
}  # fmt: skip


# ---- other fields -------------------------------------------------------------------------------------------------


def _set(**fields: Any) -> Edit:
    """Set fields; a value of `...` removes one."""

    def edit(config: Config, tensors: Tensors, rng: random.Random) -> None:
        for name, value in fields.items():
            if value is ...:
                config.pop(name, None)
            else:
                config[name] = value

    return edit


def _all_key_value_heads(value: Any) -> Edit:
    """As many key-value heads as heads, which config.json leaves to the default."""

    def edit(config: Config, tensors: Tensors, rng: random.Random) -> None:
        _set(num_key_value_heads=value)(config, tensors, rng)
        for name, tensor in tensors.items():
            if "k_proj" in name or "v_proj" in name:
                tensors[name] = torch.cat((tensor, -tensor))

    return edit


def _dtype(weights: torch.dtype, **fields: Any) -> Edit:
    def edit(config: Config, tensors: Tensors, rng: random.Random) -> None:
        _set(**{"dtype": ..., **fields})(config, tensors, rng)
        for name in tensors:
            tensors[name] = tensors[name].to(weights)

    return edit


def _disagree(config: Config, tensors: Tensors, rng: random.Random) -> None:
    config["model_type"] = "mistral" if config["model_type"] == "llama" else "llama"


def _add_computed(config: Config, tensors: Tensors, rng: random.Random) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)


def _add_unknown(config: Config, tensors: Tensors, rng: random.Random) -> None:
    tensors["model.layers.0.mlp.extra.weight"] = torch.ones(4)


def _drop_tensor(config: Config, tensors: Tensors, rng: random.Random) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


_HEADS: dict[str, Edit] = {
    "own head": _set(),
    "tied": _tie,
    "tied, equal head": _tie_with_equal_head,
    "tied, other head": _tie_with_other_head,
    "tied, nearly equal head": _tie_with_nearly_equal_head,
    "tied, head alone": _tie_with_head_alone,
    "no head": _drop_head,
}
_FIELDS: dict[str, Edit] = {
    "plain": _set(),
    "null heads": _all_key_value_heads(None),
    "absent heads": _all_key_value_heads(...),
    "model_type alone": _set(architectures=...),
    "type disagrees": _disagree,
    "null window": _set(use_sliding_window=True, sliding_window=None, max_window_layers=0),
    "window": _set(use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "window by layer": _set(
        use_sliding_window=True,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "null layer_types": _set(layer_types=None),
    "old dtype": _set(dtype=..., torch_dtype="float32"),
    "both dtypes": _set(dtype="float32", torch_dtype="float16"),
    "no dtype": _dtype(torch.bfloat16),
    "null dtype": _dtype(torch.float32, dtype=None, torch_dtype=None),
    "half weights": _dtype(torch.float16, dtype="float32"),
    "biases by name": _set(attention_bias=False, mlp_bias=False),
    "computed tensor": _add_computed,
    "unknown tensor": _add_unknown,
    "no tensor": _drop_tensor,
    "quantized": _set(quantization_config={"quant_method": "awq"}),
    "weights by name": _set(transformers_weights="model.safetensors"),
    "layers windowed without a window": _set(
        use_sliding_window=False, layer_types=["sliding_attention", "full_attention"]
    ),
}


# ---- files --------------------------------------------------------------------------------------------------------


def _write_single(folder: Path, tensors: Tensors) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_shards(folder: Path, tensors: Tensors) -> None:
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::3], names[1::3], names[2::3]), 1):
        file = f"model-{number:05}-of-00003.safetensors"
        shard = {name: tensors[name] for name in part}
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_single_beside_old_shards(folder: Path, tensors: Tensors) -> None:
    old = {name: (-tensor).half() for name, tensor in tensors.items()}
    _write_shards(folder, old)
    _write_single(folder, tensors)


def _write_shards_beside_strangers(folder: Path, tensors: Tensors) -> None:
    _write_shards(folder, tensors)
    save_file({"x": torch.ones(3)}, folder / "aaa.safetensors")


_FILES = {
    "single": _write_single,
    "shards": _write_shards,
    "old shards": _write_single_beside_old_shards,
    "strangers": _write_shards_beside_strangers,
}


# ---- tokenizer ----------------------------------------------------------------------------------------------------

_WORDS = ("▁the", "▁capital", "▁is", "▁Paris", "▁and", ".", "né")


def _word_pieces(words: tuple[str, ...]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a tokenizer in the manner of SentencePiece, with byte fallback."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    for word in words:
        for piece in [*word, *(word[:end] for end in range(2, len(word) + 1))]:
            vocab.setdefault(piece, len(vocab))
        for end in range(2, len(word) + 1):
            merge = (word[: end - 1], word[end - 1])
            if merge not in merges:
                merges.append(merge)
    return vocab, merges


def _write_sentence_pieces(folder: Path, rng: random.Random) -> str:
    vocab, merges = _word_pieces(_WORDS)
    model = models.BPE(
        vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"
    )
    tokenizer = Tokenizer(model)
    kind = rng.choice(["normalizer", "metaspace first", "metaspace always", "gemma"])
    if kind == "normalizer":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    elif kind == "gemma":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    else:
        scheme = kind.split()[1]
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    strip = [] if kind == "gemma" else [decoders.Strip(" ", 1, 0)]
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    if rng.random() < 0.3:
        settings["extra_special_tokens"] = ["<tool>"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return f"{kind} pieces"


def _write_bytes_with_added_tokens(folder: Path, rng: random.Random) -> str:
    checkpoints.write_tokenizer(folder)
    golden = json.loads(added_token_cases.CASES.read_text())
    name = rng.choice([name for name, case in golden.items() if case["error"] is None])
    case = golden[name]
    tokenizer = json.loads((folder / "tokenizer.json").read_text()) | case["tokenizer"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **case["config"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for file in ("special_tokens_map", "added_tokens"):
        if case[file]:
            (folder / f"{file}.json").write_text(json.dumps(case[file]))
    return f"bytes, {name}"


_MEANINGLESS = {
    "null heads": ("Mistral",),
    "absent heads": ("Mistral", "Qwen2", "Qwen3"),  # their default does not divide our heads
    **dict.fromkeys(
        ("null window", "window", "window by layer", "layers windowed without a window"),
        ("Llama", "Mistral"),
    ),
}
"""Fields that would make another model of a family, or none."""


def write_variant(seed: int, folder: Path) -> str:
    """Write the directory of a seed; returns what was drawn for it."""
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    family = list(FAMILIES)[seed % len(FAMILIES)]
    config, tensors = copy.deepcopy(base_of(family))
    chosen = [family]
    for table, usual in ((_HEADS, 0.3), (_ROPES, 0.3), (_FIELDS, 0.3)):
        name = next(iter(table)) if rng.random() < usual else rng.choice(list(table))
        if family in _MEANINGLESS.get(name, ()):
            name = "plain"
        table[name](config, tensors, rng)
        chosen.append(name)
    files = rng.choice(list(_FILES))
    _FILES[files](folder, {name: tensor.contiguous() for name, tensor in tensors.items()})
    chosen.append(files)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer = rng.choice([_write_sentence_pieces, _write_bytes_with_added_tokens])
    chosen.append(write_tokenizer(folder, rng))
    return "; ".join(chosen)
