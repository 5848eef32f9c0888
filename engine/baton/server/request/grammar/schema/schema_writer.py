"""A schema as rules of llguidance's grammar language, whose numbers are exact and finite.

llguidance compiles the parts without numbers, each as `%json`. The other parts are written here as
llguidance would compile them: properties in the schema's order, white space between all parts. A
part that cannot be written, because of a keyword or a composition, is left to llguidance, too, and
refused if it has a number that llguidance would read as another one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.server.fields import bad
from baton.server.request.grammar.lark import (
    SINGLE_SPACE,
    escape_regex,
    quote_text,
    regex_terminal,
)
from baton.server.request.grammar.schema.empty_parts import is_empty_for_llguidance
from baton.server.request.grammar.schema.exact_numbers import (
    is_exact_for_llguidance,
    is_number,
    schema_json,
    schema_numbers,
)
from baton.server.request.grammar.schema.merging import (
    TYPES,
    SchemaMerger,
    UnwrittenSchema,
    type_names,
)
from baton.server.request.grammar.schema.number_ranges import multiples_schema, range_of
from baton.server.request.grammar.schema.number_regex import (
    NumberRange,
    has_number,
    number_texts,
    range_regexes,
)
from baton.server.request.grammar.schema.number_search import may_hold_number
from baton.server.request.grammar.schema.references import MISSING, find_place, references_of

OPTIONS_KEY = "x-guidance"
"""Member of a schema with options for llguidance; clients' are dropped, because they would change
the server's options.
"""
FLEXIBLE_SPACE = r"[\x20\x0A\x0D\x09]+"
"""llguidance's default."""
MAX_WRITTEN_CHARS = 2**19
"""A grammar is up to ten times as long as its schema: larger schemas are left whole, so that they
are not refused.
"""
MAX_REPEATS = 100_000
MAX_OPTIONAL_SLOTS = 200
"""Elements of an array with a schema of their own that it need not have: each rule of them names
the next.
"""
GROUP_MEMBERS = 4
MAX_WRITE_DEPTH = 80
"""Parts within parts, references among them: llguidance takes longer chains."""
STRING_KEYWORDS = ("minLength", "maxLength", "pattern", "format")
UNWRITTEN_KEYWORDS = frozenset(("patternProperties", "$dynamicRef", "$recursiveRef"))
"""Keywords that llguidance enforces, and that are not written here."""
ENFORCED = frozenset(
    (
        *("type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf"),
        *("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *STRING_KEYWORDS,
        *UNWRITTEN_KEYWORDS,
    )
)
DEFINITIONS = ("$defs", "definitions")
SCALAR = (
    r'([^"\\\x00-\x1F\x7F]|\\["\\bfnrt]|\\u([0-9a-ce-fA-CE-F][0-9a-fA-F]{3}'
    r"|[dD][0-7][0-9a-fA-F]{2}|[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))"
)
"""A character of a JSON string, as llguidance takes it."""


def write_schema(schema: Mapping[str, Any], options: Mapping[str, Any], param: str) -> str | None:
    """A grammar in llguidance's language; None: llguidance takes the schema as it is. Raises
    BadRequest.

    Args:
        schema: with exact numbers (`exact_numbers.exact_schema`).
        options: llguidance's, for its parts.
        param: path of the schema.
    """
    if not may_hold_number(schema):
        return None
    writer = _SchemaWriter(schema, options, param)
    try:
        start = writer.write(schema)
    except UnwrittenSchema:
        writer.refuse_inexact(schema)
        return None
    if start is None:
        raise bad(param, "allows no answer: its bounds exclude each other")
    text = writer.text(start)
    if len(text) > MAX_WRITTEN_CHARS:
        writer.refuse_inexact(schema)
        return None
    return text


@dataclass(slots=True)
class _SchemaWriter:
    """Rules for the parts of one schema. A part that allows no value has no rule: None."""

    root: Mapping[str, Any]
    options: Mapping[str, Any]
    param: str
    lines: list[str] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)
    """Names of rules and terminals by what they stand for."""
    _empty: set[str] = field(default_factory=set)
    """References to parts that allow no value."""
    _checked: dict[str, bool] = field(default_factory=dict)
    """By the JSON of a part that llguidance compiles: it allows no value."""
    _depth: int = 0
    _merger: SchemaMerger = field(init=False)

    def __post_init__(self) -> None:
        self._merger = SchemaMerger(self._resolve)

    def text(self, start: str) -> str:
        space = self._space_regex()
        head = [SINGLE_SPACE]
        if space is not None:
            head.append(f"%ignore {regex_terminal(space)}")
        return "\n".join([*head, f"start: {start}", *self.lines]) + "\n"

    def _space_regex(self) -> str | None:
        pattern = self.options.get("whitespace_pattern")
        if pattern is not None:
            return str(pattern)
        return FLEXIBLE_SPACE if self.options.get("whitespace_flexible", True) else None

    # ---------------------------------------------------------------------- schemas

    def write(self, schema: Any) -> str | None:
        """Name of a rule for the values of a schema. Raises UnwrittenSchema for one to be left
        whole.
        """
        if not may_hold_number(schema) or self._depth >= MAX_WRITE_DEPTH:
            return self._leave(schema)
        self._depth += 1
        try:
            return self._write_part(schema)
        finally:
            self._depth -= 1

    def _write_part(self, schema: Any) -> str | None:
        if isinstance(schema, dict):
            stated = {key: value for key, value in schema.items() if key not in DEFINITIONS}
            if list(stated) == ["$ref"]:
                return self._write_reference(stated["$ref"])
        try:
            flat = self._merger.flat(schema)
            if flat is False:
                return None
            return self._write_flat(flat) if _enforced(flat) else self._write_any()
        except UnwrittenSchema:
            return self._leave(schema)

    def _write_flat(self, schema: dict[str, Any]) -> str | None:
        if schema.keys() & UNWRITTEN_KEYWORDS or ("$id" in schema and schema is not self.root):
            raise UnwrittenSchema
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self._write_composed(schema, key)
        if "enum" in schema:
            return self._write_listed(schema)
        return self._either(
            self._write_type(schema, name) for name in type_names(schema.get("type"))
        )

    def _write_any(self) -> str:
        """Any value."""
        key = "any"
        if key not in self._names:
            name = self._new_name(key, "any")
            body = " | ".join(filter(None, (self._write_type({}, kind) for kind in TYPES)))
            self.lines.append(f"{name}: {body}")
        return self._names[key]

    def _write_composed(self, schema: dict[str, Any], key: str) -> str | None:
        """Alternatives of `anyOf` or `oneOf`, each with the keywords beside them."""
        names = list(schema)
        before = {
            name: schema[name] for name in names[: names.index(key)] if name not in DEFINITIONS
        }
        behind = {
            name: schema[name] for name in names[names.index(key) + 1 :] if name not in DEFINITIONS
        }
        options = schema[key]
        if not isinstance(options, list):
            raise UnwrittenSchema
        enforced = _enforced({**before, **behind})
        if not enforced:
            return self._either(map(self.write, options))
        merge = self._merger.merge
        return self._either(self.write(merge(merge(before, option), behind)) for option in options)

    def _write_type(self, schema: dict[str, Any], kind: str) -> str | None:
        match kind:
            case "null":
                return self._rule("null", '"null"')
            case "boolean":
                return self._terminal(["true|false"])
            case "integer" | "number":
                return self._write_number(range_of(schema, kind, self.param))
            case "string":
                limits = {key: schema[key] for key in STRING_KEYWORDS if key in schema}
                return self._leave({"type": "string", **limits})
            case "array":
                return self._write_array(schema)
            case _:
                return self._write_object(schema)

    def _write_reference(self, reference: Any) -> str | None:
        if not isinstance(reference, str):
            raise UnwrittenSchema
        if reference in self._empty:
            return None
        key = f"$ref {reference}"
        if key in self._names:
            return self._names[key]
        target = self._resolve(reference)
        name = self._new_name(key, "ref")
        body = self.write(target)
        self.lines.append(f"{name}: {body or self._rule('null', chr(34) + 'null' + chr(34))}")
        if body is None:
            self._empty.add(reference)  # nothing that can be reached names the rule
        return None if body is None else name

    def _resolve(self, reference: Any) -> Any:
        """The schema at a reference within the document. Raises UnwrittenSchema."""
        if not isinstance(reference, str):
            raise UnwrittenSchema
        target = find_place(self.root, reference)
        if target is MISSING:
            raise UnwrittenSchema
        if reference == "#":
            return {key: value for key, value in target.items() if key not in DEFINITIONS}
        if target == {"$ref": reference}:
            raise UnwrittenSchema
        return target

    # ---------------------------------------------------------------------- numbers and listed valu

    def _write_number(self, numbers: NumberRange) -> str | None:
        if not has_number(numbers):
            return None
        regexes = range_regexes(numbers)
        return (
            self._json(self._text_of(multiples_schema(numbers, self.param)))
            if regexes is None
            else self._terminal(regexes)
        )

    def _write_listed(self, schema: dict[str, Any]) -> str | None:
        """The values of `enum` that the other keywords allow."""
        listed = schema["enum"]
        if not isinstance(listed, list):
            raise UnwrittenSchema
        kinds = type_names(schema.get("type"))
        beside = _enforced(schema) - {"enum", "type"}
        strings = [value for value in listed if isinstance(value, str)]
        texts = [
            text
            for value in listed
            if is_number(value)
            for text in self._listed_texts(schema, kinds, value)
        ]
        options: list[str | None] = []
        if strings and "string" in kinds:
            limits = {key: schema[key] for key in STRING_KEYWORDS if key in schema}
            unique = list(dict.fromkeys(strings))
            options.append(self._leave({"type": "string", "enum": unique, **limits}))
        if texts:
            options.append(self._terminal(["|".join(map(escape_regex, dict.fromkeys(texts)))]))
        for value in listed:
            if isinstance(value, (list, dict)):
                kind = "array" if isinstance(value, list) else "object"
                if beside - set(STRING_KEYWORDS):
                    raise UnwrittenSchema
                options.append(self.write(_schema_of_value(value)) if kind in kinds else None)
            elif value is None and "null" in kinds:
                options.append(self._rule("null", '"null"'))
            elif isinstance(value, bool) and "boolean" in kinds:
                options.append(self._rule(json.dumps(value), f'"{json.dumps(value)}"'))
        return self._either(options)

    def _listed_texts(
        self, schema: Mapping[str, Any], kinds: Sequence[str], value: Any
    ) -> tuple[str, ...]:
        kind = "number" if "number" in kinds else "integer"
        if kind not in kinds or not range_of(schema, kind, self.param).holds(value):
            return ()
        texts = number_texts(value)
        return (
            texts
            if kind == "number"
            else tuple(text for text in texts if text.lstrip("-").isdigit())
        )

    # ---------------------------------------------------------------------- arrays and objects

    def _write_array(self, schema: Mapping[str, Any]) -> str | None:
        prefix, items = _array_parts(schema)
        least = schema.get("minItems", 0)
        most = schema.get("maxItems")
        if not isinstance(least, int) or not (most is None or isinstance(most, int)):
            raise UnwrittenSchema
        if not 0 <= least <= MAX_REPEATS or (most is not None and most < 0):
            raise UnwrittenSchema
        slots = [self.write(part) for part in prefix[:most]]
        if None in slots:
            reachable = slots.index(None)
            slots = slots[:reachable]
            most = reachable
        following = None if most is not None and most <= len(slots) else self.write(items)
        if following is None:
            most = len(slots)
        if most is not None and most < least:
            return None
        body = self._write_slots([slot for slot in slots if slot], following, least, most)
        return self._rule_of(f'"[" {body} "]"', "array")

    def _write_slots(
        self, slots: list[str], following: str | None, least: int, most: int | None
    ) -> str:
        """Elements with commas between them."""
        rest = ""
        if following is not None:
            low = max(0, least - len(slots))
            high = None if most is None or most > MAX_REPEATS else most - len(slots)
            if not slots:
                behind = _repeat(
                    f'"," {following}', max(0, low - 1), None if high is None else high - 1
                )
                return f"{following} {behind}" if least else f"({following} {behind})?"
            rest = _repeat(f'"," {following}', low, high)
        if len(slots) - least > MAX_OPTIONAL_SLOTS:
            raise UnwrittenSchema
        for place in range(len(slots) - 1, -1, -1):
            comma = '"," ' if place else ""
            rest = f"{comma}{slots[place]} {rest}"
            if place >= least:
                rest = f"({self._rule_of(rest, 'slots')})?"
        return rest

    def _write_object(self, schema: Mapping[str, Any]) -> str | None:
        named = schema.get("properties", {})
        required = schema.get("required", [])
        others = schema.get("additionalProperties", True)
        if not isinstance(named, dict) or not isinstance(required, list):
            raise UnwrittenSchema
        if not all(isinstance(name, str) for name in required):
            raise UnwrittenSchema
        least, most = _limits_of_others(
            schema, len(set(required)), len(named.keys() | set(required))
        )
        members: list[tuple[str, bool]] = []
        for name in dict.fromkeys([*named, *required]):
            value = self.write(named.get(name, others))
            is_required = name in required
            if value is None and is_required:
                return None
            if value is not None:
                members.append((f'{quote_text(json_text(name))} ":" {value}', is_required))
        other = self.write(others)
        if other is None and least:
            return None
        if other is not None and most != 0:
            key = self._key_terminal(list(dict.fromkeys([*named, *required])))
            pair = self._rule_of(f'{key} ":" {other}', "pair")
            behind = _repeat(f'"," {pair}', max(0, least - 1), None if most is None else most - 1)
            members.append((f"{pair} {behind}", least > 0))
        return self._rule_of(f'"{{" {self._write_members(members)} "}}"', "object")

    def _write_members(self, members: Sequence[tuple[str, bool]]) -> str:
        """Members with commas between them. `members`: the text of each, and whether it is
        required.
        """
        texts = [(self._rule_of(text, "member"), is_required) for text, is_required in members]
        parts = [
            MemberGroup(member, f'"," {member}' if is_required else f'("," {member})?', is_required)
            for member, is_required in texts
        ]
        # A tree: llguidance overflows its stack where each member's rule names the next.
        while len(parts) > 1:
            parts = [
                self._group_members(parts[i : i + GROUP_MEMBERS])
                for i in range(0, len(parts), GROUP_MEMBERS)
            ]
        if not parts:
            return '""'
        return parts[0].first if parts[0].is_required else f"({parts[0].first})?"

    def _group_members(self, parts: Sequence[MemberGroup]) -> MemberGroup:
        options = []
        for i, part in enumerate(parts):
            options.append(" ".join([part.first, *(other.later for other in parts[i + 1 :])]))
            if part.is_required:
                break
        return MemberGroup(
            self._rule_of(" | ".join(options), "first"),
            self._rule_of(" ".join(part.later for part in parts), "later"),
            any(part.is_required for part in parts),
        )

    def _key_terminal(self, names: Sequence[str]) -> str:
        """A JSON string that is none of these names."""
        excluded = "|".join(escape_regex(json_text(name)) for name in names)
        return self._terminal([f'"{SCALAR}*"'], excluded)

    # ---------------------------------------------------------------------- rules

    def _either(self, options: Iterator[str | None] | Sequence[str | None]) -> str | None:
        found = list(dict.fromkeys(option for option in options if option is not None))
        if len(found) < 2:
            return found[0] if found else None
        return self._rule_of(" | ".join(found), "choice")

    def _rule_of(self, body: str, prefix: str) -> str:
        return self._rule(f"{prefix} {body}", body, prefix)

    def _rule(self, key: str, body: str, prefix: str = "word") -> str:
        if key not in self._names:
            name = self._new_name(key, prefix)
            self.lines.append(f"{name}: {body}")
        return self._names[key]

    def _terminal(self, regexes: Sequence[str], excluded: str = "") -> str:
        """Lexeme that matches each of `regexes` and not `excluded`."""
        body = " & ".join(map(regex_terminal, regexes))
        if excluded:
            body += f" & ~{regex_terminal(excluded)}"
        key = f"terminal {body}"
        if key not in self._names:
            name = self._new_name(key, "T")
            self.lines.append(f"{name}: {body}")
        return self._names[key]

    def _new_name(self, key: str, prefix: str) -> str:
        self._names[key] = f"{prefix}_{len(self._names)}"
        return self._names[key]

    def _leave(self, schema: Any) -> str | None:
        """A part that llguidance compiles. Raises BadRequest for numbers that it would read as
        others.
        """
        if schema is False:
            return None
        part = {} if schema is True else schema
        if not isinstance(part, dict):
            raise UnwrittenSchema
        references = list(references_of(part))
        if any(
            not reference.startswith(("#/$defs/", "#/definitions/")) for reference in references
        ):
            raise UnwrittenSchema
        if references:
            part = {**part, **{key: self.root[key] for key in DEFINITIONS if key in self.root}}
        self.refuse_inexact(part)
        text = self._text_of(part)
        if text not in self._checked:
            self._checked[text] = is_empty_for_llguidance(part, text)
        return None if self._checked[text] else self._json(text)

    def _text_of(self, schema: Mapping[str, Any]) -> str:
        return schema_json({**schema, OPTIONS_KEY: self.options})

    def _json(self, text: str) -> str:
        return self._rule(f"json {text}", f"%json {text}", "json")

    def refuse_inexact(self, schema: Any) -> None:
        """Raise BadRequest for the first number that llguidance reads as another one."""
        for place, keyword, value in schema_numbers(schema):
            if not is_exact_for_llguidance(keyword, value):
                raise bad(
                    f"{self.param}{place}",
                    f"is {_shown(value)}, which cannot be enforced exactly beside other keywords "
                    "of the "
                    "schema; write it with fewer digits, or simplify the schema",
                )


