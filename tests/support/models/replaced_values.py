"""JSON documents in which one value is replaced, and a checkpoint directory with every JSON file that is read.

For tests that each value of a file is used as transformers uses it, or refused in a sentence.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.models.checkpoints import BOS, EOS, make_checkpoint

VALUES: tuple[Any, ...] = (None, -1, 0, 1e9, 10**9, "", [], {})
"""1e9 is a float in JSON, 10**9 an integer."""
SAMPLED = 3
"""Entries that stand for all of a larger array or object, such as the vocabulary."""
WHOLE = 40
"""Entries of the largest array or object of which each is replaced."""

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FILES = (
    "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.json", "model.safetensors.index.json",
)  # fmt: skip


class Replacement(NamedTuple):
    file: str
    place: tuple[str | int, ...]
    """Keys and indices from the document's root to the value."""
    value: Any

    def __str__(self) -> str:
        return f"{self.file}:{'.'.join(map(str, self.place))}={json.dumps(self.value)}"


def make_full_checkpoint(path: Path, variant: str = "llama-rope3") -> Path:
    """A tiny model in several weight files, whose tokens are declared in every file that may declare them."""
    make_checkpoint(variant, path, max_shard_size="100KB")
    added = {"content": "<|eos|>", "lstrip": False, "normalized": False, "special": True}
    edits: dict[str, dict[str, Any]] = {
        "generation_config.json": {
            "eos_token_id": [EOS], "bos_token_id": BOS, "pad_token_id": EOS, "do_sample": True, "temperature": 0.9,
            "top_p": 0.95, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1, "max_new_tokens": 64,
        },
        "tokenizer_config.json": {
            "added_tokens_decoder": {str(EOS): added}, "additional_special_tokens": ["<|eos|>"],
            "extra_special_tokens": {}, "model_max_length": 512, "add_bos_token": False,
            "clean_up_tokenization_spaces": False, "split_special_tokens": False, "pad_token": "<|eos|>",
        },
        "special_tokens_map.json": {"bos_token": "<|bos|>", "eos_token": added},
        "added_tokens.json": {"<|bos|>": BOS, "<|eos|>": EOS},
        "chat_template.json": {"chat_template": TEMPLATE},
    }  # fmt: skip
    for name, values in edits.items():
        file = path / name
        old = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(old | values))
    assert all((path / name).is_file() for name in FILES)
    return path


def replacements(path: Path, file: str) -> Iterator[Replacement]:
    """Every value of a file replaced by each of VALUES that differs from it; of large parts, a sample."""
    document = json.loads((path / file).read_text())
    for place, old in _places(document, ()):
        for value in VALUES:
            if json.dumps(value) != json.dumps(old):
                yield Replacement(file, place, value)


def _places(part: Any, place: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    yield place, part
    if isinstance(part, dict):
        keys: list[str | int] = list(part)
    elif isinstance(part, list):
        keys = list(range(len(part)))
    else:
        return
    if len(keys) > WHOLE:
        keys = [*keys[: SAMPLED - 1], keys[-1]]
    for key in keys:
        yield from _places(part[key], (*place, key))


class ReplacedCheckpoint:
    """A directory in which one value at a time is replaced."""

    def __init__(self, source: Path, path: Path) -> None:
        self.path = Path(shutil.copytree(source, path))
        self._originals = {name: (path / name).read_text() for name in FILES}
        self._changed: str | None = None

    def apply(self, replacement: Replacement) -> Path:
        """Write the file with this value replaced, and all others as they were."""
        if self._changed is not None:
            (self.path / self._changed).write_text(self._originals[self._changed])
        self._changed = replacement.file
        document = json.loads(self._originals[replacement.file])
        (self.path / replacement.file).write_text(json.dumps(replaced(document, replacement)))
        return self.path


def replaced(document: Any, replacement: Replacement) -> Any:
    """A copy of the document with the value in place."""
    if not replacement.place:
        return replacement.value
    changed = copy.deepcopy(document)
    *outer, last = replacement.place
    part = changed
    for key in outer:
        part = part[key]
    part[last] = replacement.value
    return changed
