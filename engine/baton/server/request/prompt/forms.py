"""The ways in which a body states its prompts: a text, token ids, or a list of either."""

from __future__ import annotations

from typing import Any

from baton.errors import MissingField
from baton.server.fields import bad


def require_value(name: str, value: Any) -> Any:
    if value is None:
        raise MissingField(f"{name} is required", param=name)
    return value


def is_batch(value: Any) -> bool:
    """Several prompts, or a list of one: anything but a text or an array of token ids."""
    return type(value) is list and len(value) > 0 and type(value[0]) is not int


def prompt_list(name: str, value: Any) -> list[Any]:
    """The four forms of a prompt as a list of texts or of id lists."""
    value = require_value(name, value)
    if type(value) is str or (type(value) is list and value and type(value[0]) is int):
        value = [value]
    if type(value) is not list or not all(type(v) in (str, list) for v in value):
        raise bad(
            name,
            "must be a string, an array of strings, an array of token ids, or an array of such "
            "arrays",
        )
    if not value or any(len(v) == 0 for v in value):
        raise bad(name, "is empty; give at least one token")
    return value
