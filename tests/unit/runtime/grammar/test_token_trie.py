"""Bytes of tokens in the trie are those of the text layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.runtime.grammar.token_trie import TokenizerSource, build_trie, text_for_trie
from baton.server.text.tokenizer import Tokenizer
from tests.support.models.chain_model import EOS, IDS, make_chain_checkpoint

REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
BYTES = {"type": "ByteFallback"}
FUSE = {"type": "Fuse"}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
DECODERS = {
    "llama": [REPLACE, BYTES, FUSE, STRIP],
    "gemma": [REPLACE, BYTES, FUSE],
    "metaspace": [BYTES, METASPACE],
}


@pytest.mark.parametrize("decoder", DECODERS)
def test_bytes_of_tokens_are_those_of_the_text_layer(tmp_path: Path, decoder: str) -> None:
    path = make_chain_checkpoint(tmp_path / "chain")
    file = path / "tokenizer.json"
    tokenizer_json = json.loads(file.read_text())
    tokenizer_json["decoder"] = {"type": "Sequence", "decoders": DECODERS[decoder]}
    file.write_text(json.dumps(tokenizer_json))
    source = TokenizerSource(file.read_text(), [], [EOS])
    trie = build_trie(source, len(IDS))
    tokenizer = Tokenizer(path)
    no_bytes = IDS["<0xFF>"]  # a byte of no text, by which llguidance marks special tokens
    for token in set(IDS.values()) - {no_bytes}:
        assert trie.decode_bytes([token]) == tokenizer.token_bytes(token)
    assert tokenizer.decode([IDS["▁al"], IDS["▁be"]]).lstrip() == "al be"


def test_token_of_the_tokenizer_file_is_listed_once() -> None:
    """Files beside tokenizer.json may repeat it with other flags: the rank takes those of the file."""
    own = {"id": 5, "content": "<a>", "special": True}
    text = json.dumps({"added_tokens": [own], "model": {}})
    added = [(5, "<a>", False), (6, "<b>", False)]
    listed = json.loads(text_for_trie(text, added))["added_tokens"]
    assert [(token["id"], token["content"], token["special"]) for token in listed] == [
        (5, "<a>", True),
        (6, "<b>", False),
    ]
    assert text_for_trie(text, []) is text
