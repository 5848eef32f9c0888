"""The form of each module of a quantized checkpoint, and the modules that it excludes. No torch
here."""

from __future__ import annotations

import re
from typing import Protocol

from baton.models.config_file import ModelConfig
from baton.models.quantized.forms import MatrixForm


class QuantizationScheme(Protocol):
    """`quantization_config` of config.json, read by one of `methods`."""

    @property
    def method(self) -> str:
        """`quant_method`."""

    def form_of(self, module: str) -> MatrixForm | None:
        """The form that config.json states for a linear module; None: it is no target."""

    def find_exclusion(self, module: str, *, loosely: bool = False) -> str | None:
        """The entry that excludes a module, as a clause of a sentence; None: no entry does.

        Writers of checkpoints match their lists in different ways. `loosely` also takes entries
        that are found anywhere in the name, which excuses a plain matrix, and accuses no quantized
        one.
        """


class Exclusions:
    """A list of excluded modules, matched as transformers does: an entry is a regular expression
    that matches the start of the name up to a dot, or the end of the name."""

    __slots__ = ("_entries", "_field")

    def __init__(self, config: ModelConfig, field: str) -> None:
        """Args: `config`: the object that has the list."""
        self._field = field
        self._entries: list[tuple[str, re.Pattern[str]]] = []
        for entry in config.read_names(field, []):
            try:
                self._entries.append((entry, re.compile(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))")))
            except re.error as err:
                config.refuse(field, entry, f"a regular expression is needed ({err})")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exclusions) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[str, ...]:
        return (self._field, *(entry for entry, _ in self._entries))

    def find(self, module: str, *, loosely: bool) -> str | None:
        for entry, pattern in self._entries:
            is_named = pattern.match(module) or module.endswith(entry)
            if is_named or (loosely and entry in module):
                return f'{self._field} lists "{entry}"'
        return None
