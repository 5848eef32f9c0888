"""Steps from flags, or field values, to a checked `EngineConfig`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from baton.config import simulated
from baton.config.engine import CUDA_DEFAULTS, EngineConfig
from baton.config.flags import FlagParser, add_environment, add_flags, exit_with_mistakes
from baton.config.rules import find_mistakes
from baton.errors import ConfigError


def build_config(values: dict[str, Any]) -> EngineConfig:
    """Make a checked config from field values. Raises ConfigError that lists every violation."""
    bad: list[str] = []
    if values.get("device") == "cuda":
        values = {**CUDA_DEFAULTS, **values}
    if values.get("simulate") is not None:
        try:
            values = {**simulated.flag_defaults(values["simulate"]), **values}
        except ConfigError as err:
            bad.append(err.message)
    bad += add_environment(EngineConfig, values)
    config = EngineConfig(**values)
    if bad := [*bad, *find_mistakes(config)]:
        raise ConfigError("\n".join(bad))
    return config


def make_parser(prog: str = "baton engine") -> FlagParser:
    parser = FlagParser(
        prog,
        "One Baton engine: prefill node, decode node, or both in one.",
        essentials=EngineConfig.ESSENTIALS,
        word_remedy="give the model as --model-path {word}",
    )
    add_flags(parser, EngineConfig)
    return parser


def parse_config(
    argv: Sequence[str],
    prog: str = "baton engine",
    find_others: Callable[[dict[str, Any]], Iterable[str]] = lambda values: (),
) -> EngineConfig:
    """Turn flags into a config; prints every mistake and exits with 2 when there is one.

    Args:
        find_others: mistakes that only the caller can see, such as those of files; asked when there
            are others.
    """
    values, bad = make_parser(prog).read(argv)
    try:
        config = build_config(values)
    except ConfigError as err:
        bad.append(err.message)
    if bad:
        exit_with_mistakes(prog, [*bad, *find_others(values)])
    return config
