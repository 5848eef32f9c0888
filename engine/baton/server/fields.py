"""Conversion of a JSON object to a msgspec Struct (request/schema.py), with errors in sentences for
the client.

JSON null means absent, as in OpenAI's API. Errors are BadRequest with `param`, e.g.
`sampling_params.top_p`.

Bodies are decoded with exact numbers: one with a point or an exponent is a `Decimal` where no field
gives its type, so that schemas reach the grammar with the client's digits.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any, TypeVar

import msgspec

from baton.errors import BadRequest, MissingField

Schema = TypeVar("Schema", bound=msgspec.Struct)
Given = TypeVar("Given")

KINDS = {
    "int": "an integer", "float": "a number", "decimal": "a number", "bool": "a boolean",
    "str": "a string",
    "array": "an array", "object": "an object",
}  # fmt: skip
"""Types as msgspec's messages name them, and as ours do."""
ERROR = re.compile(r"(?P<problem>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
"""A message of msgspec: the problem, and the path of the field, `stop[0]` or `prefill[2].port`."""
MISMATCH = re.compile(r"Expected `(?P<wanted>[^`]*)`, got `(?P<kind>\w+)`")
TAKES_INTEGER = re.compile(r"Expected `[^`]*\bint\b")
BOUND = re.compile(r"Expected `\w+` (?P<sign>[<>=]+) (?P<limit>\S+)")
BOUNDS = {">=": "at least", ">": "above", "<=": "at most"}
MAX_WHOLE = 10**30
"""Numbers from here on are no integers that a field takes."""
LENGTH = re.compile(r"Expected `(?P<kind>\w+)` of length <= (?P<most>\d+)")


def exact_decimal(text: str) -> Decimal:
    """The value of a JSON number with a point or an exponent. Raises ValueError."""
    try:
        return Decimal(text)
    except InvalidOperation:
        raise ValueError(f"the number {text[:40]} is out of range") from None


decode_exact = msgspec.json.Decoder(float_hook=exact_decimal).decode
encode_exact = msgspec.json.Encoder(decimal_format="number").encode


def bad(name: str, text: str) -> BadRequest:
    return BadRequest(f"{name} {text}", param=name)


def first(fields: msgspec.Struct, *names: str) -> tuple[str, Any]:
    """Name and value of the first of several names for one thing that is present; else the first
    name and None.
    """
    present = ((name, value) for name in names if (value := getattr(fields, name)) is not None)
    return next(present, (names[0], None))


def value_or(value: Given | None, default: Given) -> Given:
    return default if value is None else value


def integers(name: str, value: Any, most: int, low: int, high: int) -> tuple[int, ...]:
    """An integer or an array of at most `most`, each from `low` to `high`."""
    values = [] if value is None else value if type(value) is list else [value]
    if len(values) > most:
        raise bad(name, f"has {len(values)} entries, at most {most} are accepted")
    if not all(type(v) is int and low <= v <= high for v in values):
        raise bad(name, f"must be an array of integers from {low} to {high}")
    return tuple(values)


def read(schema: type[Schema], body: Any, prefix: str = "") -> Schema:
    """`body` as a `schema`; fields that it does not name are left out.

    Raises BadRequest or MissingField for the first field of a wrong type or out of its bounds.
    `prefix` stands before its name. An integer may be written as 16.0: JSON has one type of
    numbers, and some clients send it so.
    """
    while True:
        try:
            return msgspec.convert(body, schema)
        except msgspec.ValidationError as err:
            error = str(err)
        found = ERROR.fullmatch(error)
        assert found is not None
        path = found["path"] or ""
        problem = found["problem"]
        value = _at(body, path)
        if TAKES_INTEGER.match(problem) and _is_whole(value) and path in body:
            body = {**body, path: int(value)}
            continue
        raise _refusal(prefix + path, problem, value)


def _is_whole(value: Any) -> bool:
    if not isinstance(value, (float, Decimal)):
        return False
    return abs(float(value)) < MAX_WHOLE and value == int(value)


def _at(body: Any, path: str) -> Any:
    for part in re.findall(r"[^.\[\]]+", path):
        body = (
            body[int(part)]
            if isinstance(body, list)
            else body.get(part)
            if isinstance(body, dict)
            else None
        )
    return body


def _refusal(name: str, problem: str, value: Any) -> BadRequest:
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", problem):
        name = f"{name.removesuffix('.')}.{missing[1]}".removeprefix(".")
        return MissingField(f"{name} is required", param=name)
    param = re.sub(r"\[\d+\]$", "", name)  # of one entry of an array: the array
    if mismatch := MISMATCH.fullmatch(problem):
        wanted = " or ".join(
            KINDS[kind] for kind in mismatch["wanted"].split(" | ") if kind in KINDS
        )
        return BadRequest(
            f"{name} must be {wanted}, got {KINDS.get(mismatch['kind'], 'null')}", param=param
        )
    if length := LENGTH.fullmatch(problem):
        what = "characters" if length["kind"] == "str" else "entries"
        return BadRequest(
            f"{name} has {len(value)} {what}, at most {length['most']} are accepted", param=param
        )
    if bound := BOUND.fullmatch(problem):
        limit = f"{BOUNDS[bound['sign']]} {bound['limit'].removesuffix('.0')}"
        return BadRequest(f"{name} is {shown(value)}, must be {limit}", param=param)
    text = "is too large" if problem == "Number out of range" else "must not be empty"
    return BadRequest(f"{name} {text}", param=param)


def shown(value: float | Decimal) -> str:
    """A number in a message; JSON integers may have thousands of digits."""
    return (
        f"{float(value):g}"
        if isinstance(value, (float, Decimal))
        else str(value)
        if abs(value) < 10**20
        else "too large"
    )
