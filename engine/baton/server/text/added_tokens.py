"""Tokens that the files beside tokenizer.json add to it, and special tokens by name: as transformers 5 has them.

`plan_added_tokens(files)` is deterministic and reads nothing. The router has its twin
(request/tokenize/added_tokens.rs); tests/contract/golden/tokens/added_tokens.json holds both to the same cases. The
plan follows `_from_pretrained` and `TokenizersBackend.__init__` of AutoTokenizer's classes:

1. `added_tokens_decoder` of tokenizer_config.json declares tokens with flags. Without it the older files count:
   special_tokens_map.json (before tokenizer_config.json), added_tokens.json, the flags in tokenizer.json;
2. named tokens (`eos_token` …, any other `*_token`, the members of an `extra_special_tokens` object) and listed ones
   (`extra_special_tokens`, formerly `additional_special_tokens`) are added where neither tokenizer.json nor the
   declared tokens have them;
3. a named token is special, whatever its flags say.

Ids are not planned: the tokenizers library gives a new token the next free id, in the order of the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from baton.errors import ConfigError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_MAP_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token with the flags of the tokenizers library; None for `normalized` is the opposite of `special`."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    special: bool = False

    @property
    def resolved(self) -> AddedToken:
        if self.normalized is None:
            return replace(self, normalized=not self.special)
        return self

    @property
    def named_flags(self) -> dict[str, bool]:
        resolved = self.resolved
        return {name: bool(getattr(resolved, name)) for name in FLAGS}

    @property
    def flags(self) -> str:
        """The flags in the order of FLAGS, 1 for those that are set."""
        return "".join("1" if is_set else "0" for is_set in self.named_flags.values())


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """JSON objects of a directory; an absent file is an empty one."""

    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    """`added_tokens` and `padding` of tokenizer.json; the rest is not looked at."""
    config: Mapping[str, Any] = field(default_factory=dict)
    special_tokens_map: Mapping[str, Any] = field(default_factory=dict)
    added_tokens: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AddedTokenPlan:
    tokens: tuple[AddedToken, ...] = ()
    """To be added to the tokenizer in this order: those that it lacks or has with other flags."""
    special_tokens: dict[str, str] = field(default_factory=dict)
    """By name, as chat templates read them."""
    split_special_tokens: bool = False
    """Special tokens in a text are encoded like any other characters."""

    @property
    def fingerprint_parts(self) -> list[bytes]:
        """Parts of a tokenizer's fingerprint; none where tokenizer.json says it all."""
        if not self.tokens and not self.split_special_tokens:
            return []
        parts = [b"added_tokens", b"split" if self.split_special_tokens else b"whole"]
        for token in self.tokens:
            parts += [token.content.encode(), token.flags.encode()]
        return parts


_Token = str | AddedToken
"""A token as a file has it: a text alone, or with flags."""
_NumberedToken = tuple[int, AddedToken]
"""A token under the id that a file gives it."""


def plan_added_tokens(files: TokenizerFiles) -> AddedTokenPlan:
    """Work out what the other files add to tokenizer.json. Raises ConfigError for values that are no tokens."""
    own = _own_tokens(files)
    settings = _Settings(files)
    declared = settings.declared_tokens(own)
    named = settings.named_tokens(declared)
    names_of_all = {_text(token) for token in named.values()}
    by_id = dict(declared)
    planned: list[_Token] = [by_id[token_id] for token_id in sorted(by_id)]
    known = {token.content for _, token in own} | {_text(token) for token in planned}
    for token in [*named.values(), *settings.listed]:
        is_planned = any(_are_equal(token, other) for other in planned)
        if _text(token) not in known and not is_planned:
            planned.append(token)
    tokens = [_added_token(token, _text(token) in names_of_all) for token in planned]
    return AddedTokenPlan(
        tokens=tuple(_changes(tokens, [token for _, token in own])),
        special_tokens={name: _text(token) for name, token in named.items()},
        split_special_tokens=settings.split_special_tokens,
    )


