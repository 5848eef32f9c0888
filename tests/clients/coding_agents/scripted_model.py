"""Checkpoint of a Llama with one layer whose weights spell out one dialogue: a call of a tool, then an answer.

Coding agents send prompts of 15,000 to 20,000 tokens, which the demo model has no room for. This one has: its layer
adds nothing, and its head reads which token follows which. The last token of the prompt, which the template chooses
by the last message, decides what is written:

    user:  <|assistant|> → reasoning → <tool_call> → the call → </tool_call> → end
    tool:  <|result|>    → the answer, part by part → end
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

DEMO = Path(__file__).parents[3] / "engine" / "baton" / "models" / "demo"
CONTEXT_TOKENS = 65_536
HIDDEN_SIZE = 64
CERTAIN = 8.0
"""Size of a head's entry: the next token's logit is this times the root of HIDDEN_SIZE, all others' are 0."""
RESULT_MARK = "<|result|>"
REASONING = ("\nI read", " the file.\n")
ANSWER = ("The file", " tells", " how long", " a lease", " lasts.")
FOLLOWS_RESULT = (
    "{% set last = namespace(role='') %}"
    "{% for message in messages %}{% if message['role'] not in ['system', 'developer'] %}"
    "{% set last.role = message['role'] %}{% endif %}{% endfor %}"
    "{% if last.role == 'tool' %}{{ '"
    + RESULT_MARK
    + "' }}{% else %}{{ '<|assistant|>' }}{% endif %}"
)


def write_model(folder: Path, tool: str, arguments: dict[str, Any]) -> Path:
    """Write a checkpoint that calls `tool` with `arguments` and then answers; returns its folder."""
    folder.mkdir()
    call = json.dumps({"name": tool, "arguments": arguments})
    call_parts = ("\n" + call[: len(call) // 2], call[len(call) // 2 :] + "\n")
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    ids = _add_tokens(tokenizer, [RESULT_MARK, *REASONING, *call_parts, *ANSWER])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    _write_configs(folder, vocab_size=max(ids.values()) + 1)
    thought = ("<|assistant|>", "<think>", *REASONING, "</think>")
    chains = (
        (*thought, "<tool_call>", *call_parts, "</tool_call>", "<|eos|>"),
        (RESULT_MARK, *ANSWER, "<|eos|>"),
    )
    follows = [
        (ids[token], ids[following])
        for chain in chains
        for token, following in itertools.pairwise(chain)
    ]
    save_file(_weights(max(ids.values()) + 1, follows), str(folder / "model.safetensors"))
    return folder


def _add_tokens(tokenizer: dict[str, Any], texts: list[str]) -> dict[str, int]:
    """Append tokens with these texts; ids of all added tokens by text."""
    added: list[dict[str, Any]] = tokenizer["added_tokens"]
    first = max(token["id"] for token in added) + 1
    for number, content in enumerate(texts, first):
        added.append({**added[-1], "id": number, "content": content})
    return {token["content"]: token["id"] for token in added}


def _write_configs(folder: Path, vocab_size: int) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    config.update(
        vocab_size=vocab_size,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=HIDDEN_SIZE,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HIDDEN_SIZE,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
    )
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer_config = json.loads((DEMO / "tokenizer_config.json").read_text())
    template = tokenizer_config["chat_template"]
    opening = "{{ '<|assistant|>' }}{% if enable_thinking"
    assert opening in template
    tokenizer_config["chat_template"] = template.replace(
        opening, FOLLOWS_RESULT + "{% if enable_thinking"
    )
    tokenizer_config["model_max_length"] = CONTEXT_TOKENS
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))


def _weights(vocab_size: int, follows: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Tensors in which one hidden dimension stands for each pair of tokens."""
    square = (HIDDEN_SIZE, HIDDEN_SIZE)
    embedding = torch.zeros(vocab_size, HIDDEN_SIZE)
    head = torch.zeros(vocab_size, HIDDEN_SIZE)
    for dimension, (token, following) in enumerate(follows):
        embedding[token, dimension] = 1.0
        head[following, dimension] = CERTAIN
    layer = "model.layers.0."
    zeros = [f"self_attn.{name}_proj" for name in "qkvo"]
    zeros += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    ones = [f"{layer}input_layernorm", f"{layer}post_attention_layernorm", "model.norm"]
    return {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        **{f"{layer}{name}.weight": torch.zeros(square) for name in zeros},
        **{f"{name}.weight": torch.ones(HIDDEN_SIZE) for name in ones},
    }