@dataclass(frozen=True, slots=True)
class MemberGroup:
    """Members of an object that follow each other."""

    first: str
    """Rule in which one of them is the object's first member."""
    later: str
    """Rule in which each has a comma in front; it may be empty where none is required."""
    is_required: bool


def _enforced(schema: Mapping[str, Any]) -> set[str]:
    """Keywords of a schema that are enforced."""
    return set(ENFORCED & schema.keys())


def _limits_of_others(
    schema: Mapping[str, Any], required: int, named: int
) -> tuple[int, int | None]:
    """Number of the properties that have no name in the schema."""
    least = schema.get("minProperties", 0)
    most = schema.get("maxProperties")
    if least == 0 and most is None:
        return 0, None
    is_counted = isinstance(least, int) and (most is None or isinstance(most, int))
    # llguidance enforces these limits only where all named properties are required.
    if (
        not is_counted
        or named > required
        or least > MAX_REPEATS
        or (most is not None and not required <= most)
    ):
        raise UnwrittenSchema
    return max(0, least - required), None if most is None or most > MAX_REPEATS else most - required


def _array_parts(schema: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Schemas of the first elements, and of the others. Older drafts have a list of the former in
    `items`.
    """
    items = schema.get("items", True)
    prefix = schema.get("prefixItems", [])
    if isinstance(items, list):
        prefix = items
        items = schema.get("additionalItems", True)
    elif "prefixItems" in schema and "additionalItems" in schema:
        raise UnwrittenSchema
    if not isinstance(prefix, list):
        raise UnwrittenSchema
    return prefix, items


def _schema_of_value(value: Any) -> dict[str, Any]:
    """A schema that only this array or object satisfies."""
    if isinstance(value, list):
        parts = [{"const": part} for part in value]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
    named = {name: {"const": part} for name, part in value.items()}
    return {
        "type": "object",
        "properties": named,
        "required": list(named),
        "additionalProperties": False,
    }


def _repeat(part: str, least: int, most: int | None) -> str:
    if most is None:
        return f"({part})*" if least == 0 else f"({part}){{{least},}}"
    return "" if most == 0 else f"({part}){{{least},{most}}}"


def json_text(text: str) -> str:
    """A JSON string, as llguidance writes names."""
    return json.dumps(text, ensure_ascii=False)


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
