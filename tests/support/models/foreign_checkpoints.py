"""Tiny random checkpoints that transformers' own classes serve, written by transformers: families that have no blocks
of our own, and some that have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.models.checkpoints import BOS, EOS, VOCAB, write_tokenizer

_SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_WINDOW = {"sliding_window": 8}

FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("Apertus", {}),
    "arcee": ("Arcee", {}),
    "bitnet": ("BitNet", {}),
    "cohere": ("Cohere", {}),
    "cohere2": ("Cohere2", _WINDOW),
    "cwm": ("Cwm", {}),
    "ernie4_5": ("Ernie4_5", {}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
        },
    ),
    "exaone4": ("Exaone4", _WINDOW),
    "flex_olmo": ("FlexOlmo", _EXPERTS),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "attn_logit_softcapping": 2.0, **_WINDOW}),
    "gemma3_text": ("Gemma3Text", {"head_dim": 16, "num_hidden_layers": 7, **_WINDOW}),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "gpt_neox": ("GPTNeoX", {}),
    "granite": ("Granite", {"logits_scaling": 3.0, "attention_multiplier": 0.2}),
    "granitemoe": ("GraniteMoe", _LOCAL_EXPERTS),
    "granitemoeshared": ("GraniteMoeShared", {**_LOCAL_EXPERTS, "shared_intermediate_size": 32}),
    "helium": ("Helium", {"head_dim": 16}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {"head_dim": 16}),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"num_experts": 4, "moe_topk": 2, "head_dim": 16}),
    "jais2": ("Jais2", {}),
    "minimax_m2": ("MiniMaxM2", {}),
    "nanochat": ("NanoChat", {}),
    "nemotron": ("Nemotron", {}),
    "olmo": ("Olmo", {}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", _WINDOW),
    "olmoe": ("Olmoe", _EXPERTS),
    "persimmon": ("Persimmon", {}),
    "phi": ("Phi", {}),
    "phimoe": ("Phimoe", {"num_local_experts": 4}),
    "smollm3": ("SmolLM3", {}),
    "starcoder2": ("Starcoder2", _WINDOW),
}
"""By model_type: transformers' class without its suffix, and what differs from the common shape."""

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bloom": ("Bloom", {}, "no interface for another implementation"),
    "deepseek_v3": ("DeepseekV3", {"first_k_dense_replace": 4}, "heads of layer 0 differ in size"),
    "doge": ("Doge", {}, "makes a mask of its own"),
    "falcon": ("Falcon", {}, "knows no attention implementation"),
    "gpt_oss": ("GptOss", {**_LOCAL_EXPERTS, "head_dim": 16}, "has attention sinks"),
    "gpt2": ("GPT2", {}, "a step of one token fails in it"),
    "mamba": ("Mamba", {}, "no interface for another implementation"),
}
"""By model_type, with the words of the refusal."""


def make_foreign_checkpoint(name: str, path: Path) -> Path:
    """Write a checkpoint of FOREIGN or REFUSED to directory `path`, seeded by its name."""
    import torch
    import transformers

    family, changes = (FOREIGN.get(name) or REFUSED[name])[:2]
    config = getattr(transformers, f"{family}Config")(**{**_SHAPE, **changes})
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(sum(name.encode()))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.empty(parameter.shape).normal_(0, 0.15, generator=generator)
            parameter.copy_(noise + 1 if key.endswith("norm.weight") else noise)
    model.save_pretrained(path)
    write_tokenizer(path)
    return path
