"""Random JSON Schemas whose answers end soon, whatever a model with random weights draws."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("a", "b", "name", "x y", "é", 'q"', "$ref2")

ROOT_DEPTH = 2


def random_schema(rng: random.Random, depth: int = ROOT_DEPTH) -> dict[str, Any]:
    kinds = [_string, _integer, _number, _enum, _const, _boolean_or_null, _pattern]
    if depth:
        kinds += [_object, _object, _array, _any_of]
    if depth == ROOT_DEPTH:
        kinds.append(_reference)
    return rng.choice(kinds)(rng, depth)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 4)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    schema = {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 2000)}
    if rng.random() < 0.2:
        schema["multipleOf"] = 1
    return schema


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": [rng.randint(-5, 5) / 4, rng.randint(0, 9)]}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample([1, "one", None, True, [1, 2], {"k": "v"}, 'ö\n"', -2.5], 3)}


def _const(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice(["fixed", 7, False, {"deep": [1]}])}


def _boolean_or_null(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": ["boolean", "null"]}


def _pattern(rng: random.Random, depth: int) -> dict[str, Any]:
    return {
        "type": "string",
        "pattern": rng.choice([r"^[a-f0-9]{4}$", r"^(yes|no)$", r"^\d{3}-\d{2}$", r"^é?[A-Z]$"]),
    }


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {
        "type": "array",
        "items": random_schema(rng, depth - 1),
        "minItems": least,
        "maxItems": least + rng.randint(0, 2),
    }


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def _reference(rng: random.Random, depth: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"first": {"$ref": "#/$defs/part"}, "second": {"$ref": "#/$defs/part"}},
        "required": ["first"],
        "additionalProperties": False,
        "$defs": {"part": random_schema(rng, 0)},
    }
