"""Search of a schema for numbers that an answer to it may have. Deterministic, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.server.request.grammar.schema.exact_numbers import schema_numbers


def may_hold_number(schema: Any) -> bool:
    """False if no answer to the schema has a number."""
    if not isinstance(schema, dict):
        return schema is not False
    for key in ("$ref", "allOf", "anyOf", "oneOf"):
        if key in schema:
            return True
    if "const" in schema or "enum" in schema:
        return any(
            True
            for _ in schema_numbers(
                {key: schema[key] for key in ("const", "enum") if key in schema}
            )
        )
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if any(name not in ("null", "boolean", "string", "object", "array") for name in kinds):
        return True
    if "object" in kinds and _may_member_hold_number(schema):
        return True
    return "array" in kinds and _may_item_hold_number(schema)


def _may_member_hold_number(schema: Mapping[str, Any]) -> bool:
    if may_hold_number(schema.get("additionalProperties", True)):
        return True
    named = [*_values(schema, "properties"), *_values(schema, "patternProperties")]
    return any(map(may_hold_number, named))


def _may_item_hold_number(schema: Mapping[str, Any]) -> bool:
    prefix = schema.get("prefixItems", [])
    items = schema.get("items", True)
    parts = [*(prefix if isinstance(prefix, list) else [True])]
    parts += items if isinstance(items, list) else [items]
    if isinstance(items, list):
        parts.append(schema.get("additionalItems", True))
    return any(map(may_hold_number, parts))


def _values(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema.get(key, {})
    return list(found.values()) if isinstance(found, dict) else [True]
