"""The constraint that a request's fields put on its answer.

The fields are OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*`, and
SGLang's `regex`, `ebnf`, `json_schema` and `structural_tag`. A request may state one constraint;
the second one is refused.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.errors import BadRequest, MissingField
from baton.server import fields
from baton.server.fields import bad, decode_exact

ANY_JSON = "$$ANY$$"
"""SGLang's `json_schema` for any JSON value."""


class ConstraintKind(enum.Enum):
    JSON_SCHEMA = "JSON Schema"
    REGEX = "regular expression"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural tag"


@dataclass(frozen=True, slots=True)
class AnswerConstraint:
    kind: ConstraintKind
    value: Any
    """A schema, a regex, a list of texts, a text in EBNF or Lark, or a structural tag."""
    param: str
    """Path of the client's field."""
    is_strict: bool = False
    """A schema with keywords that cannot be enforced is refused; else these are ignored."""
    whitespace_pattern: str | None = None
    """White space between the parts of JSON, in place of the server's policy."""
    is_compact: bool = False
    """JSON has no white space between its parts."""
    is_closed: bool = False
    """Objects have no other properties than those that the schema names, unless it says so itself.
    """


class NativeGrammarFields(msgspec.Struct, kw_only=True):
    """SGLang's fields: in `sampling_params` of /generate, and at the top of the other bodies."""

    regex: str | None = None
    ebnf: str | None = None
    json_schema: Any = None
    structural_tag: Any = None


