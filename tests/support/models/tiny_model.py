"""A model directory without weights: a byte-level tokenizer trained in memory, a chat template, configs.

Enough for everything in front of the scheduler; `config.json` has the shape of a small Llama.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CORPUS = [
    "the relay race: prefill hands the baton to decode, and it must not be dropped. hello world, how?"
] * 8


def make(
    path: Path, *, context_length: int = 512, vocab_size: int = 384, template: str | None = TEMPLATE
) -> Path:
    """Write the directory and return it. Ids: 0 <s>, 1 </s>, 2 <pad>."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": context_length, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    token_config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    if template is not None:
        token_config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(token_config))
    return path
