"""Facts of a model directory for the front, read from its JSON files alone (no torch, no
transformers).

1. `resolve(path)` turns `--model-path` into a directory ('demo' is the model inside the package);
2. `load(config)` reads config.json, generation_config.json, the tokenizer's files and the chat
   template into a frozen `ModelFacts`.

Every problem is a ConfigError that names the file and what to do, because it is the first thing a
new user meets.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import baton
from baton.config import EngineConfig, uses_four_bytes
from baton.config.files import is_given, read_regular_file
from baton.config.simulated import CONTEXT_LENGTH, VOCAB_SIZE
from baton.errors import ConfigError, ModelNotFound
from baton.models.config_file import read_generation_config, read_model_config
from baton.models.spec_reader import read_eos_token_ids, read_max_context, read_vocab_size
from baton.server.text.native import load_or_refuse, native_extension

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
    """config.json, generation_config.json and the tokenizer's eos_token together, as both peers
    do.
    """
    chat_template: str | None
    template_caps: str = ""
    """Form in which the template takes messages: `name=value` of each capability."""
    renders_tools: bool = False
    """Tools reach the prompts that the template renders."""
    has_response_template: bool = False
    """tokenizer_config.json describes how answers are read; the description is not used."""
    special_tokens: dict[str, str] = field(default_factory=dict)
    """bos_token, eos_token, pad_token …: chat templates read them as variables."""
    control_tokens: tuple[str, ...] = ()
    """Tokens of a vocabulary that is no tokenizer.json: found in the text of the chat template, not
    in what users write.
    """
    vocab_size: int = VOCAB_SIZE
    """Rows of the embedding: the model takes token ids below it."""
    generation_config: dict[str, Any] = field(default_factory=dict)
    """generation_config.json as it is; `request.sampling` checks and uses its defaults."""
    tokenizer_fingerprint: str = ""
    """Equal where vocabulary, template, special and added tokens are; empty with --simulate's own.
    """
    model_type: str = ""
    architectures: tuple[str, ...] = ()

    def not_served(self, model: str) -> ModelNotFound:
        text = f"model {model[:200]!r} is not served here; this engine serves {self.name!r}"
        return ModelNotFound(text, param="model")


def resolve(model_path: str, flag: str = "--model-path") -> Path:
    """The directory for `--model-path`, or another flag. Raises ConfigError when it does not
    exist.
    """
    if model_path == "demo":
        path = Path(baton.__path__[0]) / "models" / "demo"
    else:
        path = model_directory(flag, model_path)
    if not is_given(path / "config.json"):
        raise ConfigError(
            f"{flag} {model_path}: {path} has no config.json; give a Hugging Face model directory"
        )
    return path.resolve()


def model_directory(flag: str, given: str) -> Path:
    """A directory given as a path, or as an id of the Hugging Face hub. Raises ConfigError when
    there is none.
    """
    path = expand_path(flag, given)
    try:
        if not path.is_dir() and HUB_ID.fullmatch(given):
            path = _from_hub_cache(flag, given)
        is_directory = path.is_dir()
    except OSError as err:  # a folder above it may not be entered, or the name is too long
        raise ConfigError(f"{flag} {given[:200]}: {err.strerror}; give another directory") from err
    if not is_directory:
        raise ConfigError(
            f"{flag} {given}: {path} is not a directory; give a Hugging Face model directory"
        )
    return path


def expand_path(flag: str, given: str) -> Path:
    """The path with ~ replaced. Raises ConfigError for a user who is not there."""
    try:
        return Path(given).expanduser()
    except RuntimeError as err:
        raise ConfigError(f"{flag} {given}: {err}; write the path out") from err


def _from_hub_cache(flag: str, model_id: str) -> Path:
    """Where `hf download` has put a model. Raises ConfigError when it has not."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = expand_path("HF_HUB_CACHE", os.environ.get("HF_HUB_CACHE", f"{home}/hub"))
    folder = cache / f"models--{model_id.replace('/', '--')}"
    try:
        revision = read_regular_file(folder / "refs" / "main").decode().strip()
        return folder / "snapshots" / revision
    except (OSError, UnicodeDecodeError):
        raise ConfigError(
            f"{flag} {model_id}: there is no such directory here, nor such a model in {cache}; to "
            "download it: "
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
    files = _tokenizer_files(config, tokenizer_path)
    if config.simulate is not None:  # there is no model: only its tokenizer, template and name
        limit = CONTEXT_LENGTH
        vocab_size = VOCAB_SIZE
    else:
        limit = read_max_context(model)
        vocab_size = read_vocab_size(model)
    if config.context_length is not None and config.context_length > limit:
        raise ConfigError(
            f"--context-length {config.context_length}: the model's limit is {limit} tokens"
        )
    four_bytes = uses_four_bytes(config)
    return ModelFacts(
        path=path,
        tokenizer_path=tokenizer_path,
        name=config.served_model_name
        or (config.model_path if "snapshots" in path.parts[-2:-1] else path.name),
        context_length=config.context_length or limit,
        eos_token_ids=read_eos_token_ids(model.text_part(), generation),
        chat_template=files.chat_template,
        template_caps=files.template.caps,
        renders_tools=files.template.renders_tools,
        has_response_template=files.has_response_template,
        special_tokens=files.special_tokens,
        control_tokens=tuple(files.control_tokens),
        tokenizer_fingerprint="" if four_bytes else files.fingerprint(),
        vocab_size=vocab_size,
        generation_config=generation.values,
        model_type=str(model.get("model_type", "")),
        architectures=tuple(model.read_names("architectures", [])),
    )


def _tokenizer_files(config: EngineConfig, folder: Path) -> Any:
    """`baton._native.TokenizerFiles` of the tokenizer's folder. Raises ConfigError."""
    template = config.chat_template
    file = expand_path("--chat-template", template) if template else None
    return load_or_refuse(native_extension().TokenizerFiles, folder, file)
