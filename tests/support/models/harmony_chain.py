"""A gpt-oss checkpoint that answers in harmony's format: its likeliest next token depends on the
last one alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MARKERS = (
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>",
)  # fmt: skip
RETURN, CALL = "<|return|>", "<|call|>"
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% for t in tools %}{{ t.function.name }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    # As in the published template, which writes earlier answers so.
    "{% if false %}<|channel|>{% endif %}"
)
PROMPT_END = "t"
"""The last token of each prompt: others are bytes."""


def make_harmony_checkpoint(path: Path, answer: tuple[str, ...]) -> Path:
    """Write a checkpoint that answers each prompt with these tokens, all different, to directory
    `path`; returns `path`."""
    import torch
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(MARKERS))
    words = [word for word in answer if word not in MARKERS]
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    ids = {word: tokenizer.token_to_id(word) for word in (PROMPT_END, *answer)}
    size = -(-tokenizer.get_vocab_size() // 32) * 32
    config = transformers.GptOssConfig(
        vocab_size=size, hidden_size=size, intermediate_size=32, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=8, bos_token_id=None,
        eos_token_id=[ids[end] for end in (RETURN, CALL) if end in ids],
    )  # fmt: skip
    model: Any = transformers.GptOssForCausalLM(config)
    with torch.no_grad():
        # A token's state is its own unit vector: attention and experts add nothing.
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        for last, following in zip((PROMPT_END, *answer), answer, strict=False):
            model.lm_head.weight[ids[following], ids[last]] = 1.0
    model.save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path
