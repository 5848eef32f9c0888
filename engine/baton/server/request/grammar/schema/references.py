"""Parts of a schema that are schemas, and references to them within the document."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator
from typing import Any

SUBSCHEMA = frozenset(
    (
        *("additionalProperties", "items", "additionalItems"),
        *("not", "contains", "if", "then", "else", "propertyNames"),
    )
)
SUBSCHEMA_LISTS = frozenset(("anyOf", "allOf", "oneOf", "prefixItems", "items"))
SUBSCHEMA_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
"""Keywords with schemas: those that llguidance enforces, and others whose numbers and objects count
alike.
"""
MISSING = object()


def find_place(root: Any, reference: str) -> Any:
    """The part of a document that a reference such as `#/$defs/a` names; MISSING for other
    references, and where there is none.
    """
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return MISSING
    place = root
    for escaped in urllib.parse.unquote(reference)[2:].split("/"):
        name = escaped.replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict) and name in place:
            place = place[name]
        elif isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        else:
            return MISSING
    return place


def references_of(root: Any) -> Iterator[str]:
    """Values of all `$ref` in a document, in whatever place."""
    for part in objects_of(root):
        reference = part.get("$ref")
        if isinstance(reference, str):
            yield reference


def objects_of(root: Any) -> Iterator[dict[str, Any]]:
    """All objects of a document, also those that are no schemas."""
    pending = [root]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            yield part
            pending.extend(part.values())
        elif isinstance(part, list):
            pending.extend(part)


def map_subschemas(schema: dict[str, Any], change: Any) -> dict[str, Any]:
    """A schema with `change(part)` in the place of each part that is a schema; itself where nothing
    changes.
    """
    changed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in SUBSCHEMA_MAPS and isinstance(value, dict):
            parts = {name: change(part) for name, part in value.items()}
            changed[key] = parts if any(parts[name] is not value[name] for name in value) else value
        elif key in SUBSCHEMA_LISTS and isinstance(value, list):
            items = [change(part) for part in value]
            is_same = all(new is old for new, old in zip(items, value, strict=True))
            changed[key] = value if is_same else items
        elif key in SUBSCHEMA:
            changed[key] = change(value)
        else:
            changed[key] = value
    is_same = all(changed[key] is value for key, value in schema.items())
    return schema if is_same else changed
