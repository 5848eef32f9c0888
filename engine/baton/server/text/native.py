"""Calls of the text layer, `engine/text` in Rust, through the native extension.

Its refusals become the engine's typed errors here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import ParamSpec, TypeVar

from baton.errors import ConfigError, by_code

P = ParamSpec("P")
T = TypeVar("T")


def native_extension() -> ModuleType:
    """`baton._native`. Raises ConfigError without it."""
    try:
        return import_module("baton._native")
    except ImportError as err:
        raise ConfigError(
            f"an engine needs the native extension ({err}); build it with maturin"
        ) from err


def call_or_refuse(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function of the text layer. Raises the EngineError that its refusal names."""
    try:
        return function(*args, **kwargs)
    except native_extension().TextRefusal as err:
        code, message, param = err.args
        raise by_code(code)(message, param=param) from None


def load_or_refuse(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that reads files. Raises ConfigError with its sentence about one of them."""
    try:
        return function(*args, **kwargs)
    except ValueError as err:
        raise ConfigError(str(err)) from err
