"""Objects that have no name left for a further property: `patternProperties` whose names are all
listed or required.

llguidance allows a comma behind the last property of such an object, and then no name. Here the
patterns are written out, as schemas of the listed names, and the object becomes closed. Which names
a pattern matches is asked of llguidance itself, so that it is the same here and there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLMatcher

from baton.server.request.grammar.checks.walk import byte_trie, compile_text
from baton.server.request.grammar.lark import quote_text
from baton.server.request.grammar.schema.exact_numbers import schema_json
from baton.server.request.grammar.schema.references import map_subschemas

OPTIONS: Any = {"whitespace_flexible": False, "json_allow_general_unicode_escapes": True}


def without_open_ends(schema: dict[str, Any]) -> dict[str, Any]:
    """An equal schema whose objects are closed where no name is left; the schema itself where each
    has one.
    """
    names = PropertyNames()

    def replace(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        return names.close_object(map_subschemas(part, replace))

    replaced: dict[str, Any] = replace(schema)
    return replaced


@dataclass(slots=True)
class PropertyNames:
    """Answers about the names of objects, each found once."""

    _has_names: dict[str, bool] = field(default_factory=dict)
    _matchers: dict[str, LLMatcher] = field(default_factory=dict)
    """By pattern, a matcher in front of a name."""

    def close_object(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The schema of an object, closed where no name is left. Its parts without a value are
        `false`.
        """
        patterns = schema.get("patternProperties")
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(patterns, dict) or not patterns:
            return schema
        if not isinstance(properties, dict) or not isinstance(required, list):
            return schema
        listed = [*properties, *(name for name in required if name not in properties)]
        if not all(isinstance(name, str) for name in listed):
            return schema
        others = schema.get("additionalProperties", True)
        if self._has_further_name(listed, patterns, is_open=others is not False):
            return schema
        written = {
            name: self._schema_of(name, properties.get(name), patterns, others) for name in listed
        }
        closed = {key: value for key, value in schema.items() if key != "patternProperties"}
        return {**closed, "properties": written, "additionalProperties": False}

    def _schema_of(self, name: str, stated: Any, patterns: Mapping[str, Any], others: Any) -> Any:
        """The schema of a property. `stated`: that of `properties`, None where the name is not
        listed there.
        """
        matching = [part for pattern, part in patterns.items() if self._matches(pattern, name)]
        parts = [part for part in (stated, *matching) if part is not None and part is not True]
        if not matching and stated is None:
            return others
        return parts[0] if len(parts) == 1 else {"allOf": parts} if parts else True

    def _has_further_name(
        self, listed: list[str], patterns: Mapping[str, Any], *, is_open: bool
    ) -> bool:
        """True if an object may have a name that is not listed; also for patterns that llguidance
        refuses.
        """
        probe = {
            "type": "object",
            "properties": dict.fromkeys(listed, False),
            "patternProperties": {pattern: part is not False for pattern, part in patterns.items()},
            "additionalProperties": is_open,
            "minProperties": 1,
        }
        text = schema_json(probe)
        if text not in self._has_names:
            self._has_names[text] = _has_member(text)
        return self._has_names[text]

    def _matches(self, pattern: str, name: str) -> bool:
        if pattern not in self._matchers:
            probe = {
                "type": "object",
                "patternProperties": {pattern: True},
                "additionalProperties": False,
                "minProperties": 1,
            }
            self._matchers[pattern] = _start_object(schema_json(probe))
        quoted = quote_text(name).encode()
        tokens = byte_trie().tokenize_bytes(quoted)
        return self._matchers[pattern].validate_tokens(tokens) == len(tokens)


def _start_object(schema: str) -> LLMatcher:
    """A matcher behind the brace of an object, with an error where there is no such place."""
    matcher = compile_text(LLMatcher.grammar_from_json_schema(schema, overrides=OPTIONS))
    matcher.consume_tokens(byte_trie().tokenize_str("{"))
    return matcher


def _has_member(schema: str) -> bool:
    """False for an object that must have a member and can have none."""
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides=OPTIONS)
    if compile_text(grammar).is_error():  # refused where the whole schema is compiled
        return True
    matcher = _start_object(schema)
    matcher.compute_bitmask()
    return not matcher.is_error()
