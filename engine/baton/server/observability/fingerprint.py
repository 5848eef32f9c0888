"""Fingerprint of a node: a short hash per aspect that P and D must have in common.

`GET /get_server_info` tells them under `fingerprint`, the router pairs P and D only when all that
both tell are equal (docs/protocol.md §2). Two nodes would notice later too, when the pages do not
fit or the prompts' hashes differ: per request, as an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.config.files import is_given, read_regular_file
from baton.models.weight_files import refuse_unreadable
from baton.server.text.model_info import ModelFacts
from baton.server.text.native import load_or_refuse, native_extension

LAYOUT_FIELDS = ("groups_hash", "tp_size")
"""As far as a layout has them: `tp_size` is reported where pages are divided among several
processes.
"""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
)


def _short(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:16]


def tokenizer_hash(path: Path) -> str:
    """Hash of the files that decide which text is which ids, as far as the directory has them, and
    of the tokens and settings that its other files add to them.
    """
    files = [path / name for name in TOKENIZER_FILES if is_given(path / name)]
    other_parts = load_or_refuse(native_extension().TokenizerFiles, path).fingerprint_parts
    return _short(
        *(part for file in files for part in (file.name.encode(), _content(file))),
        *other_parts,
    )


def _content(file: Path) -> bytes:
    with refuse_unreadable(file):
        return read_regular_file(file)


def _number_types(layout: Mapping[str, Any]) -> str:
    """Type of the computation, and that of the pages where it is another one."""
    computed_in = str(layout["dtype"])
    others = dict.fromkeys(group["dtype"] for group in layout["groups"])
    others.pop(computed_in, None)
    return ", KV cache ".join([computed_in, *others])


def fingerprint(
    facts: ModelFacts,
    tokenizer: str,
    layout: Mapping[str, Any],
    answer_format: str,
    grammar: str,
) -> dict[str, str]:
    """`tokenizer` is `tokenizer_hash`; `layout` is what a rank reports of its KV pool;
    `answer_format` decides how answers are read (AnswerFormat.canonical); `grammar` is
    `grammar_fingerprint`. The keys are the router's.
    """
    return {
        "model": str(layout["model_hash"]),
        "tokenizer": tokenizer,
        "chat_template": _short((facts.chat_template or "").encode(), facts.template_caps.encode()),
        "page_size": str(layout["page_size"]),
        "dtype": _number_types(layout),
        "kv_layout": _short(
            *(f"{name}={layout[name]}".encode() for name in LAYOUT_FIELDS if name in layout)
        ),
        "grammar": grammar,
        "answer_format": answer_format,
    }
