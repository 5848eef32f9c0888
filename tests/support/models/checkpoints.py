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
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0 + i / 20 for i in range(36)],
    "long_factor": [1.5 + i / 10 for i in range(36)],
}
"""Of 36 pairs: heads of 72, or of 96 of which three quarters turn."""
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "truncate": False,
}
_OLMO3 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
    "full_attention": _YARN,
}
_GEMMA3 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "moe_intermediate_size": 32, "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}  # fmt: skip
_DELTA_NET = {
    "num_hidden_layers": 5, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 12,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

WITH_STATES = ("qwen3-next", "kimi-linear", "qwen3.5", "qwen3.5-moe")
"""Variants with a state per sequence."""
_WITH_IMAGES = ("Gemma3", "Llama4", "Qwen3_5", "Qwen3_5Moe")
"""Classes for text that have another config than those with images."""
_ADD_ONE = ("gemma", "qwen3-next", "qwen3.5")
"""Variants whose norms multiply by 1 + weight."""

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
    "phi3-longrope": (
        "Phi3",
        {
            "hidden_size": 192,
            "num_key_value_heads": 1,
            "num_attention_heads": 2,
            "pad_token_id": 0,
            "original_max_position_embeddings": 512,
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75, "factor": 8.0},
        },
    ),
    "seed-oss": ("SeedOss", {"head_dim": 32, "attention_bias": True, "attention_out_bias": True}),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "olmo3": ("Olmo3", {"sliding_window": 9, "num_hidden_layers": 4, "rope_parameters": _OLMO3}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 3.0,
            "mlp_bias": True,
            "attention_bias": True,
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "pad_token_id": 0}),
    "smollm3-window": (
        "SmolLM3",
        {
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 8,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "sliding_window": 9,
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 20,
            "rope_parameters": _GEMMA3,
            "tie_word_embeddings": False,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 9}),
    "phimoe": (
        "Phimoe",
        {
            "num_local_experts": 4,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.1,
        },
    ),
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
    "qwen3-next": (
        "Qwen3Next",
        {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 48, "attention_bias": True},
    ),
    "qwen3.5": ("Qwen3_5", {**_DELTA_NET, "tie_word_embeddings": True}),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 48},
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
    "deepseek-v2-lite": (
        "DeepseekV2",
        {
            **_LATENT,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.9},
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **_LATENT,
            "attention_bias": True,
            "mlp_bias": True,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **_LATENT,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek-v3-halves": (
        "DeepseekV3",
        {
            **_LATENT,
            "first_k_dense_replace": 2,
            "rope_interleave": False,
            "attention_bias": True,
            "rope_parameters": {**_YARN, "mscale_all_dim": 1.0},
        },
    ),
    "kimi-k2": (
        "DeepseekV3",
        {
            **_LATENT,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "rope_parameters": {
                **_YARN,
                "rope_theta": 50000.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        {**_LATENT, "qk_nope_head_dim": 24, "v_head_dim": 32, "tie_word_embeddings": True},
    ),
    "kimi-linear": (
        "KimiLinear",
        {
            **_LATENT,
            "q_lora_rank": None,
            "num_hidden_layers": 5,
            "num_local_experts": 8,
            "linear_num_heads": 4,
            "linear_head_dim": 12,
            "layer_types": ["linear_attention", *["linear_attention", "full_attention"] * 2],
            "mlp_layer_types": ["dense", *["sparse"] * 4],
            "n_group": 4,
            "topk_group": 2,
            "pad_token_id": 0,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "sliding_window": 9,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            # A limit that a tenth of the values exceed.
            "swiglu_limit": 0.7,
            "rope_parameters": _GPT_OSS_ROPE,
        },
    ),
    "llama4": (
        "Llama4",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "attention_chunk_size": 11,
            "rope_parameters": {**_LLAMA3, "high_freq_factor": 1.0},
            "no_rope_layers": [1, 0, 1, 1],
            "floor_scale": 7,
            "attn_scale": 0.3,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "intermediate_size": 48,
            "intermediate_size_mlp": 96,
        },
    ),
}


def make_checkpoint(
    variant: str,
    path: Path,
    *,
    dtype: str = "float32",
    max_shard_size: str = "5GB",
    **changes: Any,
) -> Path:
    """Write `variant` to directory `path`, seeded by its name; returns `path`.

    Args:
        changes: fields of its config with other values.
    """
    model = _model_class(variant)(variant_config(variant, **changes))
    save_random(model, variant, path, dtype=dtype, max_shard_size=max_shard_size)
    return path


def save_random(
    model: Any, variant: str, path: Path, *, dtype: str = "float32", max_shard_size: str = "5GB"
) -> None:
    """Fill a model of transformers with noise, and write it with a tokenizer."""
    import torch

    fill_noise(model, sum(variant.encode()), variant)
    # Tables of complex numbers would lose their imaginary part.
    if dtype != "float32":
        model.to(getattr(torch, dtype))
    model.save_pretrained(path, max_shard_size=max_shard_size)
    write_tokenizer(path)


def fill_noise(model: Any, seed: int, variant: str = "") -> None:
    """Draw all parameters anew, those of norms near 1."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("inv_freq"):
                continue
            noise = torch.empty(parameter.shape).normal_(0, 0.15, generator=generator)
            # Some classes add the 1 themselves.
            is_near_one = name.endswith("norm.weight") and not variant.startswith(_ADD_ONE)
            is_near_one |= name.endswith("linear_attn.norm.weight")
            parameter.copy_(noise + 1 if is_near_one else noise)


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
    if "full_attention" in rope:
        if config["model_type"] == "gemma3_text":
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config.pop("layer_types", None)
    config["transformers_version"] = "4.40.0"
    (path / "config.json").write_text(json.dumps(config))
    return path


def variant_config(variant: str, **more: Any) -> Any:
    """The config of transformers' class."""
    import transformers

    family, changes = VARIANTS[variant]
    name = f"{family}TextConfig" if family in _WITH_IMAGES else f"{family}Config"
    return getattr(transformers, name)(**{**_SHAPE, **changes, **more})


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
