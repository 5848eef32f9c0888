"""Steps from flags, or field values, to a checked `EngineConfig`."""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Sequence
from typing import Any

from baton.config import simulated
from baton.config.engine import CUDA_DEFAULTS, EngineConfig
from baton.config.flags import FlagMistake, FlagParser, add_flags, base_type, flag_name, reader, refuse
from baton.config.rules import mistakes
from baton.errors import ConfigError


def build(values: dict[str, Any]) -> EngineConfig:
    """Make a checked config from field values. Raises ConfigError that lists every violation."""
    bad: list[str] = []
    if values.get("device") == "cuda":
        values = {**CUDA_DEFAULTS, **values}
    if values.get("simulate") is not None:
        try:
            values = {**simulated.defaults(values["simulate"]), **values}
        except ConfigError as err:
            bad.append(err.message)
    hints = typing.get_type_hints(EngineConfig)
    for f in dataclasses.fields(EngineConfig):
        env = f.metadata["env"]
        if env and f.name not in values and os.environ.get(env):
            value = reader(flag_name(f.name), base_type(hints[f.name]), f.metadata["choices"])(os.environ[env])
            if isinstance(value, FlagMistake):
                bad.append(f"environment {env}: {value.text}")
            else:
                values[f.name] = value
    config = EngineConfig(**values)
    if bad := [*bad, *mistakes(config)]:
        raise ConfigError("\n".join(bad))
    return config


def parse(argv: Sequence[str], prog: str = "baton engine") -> EngineConfig:
    """Turn flags into a config; prints every mistake and exits with 2 when there is one."""
    parser = FlagParser(prog, "One Baton engine: prefill node, decode node, or both in one.")
    add_flags(parser, EngineConfig)
    values, bad = parser.read(argv)
    try:
        config = build(values)
    except ConfigError as err:
        bad.append(err.message)
    if bad:
        refuse(prog, bad)
    return config
