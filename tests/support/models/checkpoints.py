"""Tiny random checkpoints of every family we run, written by transformers: the references of parity and e2e tests.

All parameters are random, norms and biases too (transformers starts them at 1 and 0, which would hide a swapped or
forgotten one), and large enough that logits differ clearly. Each directory also gets a byte-level tokenizer.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

VOCAB = 320
BOS, EOS = 256, 257
_SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": BOS, "eos_token_id": EOS,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-bias": (
        "Llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-rope3": ("Llama", {"head_dim": 32, "rope_parameters": _LLAMA3}),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-yarn": ("Llama", {"rope_parameters": _YARN, "num_key_value_heads": 4}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 9, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
    ),
    "qwen3": (
        "Qwen3",
        {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "qwen3-bias": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {"sliding_window": 9, "pad_token_id": 0}),
    "phi3-partial": (
        "Phi3",
        {
            "hidden_size": 96,
            "num_attention_heads": 4,
            "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "seed-oss": ("SeedOss", {"head_dim": 32, "attention_bias": True, "attention_out_bias": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 9}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            **_EXPERTS,
            "shared_expert_intermediate_size": 48,
            "use_sliding_window": True,
            "sliding_window": 8,
            "num_hidden_layers": 3,
        },
    ),
    "qwen3-moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {
            **_EXPERTS,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "attention_bias": True,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 8,
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 16,
        },
    ),
}


def make_checkpoint(
    variant: str, path: Path, *, dtype: str = "float32", max_shard_size: str = "5GB"
) -> Path:
    """Write `variant` to directory `path`, seeded by its name; returns `path`."""
    import torch

    model = _model_class(variant)(_config(variant))
    generator = torch.Generator().manual_seed(sum(variant.encode()))
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("inv_freq"):
                continue
            noise = torch.empty(parameter.shape).normal_(0, 0.15, generator=generator)
            parameter.copy_(noise + 1 if name.endswith("norm.weight") else noise)
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=max_shard_size)
    write_tokenizer(path)
    return path


def reference_model(path: Path) -> Any:
    """transformers' model of a directory: float32, eager attention."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def reference_greedy(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """Tokens of transformers' generate(), not stopping at end-of-sequence."""
    import torch

    ids = torch.tensor([prompt])
    greedy = {"do_sample": False, "max_new_tokens": tokens, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **greedy)
    return out[0, len(prompt) :].tolist()


def as_transformers_4(source: Path, path: Path) -> Path:
    """A copy whose config.json is spelled as transformers 4 wrote it."""
    shutil.copytree(source, path)
    config = json.loads((path / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config.pop("layer_types", None)
    config["transformers_version"] = "4.40.0"
    (path / "config.json").write_text(json.dumps(config))
    return path


def _config(variant: str) -> Any:
    import transformers

    family, changes = VARIANTS[variant]
    return getattr(transformers, f"{family}Config")(**{**_SHAPE, **changes})


def _model_class(variant: str) -> Any:
    import transformers

    return getattr(transformers, f"{VARIANTS[variant][0]}ForCausalLM")


def write_tokenizer(path: Path) -> None:
    """Write a tokenizer with one token per byte, in byte order of the alphabet, then the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>", "<|eos|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "chat_template": template + "{% if add_generation_prompt %}assistant: {% endif %}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
