"""Parts of a schema that no value satisfies, as far as its structure says so.

llguidance leaves out an optional property, item or alternative whose schema is `false`, or whose
own keywords exclude each other. It refuses a whole schema for a reference to such a part, and takes
one whose values would contain each other without end, which no answer can complete. Here both
become `false`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from baton.server.request.grammar.schema.references import (
    MISSING,
    find_place,
    map_subschemas,
    objects_of,
    references_of,
)

COMPARED = frozenset(
    (
        "pattern",
        "format",
        "minLength",
        "maxLength",
        "enum",
        "const",
        "allOf",
        "anyOf",
        "oneOf",
        "$ref",
    )
)
"""Keywords that may exclude each other."""
ALONE = frozenset(("format", "anyOf", "oneOf"))
"""Those that have a value where nothing else is stated."""
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


def without_empty_parts(schema: dict[str, Any]) -> dict[str, Any] | None:
    """An equal schema, in which parts that no value satisfies are `false`; None: no value satisfies
    the whole.

    The schema itself where it has no such part.
    """
    satisfiable = SatisfiableParts(schema)
    if not satisfiable.has_value(schema):
        return None

    def replace(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        return map_subschemas(part, replace) if satisfiable.has_value(part) else False

    replaced = map_subschemas(schema, replace)
    if any(find_place(replaced, reference) is MISSING for reference in satisfiable.references):
        return schema  # a reference leads into a part that is left out
    return replaced


class SatisfiableParts:
    """Which parts of one schema have a value. A part is called empty only where that is certain."""

    def __init__(self, root: dict[str, Any]) -> None:
        found = dict.fromkeys(references_of(root))
        # A schema with a name of its own is where references inside it begin.
        has_inner_root = any("$id" in part for part in objects_of(root) if part is not root)
        known = {} if has_inner_root else {each: find_place(root, each) for each in found}
        self.references = [each for each, place in known.items() if place is not MISSING]
        self._empty = set(self.references)
        """References to parts without a value: all, until one is found."""
        self._asked: set[str] = set()
        """Empty references that the latest answer of `has_value` depends on."""
        self._find_satisfiable(known)

    def _find_satisfiable(self, places: Mapping[str, Any]) -> None:
        """The least fixed point: each reference is asked again when one that it depends on has a
        value.
        """
        users = defaultdict[str, list[str]](list)
        queue = list(self.references)
        while queue:
            reference = queue.pop()
            if reference not in self._empty:
                continue
            self._asked = set()
            if self.has_value(places[reference]):
                self._empty.discard(reference)
                queue += users.pop(reference, ())
            else:
                for used in self._asked:
                    users[used].append(reference)

    def has_value(self, schema: Any) -> bool:
        if not isinstance(schema, dict):
            return schema is not False
        return (
            self._has_reference_value(schema)
            and self._has_listed_value(schema)
            and self._has_composed_value(schema)
            and self._has_typed_value(schema)
        )

    def _has_reference_value(self, schema: Mapping[str, Any]) -> bool:
        reference = schema.get("$ref")
        if not isinstance(reference, str) or reference not in self._empty:
            return True
        self._asked.add(reference)
        return False

    def _has_listed_value(self, schema: Mapping[str, Any]) -> bool:
        return schema.get("enum") != []

    def _has_composed_value(self, schema: Mapping[str, Any]) -> bool:
        if not all(map(self.has_value, _list_of(schema, "allOf"))):
            return False
        choices = [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
        return all(any(map(self.has_value, options)) for options in choices)

    def _has_typed_value(self, schema: Mapping[str, Any]) -> bool:
        stated = schema.get("type", TYPES)
        kinds = [stated] if isinstance(stated, str) else stated
        if not isinstance(kinds, Sequence):
            return True
        return any(self._has_value_of_type(schema, kind) for kind in kinds)

    def _has_value_of_type(self, schema: Mapping[str, Any], kind: Any) -> bool:
        if kind in ("integer", "number"):
            return not _is_less(schema, "maximum", "minimum")
        if kind == "string":
            return not _is_less(schema, "maxLength", "minLength")
        if kind == "array":
            return not _is_less(schema, "maxItems", "minItems") and self._has_items(schema)
        if kind == "object":
            is_bounded = _is_less(schema, "maxProperties", "minProperties")
            return not is_bounded and self._has_required_properties(schema)
        return True

    def _has_items(self, schema: Mapping[str, Any]) -> bool:
        """The items that an array must have."""
        least = schema.get("minItems", 0)
        if not _is_number(least) or least < 1:
            return True
        items = schema.get("items", True)
        first = items if isinstance(items, list) else _list_of(schema, "prefixItems")
        rest = schema.get("additionalItems", True) if isinstance(items, list) else items
        if not all(self.has_value(part) for i, part in enumerate(first) if i < least):
            return False
        return least <= len(first) or self.has_value(rest)

    def _has_required_properties(self, schema: Mapping[str, Any]) -> bool:
        properties = schema.get("properties", {})
        others = schema.get("additionalProperties", True)
        has_patterns = bool(schema.get("patternProperties"))
        for name in _list_of(schema, "required"):
            if isinstance(properties, dict) and isinstance(name, str) and name in properties:
                if not self.has_value(properties[name]):
                    return False
            elif not has_patterns and not self.has_value(others):
                return False
        return True


def _list_of(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _is_number(value: Any) -> bool:
    return not isinstance(value, (bool, str, list, dict)) and value is not None


def _is_less(schema: Mapping[str, Any], most: str, least: str) -> bool:
    """True where the largest number that a schema allows is less than the smallest."""
    high: Any = schema.get(most)
    low: Any = schema.get(least)
    return _is_number(high) and _is_number(low) and bool(high < low)


def is_empty_for_llguidance(schema: Mapping[str, Any], text: str) -> bool:
    """True for a schema without a value by its patterns, formats and lengths, which llguidance
    compares.

    Args:
        text: the schema with its definitions, as JSON.
    """
    if not any(map(_may_exclude_itself, objects_of(schema))):
        return False
    grammar = LLMatcher.grammar_from_json_schema(text)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return is_error and "Unsatisfiable schema" in messages[0]


def _may_exclude_itself(schema: Mapping[str, Any]) -> bool:
    found = COMPARED & schema.keys()
    if found <= {"minLength", "maxLength"}:
        return _is_less(schema, "maxLength", "minLength")
    if found == {"enum"}:
        return not all(isinstance(value, str) for value in _list_of(schema, "enum"))
    return len(found) > 1 or not found <= ALONE
