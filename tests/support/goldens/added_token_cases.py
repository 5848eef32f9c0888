"""Golden cases of the tokens that a directory's files add to tokenizer.json.

`python -m tests.support.goldens.added_token_cases` writes `tests/contract/golden/tokens/added_tokens.json`, with the
plans of `engine/text`. A Python test holds them to what AutoTokenizer makes of the same files, a Rust test
(engine/text/src/tokenizer/added_tokens.rs) keeps them.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from baton._native import TokenizerFiles

from tests.support.models.checkpoints import BOS, EOS

CASES = Path(__file__).parents[3] / "tests/contract/golden/tokens/added_tokens.json"
MARK = "<|im_end|>"
PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
SPECIAL = {**PLAIN, "content": MARK, "special": True}
OWN = [
    {"id": BOS, "content": "<|bos|>", **PLAIN, "special": True},
    {"id": EOS, "content": "<|eos|>", **PLAIN, "special": True},
]
KNOWN_MARK = {"added_tokens": [*OWN, {"id": 258, "content": MARK, **PLAIN, "special": False}]}

Files = dict[str, Any]
"""Objects of the files that a case has; tokenizer.json's default to OWN."""

VARIANTS: dict[str, Files] = {
    "tokenizer.json alone": {},
    "named token": {"config": {"eos_token": MARK, "pad_token": None}},
    "named object": {
        "config": {"eos_token": {"__type": "AddedToken", "content": MARK, "rstrip": True}}
    },
    "declared": {"config": {"added_tokens_decoder": {"258": SPECIAL}}},
    "declared with flags": {
        "config": {"added_tokens_decoder": {"258": {"content": MARK, "lstrip": True}}}
    },
    "declared out of order": {
        "config": {
            "added_tokens_decoder": {"301": {"content": "<b>"}, "7": SPECIAL, "30": {"content": "<c>"}}
        }
    },
    "declared special, known as plain": {
        "tokenizer": KNOWN_MARK,
        "config": {"added_tokens_decoder": {"258": SPECIAL}},
    },
    "named, known as plain": {"tokenizer": KNOWN_MARK, "config": {"eos_token": MARK}},
    "listed, known as plain": {
        "tokenizer": KNOWN_MARK,
        "config": {"extra_special_tokens": [MARK]},
    },
    "listed": {"config": {"extra_special_tokens": [MARK, "<tool>"]}},
    "listed under the old name": {"config": {"additional_special_tokens": [MARK]}},
    "both lists": {
        "config": {"extra_special_tokens": ["<a>"], "additional_special_tokens": [MARK]}
    },
    "own names": {
        "config": {
            "video_token": "<video>",
            "audio_token": "<audio>",
            "extra_special_tokens": {"image_token": "<image>", "mark": MARK},
        }
    },
    "added_tokens.json": {"added_tokens": {MARK: 258, "<tool>": 259}},
    "added_tokens.json, named": {"config": {"eos_token": MARK}, "added_tokens": {MARK: 258}},
    "added_tokens.json, named by an object": {
        "config": {"eos_token": {"__type": "AddedToken", "content": MARK}},
        "added_tokens": {MARK: 258},
    },
    "added_tokens.json overruled by id": {"added_tokens": {MARK: EOS, "<tool>": 258}},
    "added_tokens.json beside declared tokens": {
        "config": {"added_tokens_decoder": {"259": {"content": "<tool>"}}},
        "added_tokens": {MARK: 258},
    },
    "special_tokens_map.json": {
        "special_tokens_map": {
            "eos_token": {"content": MARK, "lstrip": False, "rstrip": True},
            "image_token": "<image>",
            "additional_special_tokens": ["<tool>"],
        }
    },
    "special_tokens_map.json counts before tokenizer_config.json": {
        "config": {"eos_token": "<|eos|>", "bos_token": "<|bos|>", "image_token": "<i>"},
        "special_tokens_map": {"eos_token": MARK, "bos_token": None, "image_token": "<image>"},
    },
    "special_tokens_map.json beside declared tokens": {
        "config": {"eos_token": "<|eos|>", "added_tokens_decoder": {}},
        "special_tokens_map": {"eos_token": MARK},
    },
    "lists of two files": {
        "config": {"extra_special_tokens": ["<a>"]},
        "special_tokens_map": {"extra_special_tokens": ["<a>", {"content": MARK, "lstrip": True}]},
    },
    "padding of tokenizer.json": {
        "tokenizer": {
            "added_tokens": OWN,
            "padding": {
                "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                "pad_type_id": 0, "pad_token": "[PAD]",
            },
        }
    },
    "split special tokens": {"config": {"split_special_tokens": True, "eos_token": MARK}},
    "word of the vocabulary": {"config": {"extra_special_tokens": ["a"]}},
    "number for a token": {"config": {"eos_token": 7}},
    "list of numbers": {"config": {"extra_special_tokens": [7]}},
    "declared under a word": {"config": {"added_tokens_decoder": {"x": SPECIAL}}},
    "declared without a content": {"config": {"added_tokens_decoder": {"258": {}}}},
    "flag that is a text": {
        "config": {"added_tokens_decoder": {"258": {"content": MARK, "special": "yes"}}}
    },
    "text for an id": {"added_tokens": {MARK: "258"}},
}  # fmt: skip


def plan_as_json(plan: TokenizerFiles) -> dict[str, Any]:
    return {
        "tokens": [list(token) for token in plan.added_tokens],
        "special_tokens": plan.special_tokens,
        "split_special_tokens": plan.split_special_tokens,
        "fingerprint_parts": [part.decode() for part in plan.fingerprint_parts],
    }


def case_of(variant: Files) -> dict[str, Any]:
    files: Files = {"tokenizer": {"added_tokens": OWN}, "config": {}, "special_tokens_map": {}}
    files |= {"added_tokens": {}, **variant}
    names = {"tokenizer": "tokenizer.json", "config": "tokenizer_config.json"}
    with TemporaryDirectory() as folder:
        for name, value in files.items():
            file = Path(folder) / names.get(name, f"{name}.json")
            file.write_text(json.dumps(value))
        try:
            return files | {"plan": plan_as_json(TokenizerFiles(folder)), "error": None}
        except ValueError as err:
            return files | {"plan": None, "error": str(err)}


def cases() -> dict[str, Any]:
    return {name: case_of(variant) for name, variant in VARIANTS.items()}


def main() -> None:
    CASES.write_text(json.dumps(cases(), ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
