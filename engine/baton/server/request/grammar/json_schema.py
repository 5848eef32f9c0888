"""A JSON Schema as a grammar: this server's options, which a schema cannot change.

White space between the parts of an answer is bounded by default: with an unlimited one, models were
seen that write blanks until max_tokens (vLLM #38696, xgrammar #412).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher

from baton.server.fields import bad
from baton.server.request.grammar.constraint import AnswerConstraint
from baton.server.request.grammar.schema.exact_numbers import (
    SUBSCHEMA,
    SUBSCHEMA_LISTS,
    SUBSCHEMA_MAPS,
    approximate_schema,
    exact_schema,
    schema_json,
)
from baton.server.request.grammar.schema.schema_writer import OPTIONS_KEY, write_schema

MAX_SCHEMA_DEPTH = 60
"""Nested objects and arrays of a schema; llguidance's own limit is 128."""
BOUNDED_WHITESPACE = r"( |\r?\n[ \t]{0,40})"
UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*\])")


def schema_grammar(constraint: AnswerConstraint, whitespace: str) -> str:
    """Text of the grammar. Raises BadRequest.

    Args:
        whitespace: --structured-whitespace.
    """
    schema = schema_of(constraint)
    options = schema_options(constraint, whitespace)
    written = write_schema(schema, options, constraint.param)
    return _grammar_of(schema, options, constraint.param) if written is None else written


def schema_check(constraint: AnswerConstraint, whitespace: str) -> str:
    """The schema as a grammar that llguidance compiles whole, in place of that of `schema_grammar`.

    Its check finds what is wrong with the schema, and names of keywords without effect. Numbers may be others in it.
    """
    schema = approximate_schema(schema_of(constraint))
    return _grammar_of(schema, schema_options(constraint, whitespace), constraint.param)


def _grammar_of(schema: dict[str, Any], options: Any, param: str) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(schema_json(schema), overrides=options)
    except ValueError as err:
        raise bad(param, f"cannot be read: {str(err)[:100]}") from err


def schema_part(constraint: AnswerConstraint, whitespace: str) -> str:
    """The schema as the body of a rule. Raises BadRequest."""
    schema = schema_of(constraint)
    options = schema_options(constraint, whitespace)
    written = write_schema(schema, options, constraint.param)
    if written is None:
        return "%json " + schema_json({**schema, OPTIONS_KEY: options})
    return f"%lark {{\n{written}}}"


def schema_of(constraint: AnswerConstraint) -> dict[str, Any]:
    """The schema of a constraint as an object, closed where it asks for that. Raises BadRequest."""
    schema = schema_object(constraint.value, constraint.param)
    return close_objects(schema) if constraint.is_closed else schema


def schema_options(constraint: AnswerConstraint, whitespace: str) -> Any:
    """llguidance's options for a schema."""
    options: dict[str, Any] = {
        "lenient": not constraint.is_strict,
        # Models that learned JSON with \u00e9 would be pushed off course.
        "json_allow_general_unicode_escapes": True,
    }
    if constraint.whitespace_pattern is not None:
        return {
            **options,
            "whitespace_flexible": True,
            "whitespace_pattern": constraint.whitespace_pattern,
        }
    if constraint.is_compact or whitespace == "none":
        return {**options, "whitespace_flexible": False}
    if whitespace == "bounded":
        return {**options, "whitespace_flexible": True, "whitespace_pattern": BOUNDED_WHITESPACE}
    return {**options, "whitespace_flexible": True}


def schema_object(schema: Any, param: str) -> dict[str, Any]:
    """A schema as an object without options for llguidance. Raises BadRequest."""
    if schema is False:
        raise bad(param, "is false, which no answer satisfies")
    if schema is True:
        return {}
    if type(schema) is not dict:
        raise bad(param, "must be a JSON Schema, an object or a boolean")
    check_depth(schema, param)
    plain = {key: value for key, value in schema.items() if key != OPTIONS_KEY}
    exact: dict[str, Any] = exact_schema(plain, param)
    return exact


def check_depth(value: Any, param: str) -> None:
    """Raise BadRequest for JSON that is nested too deeply."""
    level: list[Any] = [value]
    for _ in range(MAX_SCHEMA_DEPTH + 1):
        level = [inner for outer in level for inner in _parts_of(outer)]
        if not level:
            return
    raise bad(param, f"is nested more than {MAX_SCHEMA_DEPTH} levels deep; simplify it")


def _parts_of(value: Any) -> Iterator[Any]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (part for part in parts if isinstance(part, (dict, list)))


def close_objects(schema: Any) -> Any:
    """The schema with `additionalProperties: false` in every object schema that does not state it."""
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in SUBSCHEMA_MAPS and isinstance(value, dict):
            closed[key] = {name: close_objects(inner) for name, inner in value.items()}
        elif key in SUBSCHEMA_LISTS and isinstance(value, list):
            closed[key] = [close_objects(inner) for inner in value]
        elif key in SUBSCHEMA:
            closed[key] = close_objects(value)
        else:
            closed[key] = value
    if "properties" in closed and not closed.keys() & {"additionalProperties", "patternProperties"}:
        closed["additionalProperties"] = False
    return closed


def ignored_keywords(warnings: list[str]) -> list[str]:
    """Keywords of a schema that have no effect, by llguidance's warnings."""
    names: dict[str, None] = {}
    for warning in warnings:
        if found := UNIMPLEMENTED.search(warning):
            names.update(dict.fromkeys(json.loads(found[1])))
        elif "format" in warning:
            names["format"] = None
        elif "oneOf" in warning:
            names["oneOf"] = None
        else:
            names["other"] = None
    return list(names)
