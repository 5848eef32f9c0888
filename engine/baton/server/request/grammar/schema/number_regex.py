"""Regexes of JSON numbers within exact bounds, and the texts of single numbers.

llguidance reads the numbers of a schema as floats, and its own regexes of numbers have no end:
`1e999` and 400 digits are infinity to most readers of JSON. These regexes compare digits, and every
number that they match is finite as an IEEE double:

* without an exponent a number has up to `MAX_WHOLE_DIGITS` digits before its point, and up to
  `MAX_FRACTION_DIGITS` behind it, more where a bound has more;
* with an exponent it has up to `MAX_MANTISSA_DIGITS` before its point and an exponent of two
  digits, or one digit and an exponent up to 308. Numbers that are compared with a bound other than
  0 are written without.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import TypeAlias

ExactNumber: TypeAlias = int | Decimal

MAX_WHOLE_DIGITS = 80
"""2**256 has 78 digits."""
MAX_FRACTION_DIGITS = 40
"""A double has 17 significant ones, a decimal of 128 bits 34."""
MAX_MANTISSA_DIGITS = 20
MOST_WHOLE_DIGITS = 308
"""All integers with as many digits are finite as doubles."""
LARGEST = Decimal(sys.float_info.max)
MAX_ENDINGS = 1000
"""Most endings of multiples that are listed."""

WHOLE = rf"(0|[1-9][0-9]{{0,{MAX_WHOLE_DIGITS - 1}}})"
FRACTION = rf"(\.[0-9]{{1,{MAX_FRACTION_DIGITS}}})"
_MANTISSA = rf"(0|[1-9][0-9]{{0,{MAX_MANTISSA_DIGITS - 1}}}){FRACTION}?"
_LARGE_EXPONENT = "([12][0-9]{2}|30[0-7])"
_LARGEST_MANTISSAS = rf"1(\.[0-6][0-9]{{0,{MAX_FRACTION_DIGITS - 1}}}|\.7976931348623157)?"
SCIENTIFIC = (
    rf"({_MANTISSA}[eE][+-]?[0-9]{{1,2}}|[1-9]{FRACTION}?[eE][+-]?{_LARGE_EXPONENT}"
    rf"|{_LARGEST_MANTISSAS}[eE]\+?308)"
)
ANY_NATURAL = rf"({WHOLE}{FRACTION}?|{SCIENTIFIC})"
"""A number without a sign."""
ANY_NUMBER = f"-?{ANY_NATURAL}"
ANY_INTEGER = f"-?{WHOLE}"


@dataclass(frozen=True, slots=True)
class NumberBound:
    """The least or the largest number of a range."""

    value: ExactNumber
    is_excluded: bool = False


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Numbers that a schema allows."""

    is_integer: bool = False
    least: NumberBound | None = None
    largest: NumberBound | None = None
    step: Fraction | None = None
    """Each number is a multiple of it."""

    def holds(self, value: ExactNumber) -> bool:
        exact = Fraction(value)
        if self.is_integer and exact.denominator != 1:
            return False
        if self.step is not None and (exact / self.step).denominator != 1:
            return False
        return _is_within(exact, self.least, 1) and _is_within(exact, self.largest, -1)


def _is_within(value: Fraction, bound: NumberBound | None, sign: int) -> bool:
    if bound is None:
        return True
    distance = sign * (value - Fraction(bound.value))
    return distance > 0 or (distance == 0 and not bound.is_excluded)


