"""Values of a tool's parameters in formats that write each of them as raw text between tags.

The text layer turns a raw text into the first type of the parameter's schema that it fits, and into
a string where it fits none (engine/text/src/stream/tools/xml/schema_types.rs). Where a parameter
may be a string or something else, texts that would be read as an invalid value are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.server.request.grammar.lark import escape_regex
from baton.server.request.grammar.lark_builder import FREE_TEXT
from baton.server.request.grammar.schema.exact_numbers import is_number
from baton.server.request.grammar.schema.merging import common_values
from baton.server.request.grammar.schema.number_regex import (
    ANY_INTEGER,
    ANY_NUMBER,
    number_texts,
)
from baton.server.request.grammar.schema.references import references_of

MAX_DEPTH = 16
"""Nested references and alternatives of a parameter's schema."""
ANNOTATIONS = frozenset(
    (
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$schema",
        "$id",
        "nullable",
        "discriminator",
    )
)
TYPE_NAMES = ("null", "boolean", "integer", "number", "array", "object")
"""Types that are written as JSON."""
DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
FORMATS: Mapping[str, str] = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": r"((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])",
    "email": r"[a-zA-Z0-9_%+-]+(\.[a-zA-Z0-9_%+-]+)*@([a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?\.)+[a-zA-Z]{2,63}",
    "hostname": r"[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?(\.[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?)*",
    "uri": r"[a-z][a-z0-9+.-]*:[^\s<>]+",
}
"""Formats of strings that are enforced. Of dates with too many days for their month, 31 are
allowed.
"""
ASCII_CLASSES: Mapping[str, str] = {r"\d": "0-9", r"\w": "a-zA-Z0-9_"}


class UnclearValues(ValueError):
    """A schema whose strings and other values cannot be distinguished, or not be described by a
    regex.
    """


@dataclass(frozen=True, slots=True)
class TextValue:
    """Texts of a value: those that as a whole match each of `regexes` and none of `excluded`."""

    regexes: tuple[str, ...]
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ParameterValues:
    """Values of one parameter: strings, as texts, and others, as JSON of a schema. None: there are
    no others.
    """

    texts: tuple[TextValue, ...] = ()
    other: Any = None


ANY_TEXT = ParameterValues(texts=(TextValue((FREE_TEXT,)),))
NUMBER = r"\s*[(]?[-+ ]*\.?[0-9][0-9A-Za-z_.+-]*[)]?\s*"
LOOKALIKES: Mapping[str, str] = {
    "null": r"\s*[(]?(null|None)[)]?\s*",
    "boolean": r"\s*[(]?([tT]rue|[fF]alse)[)]?\s*",
    "integer": NUMBER,
    "number": NUMBER,
}
"""Texts that are read as a value of a type."""
STARTS: Mapping[str, str] = {
    "integer": r"\s*[-+.0-9(]",
    "number": r"\s*[-+.0-9(]",
    "array": r"\s*[\[({]",
    "object": r"\s*[\[({]",
}
"""Begins of texts that may be read as a value of a type."""
SCALARS: Mapping[str, str] = {
    "null": "null",
    "boolean": "true|false",
    "integer": ANY_INTEGER,
    "number": ANY_NUMBER,
}
"""Texts of the values of a type."""


@dataclass(frozen=True, slots=True)
class ValueLeaf:
    """Alternative of a schema: a type with its keywords, or listed values."""

    schema: Mapping[str, Any]
    kind: str
    """Name of the type; "any", or "listed"."""


