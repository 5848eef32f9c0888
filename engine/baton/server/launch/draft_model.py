"""The draft model's directory, with the tokenizer that it must have."""

from __future__ import annotations

from dataclasses import replace

from baton.config import EngineConfig
from baton.config.files import is_given
from baton.errors import ConfigError
from baton.server.observability.fingerprint import TOKENIZER_FILES, tokenizer_hash
from baton.server.text import model_info

FLAG = "--speculative-draft-model-path"


def resolve_draft_model(config: EngineConfig) -> EngineConfig:
    """The flags with a directory in place of an id of the Hugging Face hub, as ranks read it.

    Raises ConfigError for a directory that is not there, and for one whose tokenizer is not that of
    the model: its drafts would be other texts, and hardly ever what comes.
    """
    given = config.speculative_draft_model_path
    if given is None:
        return config
    path = model_info.resolve(given, FLAG)
    # A head has token ids of the model and reads no text.
    if config.is_drafted_by_head:
        return replace(config, speculative_draft_model_path=str(path))
    files = [name for name in TOKENIZER_FILES if is_given(path / name)]
    if not files:
        raise ConfigError(
            f"{FLAG} {given}: {path} has no tokenizer to compare with that of the model; put its "
            "tokenizer files there"
        )
    tokenizer_path = model_info.load(config).tokenizer_path
    if tokenizer_hash(path) != tokenizer_hash(tokenizer_path):
        raise ConfigError(
            f"{FLAG} {given}: its tokenizer ({', '.join(files)}) is not that of {tokenizer_path}; "
            "give a model of the same family, whose token ids mean the same texts"
        )
    return replace(config, speculative_draft_model_path=str(path))
