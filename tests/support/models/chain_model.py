"""A checkpoint whose likeliest next token depends on the last one alone, with a tokenizer like Llama 2's.

Answers follow a table: `CHAIN` names the tokens that may follow each token, the likeliest first. So a test knows
an answer without a model, and any engine gives it, on one node or two.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = (
    "lta", "▁ha", "▁bb", "▁al", "pha", "▁be", "ta", "▁ga", "mma", "▁de", "▁Paris", "▁Rome", "▁yes", "▁no", "▁▁",
)  # fmt: skip
"""Tokens of several characters; ▁ is a blank."""
CHARACTERS = "▁abcdefghijklmnopqrstuvwxyzPR[]().,:\"'{}-_0123456789"
UNK, BOS, EOS = 0, 1, 2
THINK, END_THINK = "<think>", "</think>"
CHAIN: dict[str, tuple[str, ...]] = {
    "o": ("▁al", "▁de"),  # ends of prompts
    "e": ("</s>", "▁al", "▁de"),
    THINK: ("▁ha",),
    "▁ha": ("▁bb",),
    "▁bb": (END_THINK, "▁al"),
    END_THINK: ("▁al", "▁de"),
    "<0x0A>": ("▁al", "▁de"),
    "▁al": ("pha",),
    "pha": ("▁be",),
    "▁be": ("ta", "lta"),
    "ta": ("▁ga", "▁de"),
    "▁ga": ("mma", "lta"),
    "mma": ("</s>", "▁de"),
    "</s>": ("▁de",),
    "▁de": ("lta",),
    "lta": ("▁al", "▁be"),
}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<think>{% endif %}"
)
PLAIN_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}go"
"""For a model that does not reason."""


def vocabulary() -> dict[str, int]:
    """Ids of all tokens."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *CHARACTERS]
    ids: dict[str, int] = {}
    beginnings = [word[:length] for word in WORDS for length in range(1, len(word))]
    for name in (*names, *beginnings, *WORDS, THINK, END_THINK):
        ids.setdefault(name, len(ids))
    return ids


IDS = vocabulary()
MERGES = list(
    dict.fromkeys((word[:length], word[length]) for word in WORDS for length in range(1, len(word)))
)
"""The tokenizer writes `WORDS` as the model does."""


def make_chain_checkpoint(
    path: Path, *, template: str = TEMPLATE, are_markers_special: bool = False
) -> Path:
    """Write the checkpoint to directory `path`; returns `path`."""
    path.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(path, template, are_markers_special=are_markers_special)
    _write_model(path)
    return path


def _write_tokenizer(path: Path, template: str, *, are_markers_special: bool) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    words = {name: token for name, token in IDS.items() if name not in (THINK, END_THINK)}
    tokenizer = Tokenizer(
        models.BPE(vocab=words, merges=MERGES, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in ("<unk>", "<s>", "</s>")]
    )
    markers = [
        AddedToken(name, special=are_markers_special, normalized=False)
        for name in (THINK, END_THINK)
    ]
    if are_markers_special:
        tokenizer.add_special_tokens(markers)
    else:
        tokenizer.add_tokens(markers)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": template,
    }  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def _write_model(path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    size = -(-len(IDS) // 8) * 8
    heads = 4
    inner = 8
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(IDS), "hidden_size": size,
        "intermediate_size": inner, "num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": heads,
        "max_position_embeddings": 512, "bos_token_id": BOS, "eos_token_id": EOS, "rms_norm_eps": 1e-5,
        "torch_dtype": "float32", "tie_word_embeddings": False,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    head = torch.zeros(len(IDS), size)
    for name, next_names in CHAIN.items():
        for place, next_name in enumerate(next_names):
            head[IDS[next_name], IDS[name]] = 1.0 / (place + 1)
    layer = "model.layers.0."
    # A token's state is its own unit vector: attention and MLP add nothing.
    weights = {
        "model.embed_tokens.weight": torch.eye(len(IDS), size),
        "model.norm.weight": torch.ones(size),
        "lm_head.weight": head,
        f"{layer}input_layernorm.weight": torch.ones(size),
        f"{layer}post_attention_layernorm.weight": torch.ones(size),
        f"{layer}self_attn.q_proj.weight": torch.zeros(size, size),
        f"{layer}self_attn.k_proj.weight": torch.zeros(size, size),
        f"{layer}self_attn.v_proj.weight": torch.zeros(size, size),
        f"{layer}self_attn.o_proj.weight": torch.zeros(size, size),
        f"{layer}mlp.gate_proj.weight": torch.zeros(inner, size),
        f"{layer}mlp.up_proj.weight": torch.zeros(inner, size),
        f"{layer}mlp.down_proj.weight": torch.zeros(size, inner),
    }
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
