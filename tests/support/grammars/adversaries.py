"""Constraints that a hostile or careless client might send, of one seed: schemas, regexes, grammars and lists of
choices that are deep, large, cyclic, ambiguous, malformed, or of the wrong type.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tests.support.grammars.random_schemas import random_schema

LONE_SURROGATE = "\ud800"
JSON_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 2**70, 1e308, -1e-320, "", "x", "\0", LONE_SURROGATE, "é", [], {}, [[]], {"": {}}, "#", "object",
)  # fmt: skip
KEYWORDS = (
    "type", "properties", "required", "items", "prefixItems", "minItems", "maxItems", "minLength", "maxLength",
    "pattern", "format", "enum", "const", "anyOf", "oneOf", "allOf", "not", "$ref", "$defs", "additionalProperties",
    "patternProperties", "minimum", "exclusiveMaximum", "multipleOf", "if", "then", "dependentRequired", "uniqueItems",
    "minProperties", "maxProperties", "x-guidance", "$schema", "$id", "$anchor", "unevaluatedProperties",
)  # fmt: skip
LETTERS = "abcxyz \n\t\"'\\{}[]<>/é\0😀"
REGEX_PARTS = (
    "a", "[a-z]", "[^\\n]", ".", "\\d", "\\w", "\\s", "\\p{L}", "\\b", "^", "$", "|", "(", ")", "(?:", "(?=", "(?!",
    "(?<n>", "[", "]", "{", "}", "*", "+", "?", "{1,10000}", "{0,3}", "{10000}", "{5,1}", "{99999999999}", "(a|a)*",
    "(a*)*", "(.*){0,50}", "[a-z]{0,2000}", "\\1", "\\", "\\x00", "\0", "é", "\U0010ffff", "(?i)", "&", "~",
    "(?:x{0,100}){0,100}", "[[:alpha:]]", "\\u{110000}", "(a?){60}a{60}", "[^a]*a[^b]{30}",
)  # fmt: skip
GRAMMAR_PARTS = (
    "root", "start", "a", "b", "::=", ":", "|", "(", ")", "*", "+", "?", '"x"', '"', "'", "/a+/", "/", "[a-z]", "[",
    "]", "{2,5}", "{1,10000}", "\n", "\n", "%json", '{"type": "object"}', "%regex", "<[1]>", "<think>", "@", "#", "//",
    "%ignore", "/ /", "~", "->", "\0", "\\", "TEXT", "...", "é",
)  # fmt: skip


def make_adversary(rng: random.Random) -> bytes:
    """JSON of the fields of one request."""
    return json.dumps(rng.choice(FORMS)(rng)).encode()


def _schema_form(rng: random.Random) -> dict[str, Any]:
    schema = rng.choice(SCHEMAS)(rng)
    for _ in range(rng.choice((0, 0, 1, 3, 10))):
        schema = _mutate(rng, schema)
    kind = rng.random()
    if kind < 0.5:
        named = {"name": "n", "schema": schema, "strict": rng.random() < 0.5}
        return {"response_format": {"type": "json_schema", "json_schema": named}}
    if kind < 0.8:
        return {"structured_outputs": {"json": schema}}
    return {"json_schema": json.dumps(schema)}


def _regex_form(rng: random.Random) -> dict[str, Any]:
    return {rng.choice(("regex", "guided_regex")): _regex(rng)}


def _grammar_form(rng: random.Random) -> dict[str, Any]:
    parts = rng.choices(GRAMMAR_PARTS, k=rng.choice((1, 5, 20, 100, 2000)))
    begin = rng.choice(("", "root ::= ", "start: ", "root ::= a\na ::= a b | b\nb ::= "))
    return {rng.choice(("ebnf", "guided_grammar")): begin + " ".join(parts)}


def _choice_form(rng: random.Random) -> dict[str, Any]:
    count = rng.choice((0, 1, 3, 1000, 20_000))
    choices: list[Any] = [_text(rng, rng.choice((0, 1, 30))) for _ in range(count)]
    if rng.random() < 0.2:
        choices.append(rng.choice(JSON_VALUES))
    return {"structured_outputs": {"choice": choices}}


def _tag_form(rng: random.Random) -> dict[str, Any]:
    tag: Any = {
        "type": "triggered_tags",
        "triggers": [rng.choice(("<", "<f", "", "\0"))],
        "tags": [
            {"begin": f"<f{i}>", "content": {"type": "json_schema", "json_schema": _nested(rng)}, "end": "</f>"}
            for i in range(rng.choice((0, 1, 200)))
        ],
    }  # fmt: skip
    for _ in range(rng.choice((0, 1, 3))):
        tag = _mutate(rng, tag)
    return {"response_format": {"type": "structural_tag", "format": tag}}


FORMS: tuple[Callable[[random.Random], dict[str, Any]], ...] = (
    _schema_form, _schema_form, _schema_form, _schema_form, _regex_form, _regex_form, _grammar_form, _choice_form,
    _tag_form,
)  # fmt: skip


def _nested(rng: random.Random) -> Any:
    schema: Any = random_schema(rng)
    for _ in range(rng.choice((5, 30, 59, 60, 61, 127, 128, 500))):
        kind = rng.random()
        if kind < 0.4:
            schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        elif kind < 0.8:
            schema = {"type": "array", "items": schema}
        else:
            schema = {rng.choice(("anyOf", "allOf", "oneOf")): [schema]}
    return schema


def _large_enum(rng: random.Random) -> Any:
    return {
        "enum": [_text(rng, rng.randint(1, 40)) for _ in range(rng.choice((100, 3000, 20_000)))]
    }


def _many_properties(rng: random.Random) -> Any:
    names = [f"{_text(rng, 5)}{i}" for i in range(rng.choice((50, 500, 3000)))]
    return {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names},
        "required": rng.sample(names, rng.choice((0, 1, len(names)))),
        "additionalProperties": rng.random() < 0.5,
    }


def _exploding(rng: random.Random) -> Any:
    """Alternatives of alternatives, or conjunctions of them."""
    schema: Any = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}}}
    for level in range(rng.randint(1, 5)):
        width = rng.randint(2, 6)
        keyword = rng.choice(("anyOf", "oneOf", "allOf"))
        schema = {keyword: [schema | {"title": f"{level}.{i}"} for i in range(width)]}
    return schema


def _cyclic(rng: random.Random) -> Any:
    names = ["a", "b", "c"][: rng.randint(1, 3)]
    defs: dict[str, Any] = {}
    for name in names:
        target = {"$ref": f"#/$defs/{rng.choice((*names, 'missing'))}"}
        defs[name] = rng.choice(
            (
                target,
                {"allOf": [target]},
                {"anyOf": [target, {"type": "null"}]},
                {"type": "array", "items": target},
                {"type": "object", "properties": {"n": target}, "required": ["n"]},
                {"$ref": rng.choice(("#", "#/", "#/$defs/%", "http://x/y", "\0", "#/$defs/a/b/c"))},
            )
        )
    return {"$defs": defs, "$ref": f"#/$defs/{rng.choice(names)}"}


def _sizes(rng: random.Random) -> Any:
    most = rng.choice((0, 1, 1000, 10**6, 10**18, -1, 1.5))
    return rng.choice(
        (
            {"type": "string", "minLength": most, "maxLength": most},
            {"type": "array", "items": random_schema(rng), "minItems": most, "maxItems": most},
            {"type": "integer", "minimum": most, "maximum": rng.choice((0, 10**30))},
            {"type": "number", "multipleOf": rng.choice((1e-300, 0, 0.1, 7, -1))},
            {"type": "object", "minProperties": most, "maxProperties": most},
            {"type": "string", "pattern": _regex(rng)},
            {"type": "object", "patternProperties": {_regex(rng): {"type": "string"}}},
            {"type": "string", "format": _text(rng, 5), "pattern": _regex(rng)},
        )
    )


SCHEMAS: tuple[Callable[[random.Random], Any], ...] = (
    random_schema, _nested, _large_enum, _many_properties, _exploding, _cyclic, _sizes,
)  # fmt: skip


def _regex(rng: random.Random) -> str:
    return "".join(rng.choices(REGEX_PARTS, k=rng.choice((0, 1, 3, 8, 30, 300))))


def _text(rng: random.Random, length: int) -> str:
    letters = LETTERS if rng.random() < 0.98 else LETTERS + LONE_SURROGATE
    return "".join(rng.choices(letters, k=length))


def _mutate(rng: random.Random, value: Any) -> Any:
    """A copy with one change somewhere."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        return value | {name: _mutate(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        return [*value[:index], _mutate(rng, value[index]), *value[index + 1 :]]
    if isinstance(value, dict) and rng.random() < 0.5:
        return value | {rng.choice(KEYWORDS): rng.choice(JSON_VALUES)}
    return rng.choice((*JSON_VALUES, random_schema(rng)))
