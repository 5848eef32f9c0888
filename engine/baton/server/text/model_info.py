"""Facts of a model directory for the front, read from its JSON files alone (no torch, no transformers).

1. `resolve(path)` turns `--model-path` into a directory ('demo' is the model inside the package);
2. `load(config)` reads config.json, generation_config.json, tokenizer_config.json and the chat template into a
   frozen `ModelFacts`.

Every problem is a ConfigError that names the file and what to do, because it is the first thing a new user meets.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import baton
from baton.config import EngineConfig, uses_four_bytes
from baton.config.simulated import CONTEXT_LENGTH, VOCAB_SIZE
from baton.errors import ConfigError, ModelNotFound
from baton.models.config_file import read_generation_config, read_model_config
from baton.models.spec_reader import read_eos_token_ids, read_max_context
from baton.server.text.added_tokens import (
    AddedTokenPlan,
    plan_added_tokens,
    read_object,
    read_tokenizer_files,
)
from baton.server.text.chat_template import ChatTemplate
from baton.server.text.messages import TemplateCaps

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""Owner and name of a model on the Hugging Face hub."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of the directory; nothing here changes while the engine runs."""

    path: Path
    tokenizer_path: Path
    name: str
    context_length: int
    """Longest prompt + answer: the model's limit, lowered by --context-length [tokens]."""
    eos_token_ids: tuple[int, ...]
    """config.json, generation_config.json and the tokenizer's eos_token together, as both peers do."""
    chat_template: str | None
    template_caps: TemplateCaps = field(default_factory=TemplateCaps)
    """Form in which the template takes messages."""
    special_tokens: dict[str, str] = field(default_factory=dict)
    """bos_token, eos_token, pad_token …: chat templates read them as variables."""
    vocab_size: int = VOCAB_SIZE
    """Rows of the embedding: the model takes token ids below it."""
    generation_config: dict[str, Any] = field(default_factory=dict)
    """generation_config.json as it is; `request.sampling` checks and uses its defaults."""
    tokenizer_fingerprint: str = ""
    """Equal where tokenizer.json, template and special tokens are (`_fingerprint`); empty with --simulate's own."""
    model_type: str = ""
    architectures: tuple[str, ...] = ()

    def not_served(self, model: str) -> ModelNotFound:
        text = f"model {model[:200]!r} is not served here; this engine serves {self.name!r}"
        return ModelNotFound(text, param="model")


def resolve(model_path: str) -> Path:
    """The directory for `--model-path`. Raises ConfigError when it does not exist."""
    if model_path == "demo":
        path = Path(baton.__path__[0]) / "models" / "demo"
    else:
        path = model_directory("--model-path", model_path)
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"--model-path {model_path}: {path} has no config.json; give a Hugging Face model directory"
        )
    return path.resolve()


def model_directory(flag: str, given: str) -> Path:
    """A directory given as a path, or as an id of the Hugging Face hub. Raises ConfigError when there is none."""
    path = Path(given).expanduser()
    if not path.is_dir() and HUB_ID.fullmatch(given):
        path = _from_hub_cache(flag, given)
    if not path.is_dir():
        raise ConfigError(
            f"{flag} {given}: {path} is not a directory; give a Hugging Face model directory"
        )
    return path


def _from_hub_cache(flag: str, model_id: str) -> Path:
    """Where `hf download` has put a model. Raises ConfigError when it has not."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    folder = cache / f"models--{model_id.replace('/', '--')}"
    try:
        return folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except OSError:
        raise ConfigError(
            f"{flag} {model_id}: there is no such directory here, nor such a model in {cache}; to download it: "
            f"hf download {model_id}"
        ) from None


def load(config: EngineConfig) -> ModelFacts:
    """Read the directory that `config` names. Raises ConfigError."""
    path = resolve(config.model_path)
    tokenizer_path = (
        model_directory("--tokenizer-path", config.tokenizer_path)
        if config.tokenizer_path
        else path
    )
    model = read_model_config(path)
    generation = read_generation_config(path)
    tokenizer = read_tokenizer_files(tokenizer_path)
    added_tokens = plan_added_tokens(tokenizer)
    if config.simulate is not None:  # there is no model: only its tokenizer, template and name
        limit = CONTEXT_LENGTH
        vocab_size = VOCAB_SIZE
    else:
        limit = read_max_context(model.text_part())
        vocab_size = model.text_part().read_integer("vocab_size", model.get("vocab_size"))
    if config.context_length is not None and config.context_length > limit:
        raise ConfigError(
            f"--context-length {config.context_length}: the model's limit is {limit} tokens"
        )
    four_bytes = uses_four_bytes(config)
    chat_template = _chat_template(config, tokenizer_path, tokenizer.config)
    template_caps = ChatTemplate(chat_template, added_tokens.special_tokens).caps
    return ModelFacts(
        path=path,
        tokenizer_path=tokenizer_path,
        name=config.served_model_name
        or (config.model_path if "snapshots" in path.parts[-2:-1] else path.name),
        context_length=config.context_length or limit,
        eos_token_ids=read_eos_token_ids(model.text_part(), generation),
        chat_template=chat_template,
        template_caps=template_caps,
        special_tokens=added_tokens.special_tokens,
        tokenizer_fingerprint=""
        if four_bytes
        else _fingerprint(tokenizer_path, chat_template, template_caps, added_tokens),
        vocab_size=vocab_size,
        generation_config=generation.values,
        model_type=str(model.get("model_type", "")),
        architectures=tuple(model.read_names("architectures", [])),
    )


def _fingerprint(
    path: Path,
    chat_template: str | None,
    caps: TemplateCaps,
    added_tokens: AddedTokenPlan,
) -> str:
    """SHA-256 over all that decides the ids of a prompt, as the router computes it (request/tokenize/files.rs).

    Parts, each preceded by its length: tokenizer.json, names and texts of the special tokens by name, the tokens that
    other files add, the template if there is one and how messages are normalized for it. Empty without a
    tokenizer.json: loading the tokenizer says so.
    """
    try:
        parts = [(path / "tokenizer.json").read_bytes()]
    except OSError:
        return ""
    for name, text in sorted(added_tokens.special_tokens.items()):
        parts += [name.encode(), text.encode()]
    parts += added_tokens.fingerprint_parts
    if chat_template is not None:
        parts += [chat_template.encode(), caps.canonical().encode()]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _chat_template(config: EngineConfig, path: Path, tokenizer: Mapping[str, Any]) -> str | None:
    """--chat-template, else chat_template.jinja, chat_template.json, tokenizer_config.json (a string or a list)."""
    if config.chat_template:
        try:
            return Path(config.chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as err:
            raise ConfigError(f"--chat-template {config.chat_template}: {err}") from err
    jinja = path / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    value = read_object(path / "chat_template.json").get(
        "chat_template", tokenizer.get("chat_template")
    )
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
