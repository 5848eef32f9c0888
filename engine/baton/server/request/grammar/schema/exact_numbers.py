"""Numbers of a schema with the value that the client wrote, and the places at which a schema has
them.

JSON has one type of numbers, whose values count and not their forms (JSON Schema 2020-12 core,
4.2.2): 1.0 is 1. Values are integers and decimals here, never floats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeGuard

from baton.server.fields import bad, encode_exact
from baton.server.request.grammar.schema.number_regex import LARGEST, ExactNumber
from baton.server.request.grammar.schema.references import (
    SUBSCHEMA,
    SUBSCHEMA_LISTS,
    SUBSCHEMA_MAPS,
)

BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
DATA = frozenset(("const", "enum", "default", "examples", "example"))
"""Keywords whose values are no schemas."""
LEAST_COUNTS = frozenset(("minLength", "minItems", "minProperties", "minContains"))
MOST_COUNTS = frozenset(("maxLength", "maxItems", "maxProperties", "maxContains"))
MAX_COUNT = 2**31
"""No answer has as many parts: a limit from here on is none."""
MAX_DIGITS = 1100
"""The exact value of a double has fewer."""
LEAST_EXPONENT = -400
"""Smaller numbers are 0 as doubles."""
LARGEST_EXACT = 2**53
"""Integers up to here are exact as floats, and so are their shortest texts."""
MAX_DECIMAL = Decimal(10**15)
MAX_FACTOR = 7_000
"""Largest factor of multiples that llguidance computes: each remainder is visited, and from some
7,800 of them on one digit may take more work than `MATCHER_LIMITS` allow.
"""


def schema_json(value: Any) -> str:
    """JSON of a schema or of a part of it."""
    return encode_exact(value).decode()


def is_number(value: Any) -> TypeGuard[ExactNumber]:
    return isinstance(value, (int, Decimal)) and not isinstance(value, bool)


def exact_schema(value: Any, param: str) -> Any:
    """The schema with exact numbers, and with integers as counts. Raises BadRequest.

    Args:
        param: path of the schema, for numbers that JSON readers do not take.
    """
    if isinstance(value, list):
        return [exact_schema(part, f"{param}[{index}]") for index, part in enumerate(value)]
    if not isinstance(value, dict):
        return _exact_data(value, param)
    exact: dict[str, Any] = {}
    for key, part in value.items():
        place = f"{param}.{key}"
        if key in SUBSCHEMA_MAPS and isinstance(part, dict):
            exact[key] = {
                name: exact_schema(inner, f"{place}.{name}") for name, inner in part.items()
            }
        elif key in DATA:
            exact[key] = _exact_data(part, place)
        else:
            exact[key] = exact_schema(part, place)
    return _with_counts(exact)


def _exact_data(value: Any, param: str) -> Any:
    if isinstance(value, dict):
        return {key: _exact_data(part, f"{param}.{key}") for key, part in value.items()}
    if isinstance(value, list):
        return [_exact_data(part, f"{param}[{index}]") for index, part in enumerate(value)]
    if isinstance(value, float):
        value = Decimal(repr(value))
    if is_number(value):
        _check_number(value, param)
    return value


def _with_counts(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with counts as integers, without those that limit nothing."""
    for key in schema.keys() & (LEAST_COUNTS | MOST_COUNTS):
        count = schema[key]
        if isinstance(count, Decimal) and count == count.to_integral_value():
            schema[key] = int(count)
        if key in MOST_COUNTS and is_number(count) and Decimal(count) >= MAX_COUNT:
            del schema[key]
    return schema


def _check_number(value: ExactNumber, param: str) -> None:
    """Raise BadRequest for a number that a reader of doubles would not take."""
    exact = Decimal(value)
    if not exact.is_finite() or abs(exact) > LARGEST:
        raise bad(param, "is a number beyond 1.8e308, which most readers of JSON do not take")
    if exact and exact.adjusted() < LEAST_EXPONENT:
        raise bad(
            param, f"is a number below 1e{LEAST_EXPONENT}, which most readers of JSON take for 0"
        )
    if len(exact.as_tuple().digits) > MAX_DIGITS:
        raise bad(param, f"is a number with more than {MAX_DIGITS} digits; shorten it")


def schema_numbers(schema: Any, place: str = "") -> Iterator[tuple[str, str, ExactNumber]]:
    """Place, keyword and value of each number that a schema compares answers with."""
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        path = f"{place}.{key}"
        if key in SUBSCHEMA_MAPS and isinstance(value, dict):
            for name, inner in value.items():
                yield from schema_numbers(inner, f"{path}.{name}")
        elif key in SUBSCHEMA_LISTS and isinstance(value, list):
            for index, inner in enumerate(value):
                yield from schema_numbers(inner, f"{path}[{index}]")
        elif key in SUBSCHEMA:
            yield from schema_numbers(value, path)
        elif key in ("enum", "const"):
            yield from _numbers_in(value, key, path)
        elif (key in BOUNDS or key == "multipleOf") and is_number(value):
            yield path, key, value


def _numbers_in(value: Any, keyword: str, path: str) -> Iterator[tuple[str, str, ExactNumber]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers_in(inner, keyword, f"{path}.{name}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _numbers_in(inner, keyword, f"{path}[{index}]")
    elif is_number(value):
        yield path, keyword, value


def is_exact_for_llguidance(keyword: str, value: ExactNumber) -> bool:
    """True if llguidance, which reads numbers as floats, compares with the same value."""
    if keyword == "multipleOf":
        factor = llguidance_factor(value)
        return factor is not None and factor == abs(Fraction(value))
    exact = Decimal(value)
    if exact == int(exact):
        return abs(exact) <= LARGEST_EXACT
    return abs(exact) < MAX_DECIMAL and Decimal(repr(float(exact))) == exact


def llguidance_factor(value: ExactNumber) -> Fraction | None:
    """The number of which llguidance allows multiples for this `multipleOf`; None: it refuses
    it.
    """
    scaled = abs(float(value))
    places = 0
    while scaled % 1.0:
        scaled *= 10.0
        places += 1
    return Fraction(int(scaled), 10**places) if scaled <= MAX_FACTOR else None


def approximate_schema(schema: Any) -> Any:
    """The schema without comparisons that llguidance would make with other numbers.

    It stands for the schema where llguidance is asked what it makes of the other keywords.
    """
    if isinstance(schema, list):
        return [approximate_schema(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    listed = [
        *_numbers_in(schema.get("enum"), "enum", ""),
        *_numbers_in(schema.get("const"), "const", ""),
    ]
    compares = all(is_exact_for_llguidance(keyword, value) for _, keyword, value in listed)
    known: dict[str, Any] = {}
    for key, value in schema.items():
        if key in SUBSCHEMA_MAPS and isinstance(value, dict):
            known[key] = {name: approximate_schema(inner) for name, inner in value.items()}
        elif (key in SUBSCHEMA_LISTS and isinstance(value, list)) or key in SUBSCHEMA:
            known[key] = approximate_schema(value)
        elif key in ("enum", "const"):
            known[key] = _approximate_data(value)
        elif (
            (key not in BOUNDS and key != "multipleOf")
            or not is_number(value)
            or (compares and is_exact_for_llguidance(key, value))
        ):
            known[key] = value
    return known


def _approximate_data(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _approximate_data(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_approximate_data(inner) for inner in value]
    if not is_number(value) or is_exact_for_llguidance("const", value):
        return value
    return int(float(value)) if value == int(value) else Decimal(repr(float(value)))
