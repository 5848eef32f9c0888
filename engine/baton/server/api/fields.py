"""Reading a JSON object field by field: types, ranges, and which names are unknown.

Every getter marks its name as known, so what is left at the end is truly unknown. JSON null means absent, as in
OpenAI's API. Errors are BadRequest with `param`, e.g. `sampling_params.top_p`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from baton.errors import BadRequest, MissingField

INT64_MAX = 2**63 - 1
LARGEST = 1e30
"""Above any sensible number, and far from overflow in what is computed with it."""


def _kind(value: Any) -> str:
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return names.get(type(value), "null")


def _shown(value: float) -> str:
    """A number in a message; JSON integers may have thousands of digits."""
    return f"{value:g}" if isinstance(value, float) else str(value) if abs(value) < 10**20 else "too large"


class JsonObjectReader:
    """A view of one JSON object of the request."""

    def __init__(self, body: dict[str, Any], prefix: str = "") -> None:
        self._body = body
        self._prefix = prefix
        self._known: set[str] = set()

    def name(self, field: str) -> str:
        return self._prefix + field

    def bad(self, field: str, text: str) -> BadRequest:
        return BadRequest(f"{self.name(field)} {text}", param=self.name(field))

    def _wrong(self, field: str, wanted: str, value: Any) -> BadRequest:
        return self.bad(field, f"must be {wanted}, got {_kind(value)}")

    def get(self, field: str) -> Any:
        """The raw value; None when absent or null."""
        self._known.add(field)
        return self._body.get(field)

    def first(self, *fields: str) -> str:
        """Return of several names for one thing the first that is present (all become known); else the first name."""
        self._known.update(fields)
        return next((f for f in fields if self._body.get(f) is not None), fields[0])

    def require(self, field: str) -> Any:
        value = self.get(field)
        if value is None:
            raise MissingField(f"{self.name(field)} is required", param=self.name(field))
        return value

    def integer(self, field: str, default: int | None, low: int, high: int = INT64_MAX) -> int | None:
        value = self.get(field)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # JSON has one number type; some clients send 16.0
        if type(value) is not int:
            raise self._wrong(field, "an integer", value)
        if not low <= value <= high:
            limit = f"at least {low}" if high == INT64_MAX and value < low else f"from {low} to {high}"
            raise self.bad(field, f"is {_shown(value)}, must be {limit}")
        return value

    def number(self, field: str, default: float, low: float, high: float, *, above_low: bool = False) -> float:
        value = self.get(field)
        if value is None:
            return default
        if type(value) not in (int, float):
            raise self._wrong(field, "a number", value)
        if not (low <= value <= min(high, LARGEST)) or (above_low and value == low):
            limit = f"above {low:g}" if above_low else f"at least {low:g}"
            raise self.bad(field, f"is {_shown(value)}, must be {limit} and at most {min(high, LARGEST):g}")
        return float(value)

    def boolean(self, field: str, default: bool) -> bool:
        value = self.get(field)
        if value is None:
            return default
        if type(value) is not bool:
            raise self._wrong(field, "a boolean", value)
        return value

    def string(self, field: str, default: str | None = None, max_chars: int = 4096) -> str | None:
        value = self.get(field)
        if value is None:
            return default
        if type(value) is not str:
            raise self._wrong(field, "a string", value)
        if len(value) > max_chars:
            raise self.bad(field, f"has {len(value)} characters, at most {max_chars} are accepted")
        return value

    def object(self, field: str) -> dict[str, Any]:
        value = self.get(field)
        if value is None:
            return {}
        if type(value) is not dict:
            raise self._wrong(field, "an object", value)
        return value

    def strings(self, field: str, most: int) -> tuple[str, ...]:
        """A string or an array of at most `most` non-empty strings."""
        value = self.get(field)
        if value is None:
            return ()
        values = [value] if isinstance(value, str) else value
        if type(values) is not list or not all(type(v) is str for v in values):
            raise self.bad(field, "must be a string or an array of strings")
        if len(values) > most:
            raise self.bad(field, f"has {len(values)} entries, at most {most} are accepted")
        if not all(values):
            raise self.bad(field, "must not contain an empty string")
        return tuple(values)

    def integers(self, field: str, most: int, low: int, high: int) -> tuple[int, ...]:
        value = self.get(field)
        if value is None:
            return ()
        values = value if type(value) is list else [value]
        if len(values) > most:
            raise self.bad(field, f"has {len(values)} entries, at most {most} are accepted")
        if not all(type(v) is int and low <= v <= high for v in values):
            raise self.bad(field, f"must be an array of integers from {low} to {high}")
        return tuple(values)

    def ignore(self, fields: Iterable[str]) -> None:
        """Names we know and that have no effect here."""
        self._known.update(fields)

    def unknown(self) -> list[str]:
        return [k for k in self._body if k not in self._known]