def parameter_values(
    root: Mapping[str, Any], schema: Any, *, states_types: bool
) -> ParameterValues:
    """Values that `schema` allows, a part of the schema `root`. Raises UnclearValues.

    Args:
        states_types: the format says of each value whether it is a string. Without that, a text is
            what it reads as, and a text and JSON differ in their first character, because the lexer
            cannot decide later.
    """
    leaves = list(_leaves(root, schema, 0))
    if any(leaf.kind == "any" for leaf in leaves):
        return ANY_TEXT
    listed = [value for leaf in leaves if leaf.kind == "listed" for value in _listed(leaf.schema)]
    strings = [_string_regexes(leaf.schema) for leaf in leaves if leaf.kind == "string"]
    strings += [(escape_regex(value),) for value in listed if isinstance(value, str)]
    others = [leaf for leaf in leaves if leaf.kind in TYPE_NAMES]
    other_values = [value for value in listed if not isinstance(value, str)]
    if not strings and not others and not other_values:
        raise UnclearValues("allows no value that can be written")
    if strings and not states_types:
        return _mixed_values(root, strings, others, other_values)
    texts = tuple(map(TextValue, strings))
    return ParameterValues(texts, _either(root, others, other_values))


def _mixed_values(
    root: Mapping[str, Any],
    strings: Sequence[tuple[str, ...]],
    others: Sequence[ValueLeaf],
    other_values: Sequence[Any],
) -> ParameterValues:
    """Values of a parameter whose strings are not marked as such."""
    plain = {
        leaf.kind for leaf in others if leaf.kind in SCALARS and leaf.schema.keys() <= {"type"}
    }
    scalars = [value for value in other_values if not isinstance(value, (list, dict))]
    as_json = [leaf for leaf in others if leaf.kind not in plain]
    values_as_json = [value for value in other_values if isinstance(value, (list, dict))]
    json_types = {leaf.kind for leaf in as_json} | set(map(_type_of, values_as_json))
    # Each text of a type without further keywords is valid, as a string or as what it is read as.
    excluded = [LOOKALIKES[kind] for kind in sorted({*map(_type_of, scalars)} - plain)]
    excluded += [STARTS[kind] + FREE_TEXT for kind in sorted(json_types)]
    unique = tuple(dict.fromkeys(excluded))
    texts = [TextValue(regexes, unique) for regexes in strings]
    texts += [TextValue((SCALARS[kind],)) for kind in sorted(plain)]
    texts += [
        TextValue((escape_regex(text),)) for value in scalars for text in _scalar_texts(value)
    ]
    return ParameterValues(tuple(texts), _either(root, as_json, values_as_json))


def with_definitions(root: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """A part of `root` as a schema of its own. Raises UnclearValues for references to other
    places.
    """
    for reference in references_of(schema):
        if not reference.startswith(("#/$defs/", "#/definitions/")):
            raise UnclearValues(f"refers to {reference!r}; use $defs")
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**schema, **definitions}


