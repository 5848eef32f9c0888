"""Random JSON Schemas in which parts have no value: names that run out, optional parts that nothing satisfies, lengths
and patterns that exclude each other, references that never end.
"""

from __future__ import annotations

import random
from typing import Any

from tests.support.grammars.random_schemas import random_schema

NAMES = ("score", "low", "high", "a", "b", "x y", "é", 'q"', "\\", "")
PATTERNS = (
    "^score$", "^(low|high)$", "^(?:a|b)$", "^[ab]$", "^[a-z]{1,2}$", "^x", "y$", "(?:)", ".*", "^.*$", "^[^a]", "^$",
    "^(low|high|score)$", "^a{0,3}$", "é", "^\\w+$", "^[\\s\\S]*$", "^(?!a)", "^\\d$", "^[\"\\\\]$",
)  # fmt: skip
TEXT_PATTERNS = (
    "^a+$", "b", "^[a-z]{3}$", "^(yes|no)$", "^.{0,2}$", "^\\d{2,4}$", "^$", "^[^a-z]*$", "é{2}", "^(a|b){1,3}c?$",
    "^[ -~]$", "^\\s*$", "^\"$", "\\\\", "^[0-9-]+$", "@",
)  # fmt: skip
FORMATS = (
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown",
)  # fmt: skip
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -3, 2.5, "", "a", "score", "é\n\"", [], [1, "a"], [[], {}], {}, {"a": 1},
    {"low": [], "b": None},
)  # fmt: skip
ROOT_DEPTH = 3
EMPTY_SCHEMAS: tuple[Any, ...] = (
    False, {"enum": []}, {"allOf": [{"type": "string"}, {"type": "integer"}]}, {"const": 1, "type": "string"},
    {"type": "string", "minLength": 3, "maxLength": 1}, {"type": "string", "pattern": "^a$", "minLength": 2},
    {"anyOf": [False, {"enum": []}]}, {"type": "string", "format": "date", "maxLength": 5},
    {"type": "integer", "minimum": 1, "maximum": 2, "multipleOf": 5}, {"type": "integer", "minimum": 3, "maximum": 2},
    {"type": "string", "pattern": "^b", "enum": ["a", "c"]}, {"$ref": "#/$defs/never"}, {"$ref": "#/$defs/endless"},
    {"$ref": "#/$defs/ping"}, {"type": "object", "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": False, "minItems": 1}, {"type": "array", "prefixItems": [True, False], "minItems": 2},
    {"type": "array", "prefixItems": [{}], "items": False, "minItems": 2},
    {"type": "array", "minItems": 2, "maxItems": 1},
    {"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "^b"}]},
    {"type": "object", "properties": {"a": False}, "required": ["a"]},
)  # fmt: skip
DEFINITIONS: dict[str, Any] = {
    "never": False,
    "endless": {"type": "object", "properties": {"n": {"$ref": "#/$defs/endless"}}, "required": ["n"]},
    "ping": {"type": "array", "items": {"$ref": "#/$defs/pong"}, "minItems": 1},
    "pong": {"type": "array", "prefixItems": [{"$ref": "#/$defs/ping"}], "minItems": 1},
    "tree": {
        "type": "object", "properties": {"l": {"$ref": "#/$defs/tree"}, "v": {"type": "null"}},
        "additionalProperties": False,
    },
    "list": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/list"}, "minItems": 1}]},
    "part": {"enum": ["p", 1]},
}  # fmt: skip


def dead_end_schema(rng: random.Random) -> Any:
    schema = _schema(rng, ROOT_DEPTH)
    if isinstance(schema, dict):
        schema = {**schema, "$defs": DEFINITIONS}
    return schema


def _schema(rng: random.Random, depth: int) -> Any:
    if rng.random() < 0.12 and depth < ROOT_DEPTH:
        return rng.choice(EMPTY_SCHEMAS)
    kinds = [_text, _number, _values, _plain, _reference]
    if depth:
        kinds += [_object, _object, _object, _array, _array, _composed, _untyped]
    return rng.choice(kinds)(rng, depth - 1)


def _plain(rng: random.Random, depth: int) -> Any:
    if rng.random() < 0.2:
        return rng.choice((True, {}, {"type": rng.choice(TYPES)}, {"type": rng.sample(TYPES, 3)}))
    return random_schema(rng, 1)


def _text(rng: random.Random, depth: int) -> Any:
    schema: dict[str, Any] = {"type": "string"}
    if rng.random() < 0.5:
        schema["pattern"] = rng.choice(TEXT_PATTERNS)
    if rng.random() < 0.25:
        schema["format"] = rng.choice(FORMATS)
    if rng.random() < 0.4:
        schema["minLength"] = rng.randint(0, 4)
    if rng.random() < 0.5:
        schema["maxLength"] = rng.choice((0, 1, 2, 4, 8, 40))
    return schema


def _number(rng: random.Random, depth: int) -> Any:
    schema: dict[str, Any] = {"type": rng.choice(("integer", "number"))}
    low = rng.randint(-20, 20)
    if rng.random() < 0.7:
        schema[rng.choice(("minimum", "exclusiveMinimum"))] = low
    if rng.random() < 0.7:
        schema[rng.choice(("maximum", "exclusiveMaximum"))] = low + rng.choice((0, 1, 2, 30))
    if rng.random() < 0.3:
        schema["multipleOf"] = rng.choice((1, 2, 5, 7, 0.5))
    return schema


def _values(rng: random.Random, depth: int) -> Any:
    if rng.random() < 0.3:
        return {"const": rng.choice(VALUES)}
    schema: dict[str, Any] = {"enum": rng.sample(VALUES, rng.randint(1, 6))}
    if rng.random() < 0.3:
        schema["type"] = rng.choice(TYPES)
    if rng.random() < 0.05:
        count = rng.choice((300, 2500))
        schema["enum"] = [rng.choice(({"id": i}, [i], f"t{i}")) for i in range(count)]
    return schema


def _reference(rng: random.Random, depth: int) -> Any:
    name = rng.choice(("tree", "list", "part", "part", "never", "endless", "ping"))
    return {"$ref": f"#/$defs/{name}"}


def _object(rng: random.Random, depth: int) -> Any:
    names = rng.sample(NAMES, rng.randint(0, 4))
    schema: dict[str, Any] = {"type": "object"}
    if names and rng.random() < 0.85:
        schema["properties"] = {name: _schema(rng, depth) for name in names}
    if rng.random() < 0.55:
        patterns = rng.sample(PATTERNS, rng.choice((1, 1, 1, 2)))
        schema["patternProperties"] = {pattern: _schema(rng, depth) for pattern in patterns}
    kind = rng.random()
    if kind < 0.6:
        schema["additionalProperties"] = False
    elif kind < 0.75:
        schema["additionalProperties"] = _schema(rng, depth)
    if rng.random() < 0.6:
        others = rng.sample(NAMES, rng.choice((0, 0, 1)))
        required = [name for name in names if rng.random() < 0.5] + others
        schema["required"] = list(dict.fromkeys(required))
    if rng.random() < 0.12:
        # More can be written with one name twice, which llguidance does not see.
        schema["minProperties"] = rng.randint(0, 1)
    if rng.random() < 0.12:
        schema["maxProperties"] = rng.randint(0, 3)
    members = list(schema.items())
    if rng.random() < 0.3:
        rng.shuffle(members)
    return dict(members)


def _array(rng: random.Random, depth: int) -> Any:
    schema: dict[str, Any] = {"type": "array"}
    if rng.random() < 0.5:
        schema["prefixItems"] = [_schema(rng, depth) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.7:
        schema["items"] = rng.choice((False, _schema(rng, depth), _schema(rng, depth)))
    if rng.random() < 0.5:
        schema["minItems"] = rng.randint(0, 3)
    if rng.random() < 0.6:
        schema["maxItems"] = rng.choice((0, 1, 3, 5, 1000))
    return schema


def _composed(rng: random.Random, depth: int) -> Any:
    keyword = rng.choice(("anyOf", "anyOf", "allOf", "oneOf"))
    parts = [_schema(rng, depth) for _ in range(rng.randint(1, 3))]
    if keyword == "allOf" and rng.random() < 0.7:
        parts = [_object(rng, depth), _object(rng, depth)]
    schema = {keyword: parts}
    if rng.random() < 0.2:
        schema = {**schema, **_object(rng, depth)}
    return schema


def _untyped(rng: random.Random, depth: int) -> Any:
    """Keywords of several types without a type."""
    merged: dict[str, Any] = {}
    for kind in rng.sample((_text, _number, _object, _array), rng.randint(1, 2)):
        merged |= kind(rng, depth)
    merged.pop("type", None)
    return merged
