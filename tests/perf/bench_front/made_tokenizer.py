"""A byte-level BPE tokenizer as large as today's models have, made of syllables in a second.

Its tokens are bytes, syllables, and words of two and of three syllables. The ids that simulated engines answer with
(3 to 999) are words with a space before them, so that answers read as text does: five characters a token.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

CONSONANTS = "bcdfghjklmnpqrstvwxyz"
VOWELS = "aeiou"
SPACE = "Ġ"
"""A space in byte-level BPE's alphabet (Radford et al. 2019, GPT-2)."""
SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
ANSWER_TOKENS = 997
VOCAB_SIZE = 150_000
ANSWER_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens behind the vocabulary: between them stand the reasoning and the calls."""
TEMPLATE = (
    "{% for message in messages %}{{ '<s>' + message['role'] + '\\n' + message['content'] + '</s>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
)


AGENT_TEMPLATE = (
    "{% if tools %}{{ '<s>system\\nCall a function between <tool_call> and </tool_call>:' }}"
    "{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ '</s>\\n' }}{% endif %}"
    + TEMPLATE
    + "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)
"""The template with tools, by which an engine finds the formats hermes and think_tags."""


def byte_letters() -> list[str]:
    """Letters of the bytes 0 to 255."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(256)
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def made_merges(count: int) -> Iterator[tuple[str, str]]:
    """The first `count` merges; each joins two tokens that are there before it."""
    letter_pairs = list(itertools.product(CONSONANTS, VOWELS))
    syllables = ["".join(pair) for pair in letter_pairs]
    syllable_pairs = list(itertools.product(syllables, syllables))
    words = ["".join(pair) for pair in syllable_pairs]
    merges = itertools.chain(
        letter_pairs,
        syllable_pairs,
        ((SPACE, word) for word in words),
        itertools.product(words, syllables),
    )
    return itertools.islice(merges, count)


def made_words(count: int) -> list[str]:
    """Words of two syllables, each a token with the space before it."""
    syllables = ["".join(pair) for pair in itertools.product(CONSONANTS, VOWELS)]
    pairs = list(itertools.product(syllables, syllables))
    step = 37  # neighbors differ in both syllables
    return ["".join(pairs[i * step % len(pairs)]) for i in range(count)]


def make_tokenizer(path: Path, *, has_formats: bool = False) -> Path:
    """Write tokenizer.json and tokenizer_config.json into `path`.

    Args:
        has_formats: the model knows tool calls and reasoning.
    """
    path.mkdir(exist_ok=True)
    letters = byte_letters()
    merges = list(made_merges(VOCAB_SIZE - len(SPECIAL_TOKENS) - len(letters)))
    answer = [SPACE + word for word in made_words(ANSWER_TOKENS)]
    others = ["".join(merge) for merge in merges]
    tokens = dict.fromkeys([*SPECIAL_TOKENS, *answer, *letters, *others])
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": {token: id for id, token in enumerate(tokens)}, "merges": merges,
    }  # fmt: skip
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
    }  # fmt: skip
    added = [
        {
            "id": id, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        }
        for id, token in enumerate(SPECIAL_TOKENS)
    ]  # fmt: skip
    if has_formats:
        added += [
            {
                "id": len(tokens) + number, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": False,
            }
            for number, token in enumerate(ANSWER_MARKERS)
        ]  # fmt: skip
    file = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model,
    }  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
        "pad_token": "<pad>", "chat_template": AGENT_TEMPLATE if has_formats else TEMPLATE,
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(file))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path