def has_number(numbers: NumberRange) -> bool:
    """True if some number is in the range."""
    grid = grid_of(numbers)
    if numbers.least is None or numbers.largest is None:
        return True
    least = Fraction(numbers.least.value)
    largest = Fraction(numbers.largest.value)
    if grid is None:
        is_open = numbers.least.is_excluded or numbers.largest.is_excluded
        return least < largest or (least == largest and not is_open)
    first = -(-least // grid)
    if numbers.least.is_excluded and first * grid == least:
        first += 1
    last = largest // grid
    if numbers.largest.is_excluded and last * grid == largest:
        last -= 1
    return first <= last


def grid_of(numbers: NumberRange) -> Fraction | None:
    """The number of which all numbers of the range are multiples; None: there is none."""
    if not numbers.is_integer:
        return numbers.step
    if numbers.step is None:
        return Fraction(1)
    return lcm_of(numbers.step, Fraction(1))


def lcm_of(left: Fraction, right: Fraction) -> Fraction:
    """The least common multiple of two numbers above 0."""
    common = left.denominator * right.denominator
    a = left.numerator * right.denominator
    b = right.numerator * left.denominator
    return Fraction(math.lcm(a, b), common)


def range_regexes(numbers: NumberRange) -> list[str] | None:
    """Regexes, all of which the text of a number of the range matches; None: its multiples have too
    many endings.

    The range has numbers.
    """
    is_free = numbers.least is None and numbers.largest is None
    any_text = ANY_INTEGER if numbers.is_integer else ANY_NUMBER
    regexes = [any_text] if is_free else []
    if numbers.least is not None:
        regexes.append(_at_least(numbers.least, is_integer=numbers.is_integer))
    if numbers.largest is not None:
        regexes.append(_at_most(numbers.largest, is_integer=numbers.is_integer))
    if numbers.step is not None:
        grid = grid_of(numbers)
        endings = None if grid is None else multiples_regex(grid)
        if endings is None:
            return None
        regexes.append(endings)
    return regexes


# ---------------------------------------------------------------------- comparisons


def _at_least(bound: NumberBound, *, is_integer: bool) -> str:
    value = bound.value
    if value < 0:
        negative = _natural_at_most(-value, bound.is_excluded, is_integer)
        return f"({_any_natural(is_integer)}|-{negative})"
    if value == 0 and not bound.is_excluded:
        return _any_natural(is_integer)
    return _natural_at_least(value, bound.is_excluded, is_integer)


def _at_most(bound: NumberBound, *, is_integer: bool) -> str:
    value = bound.value
    if value < 0:
        return f"-{_natural_at_least(-value, bound.is_excluded, is_integer)}"
    if value == 0 and bound.is_excluded:
        return f"-{_natural_at_least(0, True, is_integer)}"
    return f"(-{_any_natural(is_integer)}|{_natural_at_most(value, bound.is_excluded, is_integer)})"


def _any_natural(is_integer: bool) -> str:
    return WHOLE if is_integer else ANY_NATURAL


def _natural_at_least(value: ExactNumber, is_excluded: bool, is_integer: bool) -> str:
    """Texts without a sign of numbers that are at least `value`, or above it."""
    whole, fraction = _digits_of(value)
    most_digits = min(MOST_WHOLE_DIGITS, max(MAX_WHOLE_DIGITS, len(whole) + 1))
    larger = [*_larger_texts(whole), *_longer_texts(whole, most_digits)]
    if is_integer:
        if not is_excluded and not fraction:
            larger.append(whole)
        return _either(larger)
    options = [f"{_either(larger)}{FRACTION}?"] if larger else []
    options.append(f"{whole}{_fraction_at_least(fraction, is_excluded)}")
    if value == 0:
        options.append(_positive_scientific())
    return _either(options)


def _positive_scientific() -> str:
    some = (
        rf"([1-9][0-9]{{0,{MAX_MANTISSA_DIGITS - 1}}}{FRACTION}?|0{_fraction_at_least('', True)})"
    )
    return (
        rf"({some}[eE][+-]?[0-9]{{1,2}}|[1-9]{FRACTION}?[eE][+-]?{_LARGE_EXPONENT}"
        rf"|{_LARGEST_MANTISSAS}[eE]\+?308)"
    )


def _natural_at_most(value: ExactNumber, is_excluded: bool, is_integer: bool) -> str:
    """Texts without a sign of numbers that are at most `value`, or below it."""
    whole, fraction = _digits_of(value)
    smaller = [*_smaller_texts(whole), *_shorter_texts(whole)]
    if is_integer:
        if fraction or not is_excluded:
            smaller.append(whole)
        return _either(smaller)
    options = [f"{_either(smaller)}{FRACTION}?"] if smaller else []
    ends = _fraction_at_most(fraction, is_excluded)
    if ends is not None:
        options.append(f"{whole}{ends}")
    return _either(options)


def _digits_of(value: ExactNumber) -> tuple[str, str]:
    """Digits before and behind the point, the latter without zeros at their end."""
    whole, _, fraction = format(abs(Decimal(value)), "f").partition(".")
    return whole.lstrip("0") or "0", fraction.rstrip("0")


def _larger_texts(digits: str) -> Iterator[str]:
    """Regexes of the larger integers with as many digits."""
    for place, digit in enumerate(digits):
        if digit < "9":
            rest = len(digits) - place - 1
            yield f"{digits[:place]}{_digit_class(int(digit) + 1, 9)}{_some_digits(rest, rest)}"


def _smaller_texts(digits: str) -> Iterator[str]:
    """Regexes of the smaller integers with as many digits."""
    for place, digit in enumerate(digits):
        lowest = 1 if place == 0 and len(digits) > 1 else 0
        if int(digit) > lowest:
            rest = len(digits) - place - 1
            yield f"{digits[:place]}{_digit_class(lowest, int(digit) - 1)}{_some_digits(rest, rest)}"


def _longer_texts(digits: str, most: int) -> Iterator[str]:
    if len(digits) < most:
        yield f"[1-9]{_some_digits(len(digits), most - 1)}"


def _shorter_texts(digits: str) -> Iterator[str]:
    if len(digits) > 1:
        yield "0"
        yield f"[1-9]{_some_digits(0, len(digits) - 2)}"


def _fraction_at_least(digits: str, is_excluded: bool) -> str:
    """A point and the digits behind it, or nothing where the number may be a whole one."""
    if not digits and not is_excluded:
        return f"{FRACTION}?"
    rest = _some_digits(0, MAX_FRACTION_DIGITS)
    options = [
        f"{digits[:place]}{_digit_class(int(digit) + 1, 9)}{rest}"
        for place, digit in enumerate(digits)
        if digit < "9"
    ]
    if is_excluded:
        options.append(f"{digits}0{{0,{MAX_FRACTION_DIGITS}}}[1-9]{rest}")
    else:
        options.append(f"{digits}{rest}")
    return rf"\.{_either(options)}"


def _fraction_at_most(digits: str, is_excluded: bool) -> str | None:
    """As `_fraction_at_least`; None: there is no such number."""
    if not digits:
        return None if is_excluded else rf"(\.0{{1,{MAX_FRACTION_DIGITS}}})?"
    options = [
        f"{digits[:place]}{_digit_class(0, int(digit) - 1)}{_some_digits(0, MAX_FRACTION_DIGITS)}"
        for place, digit in enumerate(digits)
        if digit > "0"
    ]
    options += [digits[:length] for length in range(1, len(digits))]
    if not is_excluded:
        options.append(f"{digits}0{{0,{MAX_FRACTION_DIGITS}}}")
    return rf"(\.{_either(options)})?"


def _digit_class(low: int, high: int) -> str:
    return str(low) if low == high else f"[{low}-{high}]"


def _some_digits(least: int, most: int) -> str:
    if most == 0:
        return ""
    return f"[0-9]{{{least}}}" if least == most else f"[0-9]{{{least},{most}}}"


def _either(options: Sequence[str]) -> str:
    return options[0] if len(options) == 1 else f"({'|'.join(options)})"


# ---------------------------------------------------------------------- multiples


def multiples_regex(step: Fraction) -> str | None:
    """Texts without an exponent of the multiples of `step`; None: they have no listed endings."""
    places = _decimal_places(step)
    if places is None:
        return None
    factor = int(step * 10**places)
    ending_length = _ending_length(factor)
    if ending_length is None:
        return None
    endings = range(0, 10**ending_length, factor)
    texts = [str(ending).zfill(ending_length) if ending_length else "" for ending in endings]
    return f"-?{_either([_ending_regex(text, places) for text in texts])}"


def _decimal_places(step: Fraction) -> int | None:
    """Digits behind the point of a decimal number."""
    places = 0
    scaled = step
    while scaled.denominator != 1:
        scaled *= 10
        places += 1
        if places > MAX_FRACTION_DIGITS:
            return None
    return places


def _ending_length(factor: int) -> int | None:
    """Number of the last digits that decide whether an integer is a multiple; None: all digits
    decide.
    """
    for length in range(MAX_WHOLE_DIGITS):
        if 10**length % factor == 0:
            return length if 10**length // factor <= MAX_ENDINGS else None
    return None


def _ending_regex(ending: str, places: int) -> str:
    """Texts of numbers whose digits, `places` of them behind the point, end with `ending`."""
    in_fraction = ending[len(ending) - places :] if places and len(ending) > places else ending
    if not places:
        in_fraction = ""
    in_whole = ending[: len(ending) - len(in_fraction)]
    free = places - len(in_fraction)
    stated = in_fraction.rstrip("0")
    zeros = f"0{{0,{MAX_FRACTION_DIGITS}}}"
    more = _some_digits(0, MOST_WHOLE_DIGITS)  # the regexes of the bounds limit them
    if stated:
        fraction = rf"\.{_some_digits(free, free)}{stated}{zeros}"
    elif free:
        fraction = rf"(\.{_some_digits(1, free)}{zeros})?"
    else:
        fraction = rf"(\.0{{1,{MAX_FRACTION_DIGITS}}})?"
    if not in_whole:
        return f"(0|[1-9]{more}){fraction}"
    larger = f"[1-9]{more}{in_whole}"
    return f"({larger}|{int(in_whole)}){fraction}"


# ---------------------------------------------------------------------- single numbers


def number_texts(value: ExactNumber) -> tuple[str, ...]:
    """Texts of one number: without an exponent where that is short, and as the schema writes it."""
    exact = Decimal(value)
    if exact == 0:
        return ("0",) if exact.as_tuple().exponent == 0 else ("0", "0.0")
    plain = format(exact, "f")
    if "." in plain:
        plain = plain.rstrip("0").rstrip(".")
    digits = plain.lstrip("-").replace(".", "").strip("0")
    scientific = f"{'-' if exact < 0 else ''}{_scientific_text(digits, exact.adjusted())}"
    is_short = len(plain) <= MAX_WHOLE_DIGITS + MAX_FRACTION_DIGITS
    texts = [plain] if isinstance(value, int) or is_short else [scientific]
    if isinstance(value, Decimal):
        texts.append(str(value))
    return tuple(dict.fromkeys(texts))


def _scientific_text(digits: str, exponent: int) -> str:
    point = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{digits[0]}{point}e{exponent}"