def resolve(root: Mapping[str, Any], schema: Any) -> Any:
    """The schema that a schema refers to, or itself. Raises UnclearValues."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        reference = schema["$ref"]
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise UnclearValues(f"refers to {reference!r}, which is not in the schema")
        target: Any = root
        for name in reference[1:].split("/")[1:]:
            key = name.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, dict) else None
        schema = target
    raise UnclearValues("has references that do not end")


def _leaves(root: Mapping[str, Any], schema: Any, depth: int) -> Iterator[ValueLeaf]:
    if depth > MAX_DEPTH:
        raise UnclearValues("is nested too deeply")
    if schema is True or schema is None:
        yield ValueLeaf({}, "any")
        return
    schema = resolve(root, schema)
    if not isinstance(schema, dict):
        raise UnclearValues("allows no value")
    keywords = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
    kind = keywords.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if kind is not None and "string" not in kinds:
        for each in kinds:
            yield ValueLeaf({**keywords, "type": each}, str(each))
    elif "enum" in keywords or "const" in keywords:
        yield ValueLeaf(keywords, "listed")
    elif not keywords:
        yield ValueLeaf({}, "any")
    elif kind is not None:
        if keywords.keys() & {"anyOf", "oneOf", "allOf", "not", "if"}:
            raise UnclearValues("composes strings of several schemas")
        for each in kinds:
            yield ValueLeaf({**keywords, "type": each}, str(each))
    else:
        yield from _composed_leaves(root, keywords, depth)


def _composed_leaves(
    root: Mapping[str, Any], keywords: Mapping[str, Any], depth: int
) -> Iterator[ValueLeaf]:
    names = list(keywords)
    options = keywords[names[0]]
    is_choice = names[0] in ("anyOf", "oneOf") or (names[0] == "allOf" and len(options) == 1)
    if len(names) > 1 or not is_choice:
        raise UnclearValues(f"has {', '.join(sorted(names))} and no type")
    for option in options:
        yield from _leaves(root, option, depth + 1)


def _listed(keywords: Mapping[str, Any]) -> list[Any]:
    """Values that `enum` and `const` allow, of the types that the schema has."""
    values = keywords["enum"] if "enum" in keywords else [keywords["const"]]
    if "enum" in keywords and "const" in keywords:
        values = common_values(values, [keywords["const"]])
    kind = keywords.get("type")
    kinds = [kind] if isinstance(kind, str) else kind or ()
    return [value for value in values if not kinds or _has_type(value, kinds)]


def _scalar_texts(value: Any) -> tuple[str, ...]:
    return number_texts(value) if is_number(value) else (json.dumps(value),)


def _has_type(value: Any, kinds: Sequence[str]) -> bool:
    found = _type_of(value)
    return found in kinds or (found == "integer" and "number" in kinds)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if is_number(value):
        return "integer" if value == int(value) else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _either(root: Mapping[str, Any], leaves: Sequence[ValueLeaf], values: Sequence[Any]) -> Any:
    """Schema of these values; None: there are none."""
    options = [leaf.schema for leaf in leaves]
    if values:
        options.append({"enum": list(values)})
    if not options:
        return None
    return with_definitions(root, options[0] if len(options) == 1 else {"anyOf": options})


def _string_regexes(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Regexes that a string matches as a whole, each."""
    found = []
    least = schema.get("minLength", 0)
    most = schema.get("maxLength")
    if least or most is not None:
        limit = "" if most is None else most
        found.append(rf"(.|\n){{{least},{limit}}}")
    if "pattern" in schema:
        found.append(_whole_pattern(schema["pattern"]))
    form = schema.get("format")
    if form is not None:
        if form not in FORMATS:
            raise UnclearValues(f"has the format {str(form)[:40]!r}")
        found.append(FORMATS[form])
    return tuple(found) or (FREE_TEXT,)


def _whole_pattern(pattern: str) -> str:
    """A regex for the whole text in which `pattern` matches somewhere."""
    body = _ascii_classes(pattern)
    starts = body.startswith("^")
    ends = re.search(r"(^|[^\\])(\\\\)*\$$", body) is not None
    body = body[1 if starts else 0 : len(body) - 1 if ends else len(body)]
    if re.search(r"(?<!\\)[\^$]", re.sub(r"\[[^]]*\]", "", body)):
        raise UnclearValues(f"has the pattern {pattern[:40]!r}, with an anchor inside")
    if (starts or ends) and _has_alternatives(body):
        raise UnclearValues(f"has the pattern {pattern[:40]!r}, with an anchor in an alternative")
    before = "" if starts else FREE_TEXT
    after = "" if ends else FREE_TEXT
    return f"{before}({body}){after}"


def _ascii_classes(pattern: str) -> str:
    """The pattern with `\\d` and `\\w` as ECMAScript has them, which a JSON Schema means; Rust's
    have all scripts.
    """
    out = []
    in_class = False
    for part in re.findall(r"\\.|.", pattern, re.DOTALL):
        if part in ASCII_CLASSES:
            members = ASCII_CLASSES[part]
            out.append(members if in_class else f"[{members}]")
            continue
        if part.lower() in ASCII_CLASSES and not in_class:
            out.append(f"[^{ASCII_CLASSES[part.lower()]}]")
            continue
        in_class = part != "]" if in_class else part == "["
        out.append(part)
    return "".join(out)


def _has_alternatives(body: str) -> bool:
    """True if the regex has `|` outside groups and classes."""
    depth = 0
    is_escaped = False
    in_class = False
    for char in body:
        if is_escaped:
            is_escaped = False
        elif char == "\\":
            is_escaped = True
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char == "|" and depth == 0:
            return True
        else:
            depth += {"(": 1, ")": -1}.get(char, 0)
    return False