class _Settings:
    """Settings of tokenizer_config.json and, where it declares no tokens, of special_tokens_map.json."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._files = files
        self._declares_tokens = files.config.get("added_tokens_decoder") is not None
        self._named: dict[str, _Token | None] = {}
        self._own_names: dict[str, _Token] = {}
        """Tokens of names that only this tokenizer has, as tokenizer_config.json or an object of them declares."""
        self._older_names: dict[str, _Token] = {}
        """The same from special_tokens_map.json, and from objects: they come first, and give way."""
        self._special_texts: dict[str, str | None] = {}
        """By name, the text that makes a token of added_tokens.json special; objects of tokenizer_config.json don't."""
        self._special_listed: set[str] = set()
        """The same of listed tokens."""
        self._listed: list[_Token] | None = None
        self._additional: list[_Token] | None = None
        self.split_special_tokens = False
        self._take_config()
        if not self._declares_tokens:
            self._take_special_tokens_map()
        padding = files.tokenizer.get("padding")
        if isinstance(padding, dict) and "pad_token" not in self._named:
            self._named["pad_token"] = _token(TOKENIZER_FILE, "padding", padding.get("pad_token"))

    @property
    def listed(self) -> list[_Token]:
        return (self._additional if self._listed is None else self._listed) or []

    def _take_config(self) -> None:
        config = self._files.config
        self._take_names(CONFIG_FILE, config)
        extra = config.get("extra_special_tokens")
        additional = config.get("additional_special_tokens")
        if not extra and additional is not None:
            extra = additional
        if isinstance(extra, dict):
            for name, value in extra.items():
                self._own_names[name] = _token(CONFIG_FILE, name, value)
            if extra is not additional:
                self._additional = _token_list(CONFIG_FILE, "additional_special_tokens", additional)
        elif {"extra_special_tokens", "additional_special_tokens"} & config.keys():
            self._listed = _token_list(CONFIG_FILE, "extra_special_tokens", extra)
            self._special_listed = {token for token in self._listed if isinstance(token, str)}

    def _take_special_tokens_map(self) -> None:
        found = self._files.special_tokens_map
        self._take_names(SPECIAL_TOKENS_MAP_FILE, found)
        if "additional_special_tokens" in found:
            name = "additional_special_tokens"
            self._additional = _token_list(SPECIAL_TOKENS_MAP_FILE, name, found[name])
        extra = found.get("extra_special_tokens")
        if isinstance(extra, dict):
            self._listed = None
            self._special_listed = set()
            for name, value in extra.items():
                self._own_names[name] = _token(SPECIAL_TOKENS_MAP_FILE, name, value)
        elif "extra_special_tokens" in found:
            self._extend_listed(extra)

    def _extend_listed(self, extra: Any) -> None:
        if extra is None:
            self._listed = []
            self._special_listed = set()
            return
        listed = list(self._listed or [])
        for token in _token_list(SPECIAL_TOKENS_MAP_FILE, "extra_special_tokens", extra):
            made = token if isinstance(token, str) else replace(token, special=True)
            if not any(_are_equal(made, other) for other in listed):
                listed.append(made)
            self._special_listed.add(_text(made))
        self._listed = listed

    def _take_names(self, file: str, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name in NAMED_TOKENS:
                token = None if value is None else self._made(file, name, value)
                self._named[name] = token
                counts = isinstance(token, str) or file == SPECIAL_TOKENS_MAP_FILE
                self._special_texts[name] = _text(token) if token is not None and counts else None
            elif name.endswith("_token") and _is_token(value):
                is_own = file == CONFIG_FILE and isinstance(value, str)
                names = self._own_names if is_own else self._older_names
                names[name] = self._made(file, name, value)
            elif name.endswith("_token") and value is None:
                self._older_names.pop(name, None)
            elif name == "split_special_tokens":
                self.split_special_tokens = _flag(file, name, value)

    def _made(self, file: str, name: str, value: Any) -> _Token:
        token = _token(file, name, value)
        if file == SPECIAL_TOKENS_MAP_FILE and isinstance(token, AddedToken):
            return replace(token, special=True)
        return token

    def declared_tokens(self, own: Sequence[_NumberedToken]) -> list[_NumberedToken]:
        """`added_tokens_decoder`, or else added_tokens.json and tokenizer.json's `own`, which overrules by id."""
        if self._declares_tokens:
            return _decoder(self._files.config["added_tokens_decoder"])
        special = {*self._special_texts.values(), *self._special_listed}
        declared = []
        for content, token_id in self._files.added_tokens.items():
            if type(token_id) is not int or token_id < 0:
                _refuse(ADDED_TOKENS_FILE, content, token_id, "a token id")
            is_special = content in special
            token = AddedToken(content, normalized=not is_special, special=is_special)
            declared.append((token_id, token))
        return [*declared, *own]

    def named_tokens(self, declared: Sequence[_NumberedToken]) -> dict[str, _Token]:
        """Named tokens with the flags that are declared for their text: the well-known names first."""
        by_content = {token.content: token for _, token in declared}
        found: dict[str, _Token] = {}
        for name in NAMED_TOKENS:
            token = self._named.get(name)
            if token is not None:
                found[name] = by_content.get(_text(token), token)
        return found | self._older_names | self._own_names


def _own_tokens(files: TokenizerFiles) -> list[_NumberedToken]:
    """`added_tokens` of tokenizer.json."""
    listed = files.tokenizer.get("added_tokens") or []
    if not isinstance(listed, list):
        _refuse(TOKENIZER_FILE, "added_tokens", listed, "an array of objects")
    found = []
    for value in listed:
        token = _token(TOKENIZER_FILE, "added_tokens", value)
        token_id = value.get("id") if isinstance(token, AddedToken) else None
        if isinstance(token, str) or type(token_id) is not int or token_id < 0:
            _refuse(TOKENIZER_FILE, "added_tokens", value, "an object with id and content")
        found.append((token_id, token))
    return found


def _decoder(value: Any) -> list[_NumberedToken]:
    field_name = "added_tokens_decoder"
    if not isinstance(value, dict):
        _refuse(CONFIG_FILE, field_name, value, "an object from id to token")
    found = []
    for token_id, entry in value.items():
        token = _token(CONFIG_FILE, field_name, entry)
        if isinstance(token, str) or not (token_id.isascii() and token_id.isdigit()):
            _refuse(CONFIG_FILE, field_name, {token_id: entry}, "an id with a token's object")
        found.append((int(token_id), token))
    return found


def _changes(tokens: Iterable[AddedToken], own: Iterable[AddedToken]) -> list[AddedToken]:
    """Those of `tokens` that are news to a tokenizer with its `own`."""
    present = {token.content: token.resolved for token in own}
    news: list[AddedToken] = []
    for token in tokens:
        if token.content and present.get(token.content) != token:
            news.append(token)
            present[token.content] = token
    return news


def _added_token(token: _Token, is_named: bool) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True).resolved
    return replace(token, special=token.special or is_named).resolved


