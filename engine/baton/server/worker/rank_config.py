"""Start-up configuration of a rank process: one line of JSON on its stdin."""

from __future__ import annotations

import msgspec

from baton.config import EngineConfig


class BootstrapAddress(msgspec.Struct, frozen=True):
    """Where the transfer runtime of a P node registers."""

    host: str
    port: int


class GrammarFiles(msgspec.Struct, frozen=True):
    """Facts of the model's directory that a rank needs to follow grammars."""

    tokenizer_path: str
    """Directory with the vocabulary."""
    added_tokens: list[tuple[int, str, bool]]
    """Tokens that other files add: id, content, and True for special ones."""
    eos_token_ids: list[int]


class RankConfig(msgspec.Struct, frozen=True, kw_only=True):
    config: EngineConfig
    dp_rank: int
    tp_rank: int
    folder: str
    """The engine's private directory, where tensor-parallel ranks meet."""
    to_rank: str
    """Address of the socket for messages from the front, which the first tensor-parallel rank
    reads.
    """
    to_front: str
    """Address of the socket for messages to the front."""
    bootstrap: BootstrapAddress | None = None
    """On P nodes."""
    grammar: GrammarFiles | None = None
    """None: requests with a grammar are refused."""


def encode_line(config: RankConfig) -> bytes:
    return msgspec.json.encode(config) + b"\n"


def decode_line(line: str) -> RankConfig:
    """Raises msgspec.ValidationError for a line that `encode_line` of this version did not
    write.
    """
    return msgspec.json.decode(line, type=RankConfig)
