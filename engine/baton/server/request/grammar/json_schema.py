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

from baton.runtime.grammar.limits import MAX_ALTERNATIVES
from baton.server.fields import bad
from baton.server.request.grammar.constraint import AnswerConstraint
from baton.server.request.grammar.lark import GrammarText
from baton.server.request.grammar.schema.empty_parts import without_empty_parts
from baton.server.request.grammar.schema.exact_numbers import (
    approximate_schema,
    exact_schema,
    schema_json,
)
from baton.server.request.grammar.schema.property_names import without_open_ends
from baton.server.request.grammar.schema.references import (
    SUBSCHEMA,
    SUBSCHEMA_LISTS,
    SUBSCHEMA_MAPS,
    objects_of,
)
from baton.server.request.grammar.schema.schema_writer import OPTIONS_KEY, write_schema

MAX_SCHEMA_DEPTH = 60
"""Nested objects and arrays of a schema; llguidance's own limit is 128."""
BOUNDED_WHITESPACE = r"( |\r?\n[ \t]{0,40})"
UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*\])")


def schema_grammar(constraint: AnswerConstraint, whitespace: str) -> GrammarText:
    """The schema as a grammar of its own. Raises BadRequest.

    Args:
        whitespace: --structured-whitespace.
    """
    schema = schema_of(constraint)
    options = schema_options(constraint, whitespace)
    check = _grammar_of(approximate_schema(schema), options, constraint.param)
    written = write_schema(schema, options, constraint.param)
    if written is not None:
        return GrammarText(written, (check,))
    text = _grammar_of(schema, options, constraint.param)
    return GrammarText(text, () if check == text else (check,))


def schema_part(constraint: AnswerConstraint, whitespace: str) -> GrammarText:
    """The schema as the body of a rule. Raises BadRequest."""
    schema = schema_of(constraint)
    options = schema_options(constraint, whitespace)
    check = _grammar_of(approximate_schema(schema), options, constraint.param)
    written = write_schema(schema, options, constraint.param)
    if written is None:
        return GrammarText("%json " + schema_json({**schema, OPTIONS_KEY: options}), (check,))
    return GrammarText(f"%lark {{\n{written}}}", (check,))


def _grammar_of(schema: dict[str, Any], options: Any, param: str) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(schema_json(schema), overrides=options)
    except ValueError as err:
        raise bad(param, f"cannot be read: {str(err)[:100]}") from err


def schema_of(constraint: AnswerConstraint) -> dict[str, Any]:
    """The schema of a constraint as an object, closed where it asks for that. Raises BadRequest.

    Its numbers are exact, and it has no parts that no answer can complete.
    """
    param = constraint.param
    schema = schema_object(constraint.value, param)
    if constraint.is_closed:
        schema = close_objects(schema)
    refuse_long_enums(schema, param)
    satisfiable = without_empty_parts(schema)
    if satisfiable is None:
        raise bad(
            param, "has no value: what it requires is excluded, or contains itself without end"
        )
    return without_open_ends(satisfiable)


def refuse_long_enums(schema: dict[str, Any], param: str) -> None:
    """Raise BadRequest for lists of values with too many alternatives."""
    for part in objects_of(schema):
        values = part.get("enum")
        if not isinstance(values, list):
            continue
        count = sum(isinstance(value, (dict, list)) for value in values)
        if count > MAX_ALTERNATIVES:
            raise bad(
                param,
                f"has an enum with {count} objects and arrays, at most {MAX_ALTERNATIVES} are "
                "accepted; "
                "list texts or numbers, which have no such limit, or fewer values",
            )


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
    """The schema with `additionalProperties: false` in every object schema that does not state
    it.
    """
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
