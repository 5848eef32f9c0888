"""Ranges of numbers that the keywords of a schema state, and multiples that llguidance computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from baton.server.fields import bad
from baton.server.request.grammar.schema.exact_numbers import (
    MAX_FACTOR,
    is_exact_for_llguidance,
    is_number,
    llguidance_factor,
)
from baton.server.request.grammar.schema.merging import UnwrittenSchema
from baton.server.request.grammar.schema.number_regex import (
    ExactNumber,
    NumberBound,
    NumberRange,
    grid_of,
)

FLOAT_BITS = 53
MULTIPLE_LIMITS = {"integer": 10**18, "number": 10**15}
"""Multiples that llguidance computes are at most as large: the limits are exact as floats, and fit
64 bits.
"""


def range_of(schema: Mapping[str, Any], kind: str, param: str) -> NumberRange:
    """Numbers that a type and its keywords allow. Raises BadRequest or UnwrittenSchema.

    Args:
        kind: integer or number.
        param: path of the schema.
    """
    least = _tighter(_bounds(schema, "minimum", "exclusiveMinimum"), max)
    largest = _tighter(_bounds(schema, "maximum", "exclusiveMaximum"), min)
    step = schema.get("multipleOf")
    if step is not None and (not is_number(step) or step == 0):
        raise bad(param, "has a multipleOf that is no number above 0")
    exact = None if step is None else abs(Fraction(step))
    return NumberRange(kind == "integer", least, largest, exact)


def multiples_schema(numbers: NumberRange, param: str) -> dict[str, Any]:
    """Schema of multiples that llguidance computes, with bounds that it reads exactly. Raises
    BadRequest.
    """
    step = grid_of(numbers)
    assert step is not None, "called for numbers with a multipleOf alone"
    places = 0
    while (step * 10**places).denominator != 1 and places < 30:
        places += 1
    factor = step * 10**places
    written = Decimal(f"{int(factor)}e-{places}") if factor.denominator == 1 else None
    if written is None or factor > MAX_FACTOR or llguidance_factor(written) != step:
        raise bad(param, f"has the multipleOf {float(step):g}, which cannot be enforced exactly")
    kind = "integer" if numbers.is_integer else "number"
    limit = MULTIPLE_LIMITS[kind]
    least = -Fraction(limit)
    largest = Fraction(limit)
    if numbers.least is not None:
        first = -(-Fraction(numbers.least.value) // step) * step
        is_excluded = numbers.least.is_excluded and first == Fraction(numbers.least.value)
        least = max(least, first + step if is_excluded else first)
    if numbers.largest is not None:
        last = Fraction(numbers.largest.value) // step * step
        is_excluded = numbers.largest.is_excluded and last == Fraction(numbers.largest.value)
        largest = min(largest, last - step if is_excluded else last)
    if least > largest:
        raise bad(
            param,
            f"has multiples of {float(step):g} beyond {limit}, which cannot be enforced",
        )
    low = _float_near(least, -1, step)
    high = _float_near(largest, 1, step)
    is_exact = is_exact_for_llguidance("minimum", low) and is_exact_for_llguidance("maximum", high)
    if not numbers.is_integer and not is_exact:
        raise bad(
            param,
            f"has multiples of {float(step):g} within bounds that cannot be enforced exactly",
        )
    return {"type": kind, "minimum": low, "maximum": high, "multipleOf": written}


def _bounds(schema: Mapping[str, Any], keyword: str, excluding: str) -> list[NumberBound]:
    """Bounds on one side; draft 4 has a boolean beside the bound."""
    bound = schema.get(keyword)
    excluded = schema.get(excluding)
    found = []
    if bound is not None:
        if not is_number(bound):
            raise UnwrittenSchema
        found.append(NumberBound(bound, excluded is True))
    if excluded is not None and not isinstance(excluded, bool):
        if not is_number(excluded):
            raise UnwrittenSchema
        found.append(NumberBound(excluded, True))
    return found


def _tighter(
    bounds: Sequence[NumberBound], choose: Callable[[Iterable[ExactNumber]], ExactNumber]
) -> NumberBound | None:
    """The bound that counts of several on one side. `choose`: max or min."""
    if not bounds:
        return None
    value = choose(bound.value for bound in bounds)
    is_excluded = any(bound.is_excluded for bound in bounds if bound.value == value)
    return NumberBound(value, is_excluded)


def _float_near(value: Fraction, sign: int, step: Fraction) -> ExactNumber:
    """A float with the multiples of `step` up to `value` on one side of it: -1: below `value`, 1:
    above it.
    """
    if value.denominator != 1:
        return _decimal(value)
    whole = int(value)
    spacing = 2 ** max(0, whole.bit_length() - FLOAT_BITS)
    near = whole - whole % spacing if sign < 0 else whole + -whole % spacing
    return near if abs(near - whole) < step else whole


def _decimal(value: Fraction) -> ExactNumber:
    """A decimal fraction as an exact number."""
    if value.denominator == 1:
        return int(value)
    places = 0
    while (value * 10**places).denominator != 1:
        places += 1
    return Decimal(f"{int(value * 10**places)}e-{places}")