def _are_equal(one: _Token, other: _Token) -> bool:
    """Compare as the tokenizers library does; a text alone equals no object."""
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return one.resolved == other.resolved


def _text(token: _Token) -> str:
    return token if isinstance(token, str) else token.content


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, dict) and isinstance(value.get("content"), str)
    )


def _token(file: str, name: str, value: Any) -> _Token:
    if isinstance(value, str):
        return value
    if not _is_token(value):
        _refuse(file, name, value, "a text, or an object with content,")
    flags = {flag: _flag(file, f"{name}.{flag}", value[flag]) for flag in FLAGS if flag in value}
    return AddedToken(value["content"], **flags)


def _token_list(file: str, name: str, value: Any) -> list[_Token]:
    if value is None:
        return []
    if not isinstance(value, list):
        _refuse(file, name, value, "a list of tokens")
    return [_token(file, name, entry) for entry in value]


def _flag(file: str, name: str, value: Any) -> bool:
    if type(value) is not bool:
        _refuse(file, name, value, "true or false")
    return value


def _refuse(file: str, name: str, value: Any, needed: str) -> NoReturn:
    shown = msgspec.json.encode(value).decode()[:80]
    raise ConfigError(f"{file}: {name} = {shown} is not supported; {needed} is needed")


class _TokenizerMembers(msgspec.Struct):
    added_tokens: Any = None
    padding: Any = None


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read the files of a directory. Raises ConfigError for one that is no JSON object."""
    file = folder / TOKENIZER_FILE
    members = _TokenizerMembers()
    try:
        members = msgspec.json.decode(file.read_bytes(), type=_TokenizerMembers)
    except FileNotFoundError:
        pass  # loading the tokenizer says so
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as err:
        raise ConfigError(f"{file} cannot be read: {err}") from err
    return TokenizerFiles(
        tokenizer={"added_tokens": members.added_tokens, "padding": members.padding},
        config=read_object(folder / CONFIG_FILE),
        special_tokens_map=read_object(folder / SPECIAL_TOKENS_MAP_FILE),
        added_tokens=read_object(folder / ADDED_TOKENS_FILE),
    )


def read_object(path: Path) -> dict[str, Any]:
    """A file's object, empty without the file. Raises ConfigError."""
    try:
        value = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as err:
        raise ConfigError(f"{path} cannot be read: {err}") from err
    if not isinstance(value, dict):
        raise ConfigError(f"{path} should hold a JSON object")
    return value