class GrammarFields(NativeGrammarFields, kw_only=True):
    """Fields of a chat or completion body."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: str
    json_schema: dict[str, Any] | None = None
    schema: Any = None
    """Schema of the form without `json_schema` around it, as SGLang takes it."""
    structures: Any = None
    triggers: Any = None
    format: Any = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    schema: Any = None
    strict: bool | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_additional_properties: bool | None = None


def stated_fields(body: Mapping[str, Any], *, is_native: bool = False) -> dict[str, Any]:
    """The fields of a body that may constrain its answer.

    Args:
        is_native: `body` is /generate's `sampling_params`.
    """
    form = NativeGrammarFields if is_native else GrammarFields
    names = form.__struct_fields__
    return {name: body[name] for name in names if body.get(name) is not None}


def read_constraint(
    body: Mapping[str, Any], prefix: str = "", *, is_native: bool = False
) -> AnswerConstraint | None:
    """The constraint of a request; None: its answer is free. Raises BadRequest.

    Args:
        prefix: stands before the names of fields in errors.
        is_native: `body` is /generate's `sampling_params`.
    """
    found = list(
        _native_constraints(fields.read(NativeGrammarFields, body, prefix), prefix)
        if is_native
        else _openai_constraints(fields.read(GrammarFields, body, prefix))
    )
    if len(found) > 1:
        first, second = found[:2]
        raise bad(second.param, f"and {first.param} exclude each other; send one constraint")
    return found[0] if found else None


def _openai_constraints(request: GrammarFields) -> Iterator[AnswerConstraint]:
    if request.response_format is not None:
        yield from _read_response_format(request.response_format)
    if request.structured_outputs is not None:
        yield _read_structured_outputs(request.structured_outputs)
    guided = (
        ("guided_json", ConstraintKind.JSON_SCHEMA, request.guided_json),
        ("guided_regex", ConstraintKind.REGEX, request.guided_regex),
        ("guided_choice", ConstraintKind.CHOICE, request.guided_choice),
        ("guided_grammar", ConstraintKind.GRAMMAR, request.guided_grammar),
    )
    for param, kind, value in guided:
        if value is not None:
            yield _make_constraint(kind, value, param)
    yield from _native_constraints(request, "")


def _native_constraints(request: NativeGrammarFields, prefix: str) -> Iterator[AnswerConstraint]:
    native = (
        ("regex", ConstraintKind.REGEX, request.regex),
        ("ebnf", ConstraintKind.GRAMMAR, request.ebnf),
        ("json_schema", ConstraintKind.JSON_SCHEMA, request.json_schema),
        ("structural_tag", ConstraintKind.STRUCTURAL_TAG, request.structural_tag),
    )
    for name, kind, value in native:
        if value is not None:
            yield _make_constraint(kind, value, prefix + name)


def _make_constraint(kind: ConstraintKind, value: Any, param: str) -> AnswerConstraint:
    if kind is ConstraintKind.JSON_SCHEMA:
        value = _parse_schema(value, param)
    elif kind is ConstraintKind.STRUCTURAL_TAG:
        value = _parse_json(value, param)
    return AnswerConstraint(kind, value, param)


def _read_response_format(given: dict[str, Any]) -> Iterator[AnswerConstraint]:
    name = "response_format"
    form = fields.read(ResponseFormat, given, f"{name}.")
    if form.type == "text":
        return
    if form.type == "json_object":
        yield AnswerConstraint(ConstraintKind.JSON_SCHEMA, {"type": "object"}, name)
    elif form.type == "json_schema":
        yield _read_schema_format(form)
    elif form.type == "structural_tag":
        yield AnswerConstraint(ConstraintKind.STRUCTURAL_TAG, given, name)
    else:
        raise bad(
            f"{name}.type",
            f"is {form.type[:40]!r}; give text, json_object, json_schema or structural_tag",
        )


def _read_schema_format(form: ResponseFormat) -> AnswerConstraint:
    path = "response_format.json_schema"
    if form.json_schema is None:
        param = "response_format.schema"
        schema = form.schema
        strict = None
    else:
        inner = fields.read(JsonSchemaFormat, form.json_schema, f"{path}.")
        param = f"{path}.schema"
        schema = inner.schema
        strict = inner.strict
    if schema is None:
        raise MissingField(f"{path}.schema is required", param=f"{path}.schema")
    schema = _parse_schema(schema, param)
    return AnswerConstraint(ConstraintKind.JSON_SCHEMA, schema, param, is_strict=bool(strict))


def _read_structured_outputs(given: dict[str, Any]) -> AnswerConstraint:
    name = "structured_outputs"
    form = fields.read(StructuredOutputs, given, f"{name}.")
    if form.json_object is False:
        raise bad(f"{name}.json_object", "is false; leave it out")
    stated: list[tuple[str, ConstraintKind, Any]] = [
        ("json", ConstraintKind.JSON_SCHEMA, form.json),
        ("regex", ConstraintKind.REGEX, form.regex),
        ("choice", ConstraintKind.CHOICE, form.choice),
        ("grammar", ConstraintKind.GRAMMAR, form.grammar),
        (
            "json_object",
            ConstraintKind.JSON_SCHEMA,
            {"type": "object"} if form.json_object else None,
        ),
        ("structural_tag", ConstraintKind.STRUCTURAL_TAG, form.structural_tag),
    ]
    found = [(key, kind, value) for key, kind, value in stated if value is not None]
    if not found:
        keys = ", ".join(key for key, _, _ in stated)
        raise bad(name, f"has no constraint; give one of {keys}")
    if len(found) > 1:
        raise bad(
            f"{name}.{found[1][0]}",
            f"and {name}.{found[0][0]} exclude each other; send one of them",
        )
    key, kind, value = found[0]
    constraint = _make_constraint(kind, value, f"{name}.{key}")
    return AnswerConstraint(
        kind,
        constraint.value,
        constraint.param,
        whitespace_pattern=form.whitespace_pattern,
        is_compact=form.disable_any_whitespace or False,
        is_closed=form.disable_additional_properties or False,
    )


def _parse_schema(value: Any, param: str) -> Any:
    """A schema as an object or a boolean, which may be given as text."""
    if value == ANY_JSON:
        return {}
    schema = _parse_json(value, param)
    if not isinstance(schema, (dict, bool)):
        raise bad(param, "must be a JSON Schema: an object or a boolean")
    return schema


def _parse_json(value: Any, param: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return decode_exact(value)
    except (msgspec.DecodeError, RecursionError) as err:
        reason = "it is nested too deeply" if isinstance(err, RecursionError) else str(err)
        raise BadRequest(f"{param} is no JSON: {reason}", param=param) from err
