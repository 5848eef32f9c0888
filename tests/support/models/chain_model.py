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
CALL, END_CALL = "<tool_call>", "</tool_call>"
MARKERS = (THINK, END_THINK, CALL, END_CALL)
CALL_PARTS = ('\n{"name": "sum", ', '"arguments": ', '{"x":', "7}", "}\n")
"""Tokens of a call in hermes' format, in front of its end marker."""
NO_ARGUMENTS = "{}"
ADDED = (*MARKERS, *CALL_PARTS, NO_ARGUMENTS)
"""Tokens that the tokenizer finds before all others: a grammar allows of a text that it forces those alone that the
tokenizer would write.
"""
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
CALL_CHAIN: dict[str, tuple[str, ...]] = {
    "c": ("▁al", CALL),  # ends of prompts
    "e": ("</s>", "▁al", CALL),
    THINK: ("▁ha",),
    "▁ha": ("▁bb",),
    "▁bb": (CALL, "▁ha"),
    END_THINK: ("▁al", CALL),
    "<0x0A>": ("▁al", CALL),
    "▁al": ("pha", "ta"),
    "pha": (CALL, "▁be"),
    "ta": (CALL, "▁be"),
    "▁be": ("lta",),
    "lta": ("▁al",),
    CALL: (CALL_PARTS[0],),
    CALL_PARTS[0]: (CALL_PARTS[1],),
    CALL_PARTS[1]: (CALL_PARTS[2], NO_ARGUMENTS),
    CALL_PARTS[2]: (CALL_PARTS[3],),
    CALL_PARTS[3]: (CALL_PARTS[4], "}"),
    NO_ARGUMENTS: (CALL_PARTS[4], "}"),
    CALL_PARTS[4]: (END_CALL, "▁be"),
    "}": (END_CALL, "▁be"),
    END_CALL: ("▁ga", "</s>"),
    "▁ga": ("mma", "lta"),
    "mma": ("</s>", "▁be"),
    "</s>": ("▁al", CALL),
}
"""For a model that calls the tool `sum` behind its reasoning and a word."""
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<think>{% endif %}"
)
PLAIN_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}go"
"""For a model that does not reason."""
CALL_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
    "{% for t in tools %}({{ t.function.name }}){% endfor %}"
    "{% if add_generation_prompt %}{{ end }}{% endif %}"
)
"""The prompt ends with the token `end` of `chat_template_kwargs`."""


def vocabulary() -> dict[str, int]:
    """Ids of all tokens."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *CHARACTERS]
    ids: dict[str, int] = {}
    beginnings = [word[:length] for word in WORDS for length in range(1, len(word))]
    for name in (*names, *beginnings, *WORDS, *ADDED):
        ids.setdefault(name, len(ids))
    return ids


IDS = vocabulary()
MERGES = list(
    dict.fromkeys((word[:length], word[length]) for word in WORDS for length in range(1, len(word)))
)
"""The tokenizer writes `WORDS` as the model does."""


def make_chain_checkpoint(
    path: Path,
    *,
    template: str = TEMPLATE,
    chain: dict[str, tuple[str, ...]] = CHAIN,
    are_markers_special: bool = False,
) -> Path:
    """Write the checkpoint to directory `path`; returns `path`."""
    path.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(path, template, are_markers_special=are_markers_special)
    _write_model(path, chain)
    return path


def _write_tokenizer(path: Path, template: str, *, are_markers_special: bool) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    words = {name: token for name, token in IDS.items() if name not in ADDED}
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
    markers = [AddedToken(name, special=are_markers_special, normalized=False) for name in MARKERS]
    if are_markers_special:
        tokenizer.add_special_tokens(markers)
    else:
        tokenizer.add_tokens(markers)
    parts = (AddedToken(name, normalized=False) for name in ADDED[len(MARKERS) :])
    tokenizer.add_tokens(list(parts))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": template,
    }  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def _write_model(path: Path, chain: dict[str, tuple[str, ...]]) -> None:
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
    for name, next_names in chain.items():
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
