"""Schemas that hold together, as one: what `allOf` and keywords beside `$ref`, `anyOf` and `oneOf`
say.

Keywords that are not enforced are dropped: llguidance has named or refused them before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from baton.server.request.grammar.schema.exact_numbers import is_number
from baton.server.request.grammar.schema.number_regex import lcm_of

TYPES = ("null", "boolean", "number", "string", "array", "object")
MAX_OPTIONS = 64
"""Most alternatives of two compositions that hold together."""
MAX_MERGES = 20_000
"""Bound of the work for one schema: compositions may multiply."""
MAX_MERGE_DEPTH = 60
"""Two schemas that refer to themselves would be merged without end."""


class UnwrittenSchema(Exception):
    """A schema, or a composition of schemas, that is left to llguidance as it is."""


class SchemaMerger:
    """Merges the schemas of one document."""

    def __init__(self, resolve: Callable[[str], Any]) -> None:
        """`resolve`: the schema at a reference; raises UnwrittenSchema."""
        self._resolve = resolve
        self._merges = 0
        self._depth = 0

    def merge(self, left: Any, right: Any) -> Any:
        """The schema of values that both allow. Raises UnwrittenSchema."""
        self._merges += 1
        self._depth += 1
        if self._merges > MAX_MERGES or self._depth > MAX_MERGE_DEPTH:
            raise UnwrittenSchema
        try:
            return self._merge(left, right)
        finally:
            self._depth -= 1

    def _merge(self, left: Any, right: Any) -> Any:
        if left is False or right is False:
            return False
        if left is True or left == {}:
            return right
        if right is True or right == {}:
            return left
        left = self.flat(left)
        right = self.flat(right)
        if left is False or right is False:
            return False
        for one, other in ((left, right), (right, left)):
            has_first = "prefixItems" in one or isinstance(one.get("items"), list)
            if has_first and "items" in other:
                raise UnwrittenSchema  # `items` holds for other elements on each side
        both = {**left}
        for key, value in right.items():
            both[key] = self._keyword(key, left, right) if key in left else value
        if "type" in both and not both["type"]:
            return False
        return self._with_objects(both, left, right)

    def flat(self, schema: Any) -> Any:
        """A schema as an object without `allOf`, `$ref` and `const`, or False."""
        if isinstance(schema, bool):
            return {} if schema else False
        if not isinstance(schema, dict):
            raise UnwrittenSchema
        if "const" in schema:
            listed = [schema["const"]]
            if "enum" in schema:
                listed = common_values(schema["enum"], listed)
            schema = {
                ("enum" if key == "const" else key): value
                for key, value in schema.items()
                if key != "enum"
            }
            schema["enum"] = listed
        if "allOf" not in schema and "$ref" not in schema:
            return schema
        # Properties come in the order in which the schema states them.
        whole: Any = {}
        beside: dict[str, Any] = {}
        for key, value in schema.items():
            if key not in ("allOf", "$ref"):
                beside[key] = value
                continue
            parts = [self._resolve(value)] if key == "$ref" else value
            if not isinstance(parts, list):
                raise UnwrittenSchema
            for part in [beside, *parts]:
                whole = self.merge(whole, part)
            beside = {}
        whole = self.merge(whole, beside)
        return whole if whole is False else self.flat(whole)

    def _keyword(self, key: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> Any:
        """Value of a keyword that both have."""
        a = left[key]
        b = right[key]
        if a == b and type(a) is type(b):
            return a
        match key:
            case "type":
                return common_types(a, b)
            case "minimum" | "exclusiveMinimum" | "minLength" | "minItems" | "minProperties":
                return max(_comparable(a), _comparable(b))
            case "maximum" | "exclusiveMaximum" | "maxLength" | "maxItems" | "maxProperties":
                return min(_comparable(a), _comparable(b))
            case "multipleOf":
                return _common_multiple(_comparable(a), _comparable(b))
            case "required":
                return list(dict.fromkeys([*_names(a), *_names(b)]))
            case "enum":
                return common_values(a, b)
            case "items":
                if isinstance(a, list) or isinstance(b, list):
                    raise UnwrittenSchema
                return self.merge(a, b)
            case "anyOf" | "oneOf":
                if (
                    not isinstance(a, list)
                    or not isinstance(b, list)
                    or len(a) * len(b) > MAX_OPTIONS
                ):
                    raise UnwrittenSchema
                return [self.merge(one, other) for one in a for other in b]
            case "properties" | "additionalProperties":
                return a  # `_with_objects` merges them
            case "pattern" | "format" | "prefixItems" | "additionalItems" | "patternProperties":
                raise UnwrittenSchema
            case _:
                return a

    def _with_objects(
        self, both: dict[str, Any], left: Mapping[str, Any], right: Mapping[str, Any]
    ) -> dict[str, Any]:
        """`both` with the properties that both sides allow."""
        if not (left.keys() | right.keys()) & {"properties", "additionalProperties"}:
            return both
        if (left.keys() | right.keys()) & {"patternProperties"}:
            raise UnwrittenSchema
        left_names = _properties(left)
        right_names = _properties(right)
        left_others = left.get("additionalProperties", True)
        right_others = right.get("additionalProperties", True)
        merged = {
            name: self.merge(value, right_names.get(name, right_others))
            for name, value in left_names.items()
        }
        for name, value in right_names.items():
            if name not in merged:
                merged[name] = self.merge(left_others, value)
        if merged:
            both["properties"] = merged
        others = self.merge(left_others, right_others)
        if others is not True:
            both["additionalProperties"] = others
        return both


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    named = schema.get("properties", {})
    if not isinstance(named, dict):
        raise UnwrittenSchema
    return named


def _names(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise UnwrittenSchema
    return value


def _comparable(value: Any) -> Any:
    if not is_number(value):
        raise UnwrittenSchema
    return value


def _common_multiple(left: Any, right: Any) -> Any:
    if not left or not right:
        raise UnwrittenSchema
    common = lcm_of(abs(Fraction(left)), abs(Fraction(right)))
    places = 0
    while (common * 10**places).denominator != 1:
        places += 1
    return Decimal(f"{int(common * 10**places)}e-{places}")


def common_types(left: Any, right: Any) -> list[str]:
    """Types that both have."""
    left_names = type_names(left)
    right_names = type_names(right)
    found = []
    for name in left_names:
        if name in right_names or (name == "integer" and "number" in right_names):
            found.append(name)
        elif name == "number" and "integer" in right_names:
            found.append("integer")
    return list(dict.fromkeys(found))


def type_names(kind: Any) -> list[str]:
    """Types that a schema names, or all of them."""
    if kind is None:
        return list(TYPES)
    names = [kind] if isinstance(kind, str) else kind
    if not isinstance(names, list) or not all(name in TYPES or name == "integer" for name in names):
        raise UnwrittenSchema
    return list(dict.fromkeys(names))


def common_values(left: Any, right: Any) -> list[Any]:
    """Values that both lists have."""
    if not isinstance(left, list) or not isinstance(right, list):
        raise UnwrittenSchema
    return [value for value in left if any(same_value(value, other) for other in right)]


def same_value(left: Any, right: Any) -> bool:
    """True if JSON values are equal: numbers by their value, and a boolean is none."""
    if is_number(left) and is_number(right):
        return left == right
    if type(left) is not type(right):
        return False
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same_value, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(
            same_value(left[key], right[key]) for key in left
        )
    return bool(left == right)
