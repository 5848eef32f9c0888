"""Structural tags: free text with tagged parts, each of which follows a grammar of its own.

Two forms are read: OpenAI-compatible servers' first one,

    {"type": "structural_tag", "triggers": ["<f="],
     "structures": [{"begin": "<f=add>", "schema": {...}, "end": "</f>"}]}

in which a text may contain any number of tagged parts and a trigger must begin one of them; and
xgrammar's `format`, a tree of texts, grammars and tags.

Literals are divided at the tokens that stand for a whole marker (`markers`). Where a trigger is
text, the free text before it is a lazy lexeme, which ends with the first trigger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from llguidance import LLMatcher
from msgspec import Meta

from baton.errors import UnsupportedParameter
from baton.server import fields
from baton.server.fields import bad
from baton.server.request.grammar.checks.walk import has_no_text
from baton.server.request.grammar.json_schema import check_depth
from baton.server.request.grammar.lark import GrammarText, regex_terminal
from baton.server.request.grammar.lark_builder import LarkBuilder
from baton.server.request.grammar.markers import MarkerTokens

MAX_TAGS = 256


class TagStructure(msgspec.Struct, kw_only=True):
    begin: str
    schema: Any = None
    end: str = ""


class LegacyTags(msgspec.Struct, kw_only=True):
    structures: Annotated[list[TagStructure], Meta(min_length=1, max_length=MAX_TAGS)]
    triggers: Annotated[list[str], Meta(min_length=1, max_length=MAX_TAGS)]


def structural_grammar(
    value: Any, param: str, whitespace: str, markers: MarkerTokens
) -> GrammarText:
    """The grammar of a structural tag. Raises BadRequest or UnsupportedParameter."""
    if not isinstance(value, dict):
        raise bad(param, "must be an object with format, or with structures and triggers")
    builder = LarkBuilder(markers, whitespace)
    if value.get("format") is not None:
        check_depth(value["format"], f"{param}.format")
        parts = FormatReader(builder)
        root = parts.read(value["format"], f"{param}.format", is_last=True)
        return GrammarText(builder.text(root), tuple(builder.checked_schemas))
    tags = fields.read(LegacyTags, value, f"{param}.")
    options = [_legacy_tag(builder, tags, index, param) for index in range(len(tags.structures))]
    text = builder.text(f"({' | '.join(options)})* FREE_TEXT")
    return GrammarText(text, tuple(builder.checked_schemas))


def _legacy_tag(builder: LarkBuilder, tags: LegacyTags, index: int, param: str) -> str:
    tag = tags.structures[index]
    path = f"{param}.structures[{index}]"
    trigger = find_trigger(tags.triggers, tag.begin, f"{path}.begin")
    head, included = builder.text_until(trigger)
    schema = builder.schema(tag.schema, f"{path}.schema")
    rest = builder.literal(tag.begin[len(included) :])
    return builder.add_rule(f"{head} {rest} {schema} {builder.literal(tag.end)}", "tag")


def find_trigger(triggers: Sequence[str], begin: str, param: str) -> str:
    """The trigger that a tag begins with. Raises BadRequest."""
    for trigger in triggers:
        if trigger and begin.startswith(trigger):
            return trigger
    raise bad(param, "begins with none of the triggers; give each tag a trigger")


class TagFormat(msgspec.Struct, kw_only=True):
    """`tag` of the form with `format`."""

    begin: str
    content: Any
    end: str | list[str] = ""


class TriggeredTags(msgspec.Struct, kw_only=True):
    triggers: Annotated[list[str], Meta(min_length=1, max_length=MAX_TAGS)]
    tags: Annotated[list[TagFormat], Meta(min_length=1, max_length=MAX_TAGS)]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: list[str] = []


class SeparatedTags(msgspec.Struct, kw_only=True):
    tags: Annotated[list[TagFormat], Meta(min_length=1, max_length=MAX_TAGS)]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class RepeatFormat(msgspec.Struct, kw_only=True):
    content: Any
    min: Annotated[int, Meta(ge=0, le=10_000)] = 0
    max: Annotated[int, Meta(ge=-1, le=10_000)] = -1


@dataclass(frozen=True, slots=True)
class FormatReader:
    """Reads xgrammar's `format`. Methods return parts of a rule; `is_last`: nothing follows in the
    answer.
    """

    builder: LarkBuilder

    def read(self, value: Any, param: str, *, is_last: bool) -> str:
        if not isinstance(value, dict) or not isinstance(value.get("type"), str):
            raise bad(param, "must be an object with a type")
        kind = value["type"]
        simple = SIMPLE_FORMATS.get(kind)
        if simple is not None:
            return simple(self, value, param)
        nested = NESTED_FORMATS.get(kind)
        if nested is None:
            known = ", ".join((*SIMPLE_FORMATS, *NESTED_FORMATS))
            raise UnsupportedParameter(
                f"{param}.type is {kind[:40]!r}, which is not supported; use one of {known}",
                param=f"{param}.type",
            )
        return nested(self, value, param, is_last)

    def read_literal(self, value: dict[str, Any], param: str) -> str:
        return self.builder.literal(_text_field(value, "value", param))

    def read_schema(self, value: dict[str, Any], param: str) -> str:
        if value.get("style", "json") != "json":
            raise UnsupportedParameter(
                f"{param}.style is not supported; leave it out", param=f"{param}.style"
            )
        return self.builder.schema(value.get("json_schema"), f"{param}.json_schema")

    def read_regex(self, value: dict[str, Any], param: str) -> str:
        pattern = _text_field(value, "pattern", param)
        if has_no_text(LLMatcher.grammar_from_regex(pattern)):
            raise bad(f"{param}.pattern", "matches no text")
        return regex_terminal(pattern)

    def read_grammar(self, value: dict[str, Any], param: str) -> str:
        return self.builder.ebnf(_text_field(value, "grammar", param), f"{param}.grammar")

    def read_any_text(self, value: dict[str, Any], param: str, is_last: bool) -> str:
        if value.get("excludes"):
            raise UnsupportedParameter(
                f"{param}.excludes is not supported; leave it out", param=f"{param}.excludes"
            )
        if not is_last:
            raise bad(
                param,
                "is any_text before something else; only a const_string or a tag may follow "
                "any_text",
            )
        return "FREE_TEXT"

    def read_sequence(self, value: dict[str, Any], param: str, is_last: bool) -> str:
        elements = _list_field(value, "elements", param)
        parts = []
        included = ""
        for index, element in enumerate(elements):
            path = f"{param}.elements[{index}]"
            ends_here = is_last and index == len(elements) - 1
            following = None if ends_here else _first_literal(elements[index + 1 : index + 2])
            if _is_any_text(element) and following:
                part, included_next = self.builder.text_until(following)
                parts.append(part)
            else:
                part = self.read(_without_start(element, included), path, is_last=ends_here)
                parts.append(part)
                included_next = ""
            included = included_next
        return self.builder.add_rule(" ".join(parts) or '""')

    def read_choice(self, value: dict[str, Any], param: str, is_last: bool) -> str:
        options = [
            self.read(element, f"{param}.elements[{index}]", is_last=is_last)
            for index, element in enumerate(_list_field(value, "elements", param))
        ]
        return self.builder.add_rule(" | ".join(options))

    def read_optional(self, value: dict[str, Any], param: str, is_last: bool) -> str:
        return f"({self.read(value.get('content'), f'{param}.content', is_last=is_last)})?"

    def read_star(self, value: dict[str, Any], param: str, is_last: bool) -> str:
        return f"({self.read(value.get('content'), f'{param}.content', is_last=False)})*"

    def read_plus(self, value: dict[str, Any], param: str, is_last: bool) -> str:
        return f"({self.read(value.get('content'), f'{param}.content', is_last=False)})+"

    def read_repeat(self, value: dict[str, Any], param: str, is_last: bool) -> str:
        form = fields.read(RepeatFormat, value, f"{param}.")
        most = "" if form.max < 0 else str(form.max)
        if most and form.max < form.min:
            raise bad(f"{param}.max", f"is {form.max}, less than min")
        content = self.read(form.content, f"{param}.content", is_last=False)
        return f"({content}){{{form.min},{most}}}"

    def read_tag(self, value: dict[str, Any], param: str, is_last: bool) -> str:
        tag = fields.read(TagFormat, value, f"{param}.")
        return self._tag_behind(tag, "", param, is_last)

    def read_triggered(self, value: dict[str, Any], param: str, is_last: bool) -> str:
        form = fields.read(TriggeredTags, value, f"{param}.")
        if form.excludes:
            raise UnsupportedParameter(
                f"{param}.excludes is not supported; leave it out", param=f"{param}.excludes"
            )
        direct = []
        behind_text = []
        for index, tag in enumerate(form.tags):
            path = f"{param}.tags[{index}]"
            trigger = find_trigger(form.triggers, tag.begin, f"{path}.begin")
            head, included = self.builder.text_until(trigger)
            rest = self._tag_behind(tag, included, path, is_last=False)
            behind_text.append(f"{head} {rest}")
            direct.append(self._tag_behind(tag, "", path, is_last=False))
        once = self.builder.add_rule(" | ".join(direct))
        more = self.builder.add_rule(" | ".join(behind_text))
        if form.stop_after_first and form.at_least_one:
            return once
        if not is_last:
            raise bad(param, "allows text after its tags, so nothing may follow it")
        if form.stop_after_first:
            return self.builder.add_rule(f"{more} | FREE_TEXT")
        return f"{once} {more}* FREE_TEXT" if form.at_least_one else f"{more}* FREE_TEXT"

    def read_separated(self, value: dict[str, Any], param: str, is_last: bool) -> str:
        form = fields.read(SeparatedTags, value, f"{param}.")
        options = [
            self._tag_behind(tag, "", f"{param}.tags[{index}]", is_last=False)
            for index, tag in enumerate(form.tags)
        ]
        once = self.builder.add_rule(" | ".join(options))
        several = once
        if not form.stop_after_first:
            several = f"{once} ({self.builder.literal(form.separator)} {once})*"
        return f"({several})" if form.at_least_one else f"({several})?"

    def _tag_behind(self, tag: TagFormat, included: str, param: str, is_last: bool) -> str:
        """A tag whose beginning `included` stands there already."""
        begin = self.builder.literal(tag.begin[len(included) :])
        ends = [tag.end] if isinstance(tag.end, str) else tag.end
        if not ends:
            raise bad(f"{param}.end", "is empty; give a text")
        if _is_any_text(tag.content) and all(ends):
            closed = []
            for end in ends:
                until, part = self.builder.text_until(end)
                closed.append(f"{until} {self.builder.literal(end[len(part) :])}")
            return self.builder.add_rule(f"{begin} ({' | '.join(closed)})", "tag")
        has_end = any(ends)
        content = self.read(tag.content, f"{param}.content", is_last=is_last and not has_end)
        options = " | ".join(map(self.builder.literal, ends))
        return self.builder.add_rule(f"{begin} {content} ({options})", "tag")


SIMPLE_FORMATS: dict[str, Callable[[FormatReader, dict[str, Any], str], str]] = {
    "const_string": FormatReader.read_literal,
    "json_schema": FormatReader.read_schema,
    "regex": FormatReader.read_regex,
    "grammar": FormatReader.read_grammar,
}
NESTED_FORMATS: dict[str, Callable[[FormatReader, dict[str, Any], str, bool], str]] = {
    "any_text": FormatReader.read_any_text,
    "sequence": FormatReader.read_sequence,
    "or": FormatReader.read_choice,
    "optional": FormatReader.read_optional,
    "star": FormatReader.read_star,
    "plus": FormatReader.read_plus,
    "repeat": FormatReader.read_repeat,
    "tag": FormatReader.read_tag,
    "triggered_tags": FormatReader.read_triggered,
    "tags_with_separator": FormatReader.read_separated,
}


def _is_any_text(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "any_text" and not value.get("excludes")


def _first_literal(elements: Sequence[Any]) -> str:
    """The text that the first element begins with; "" where it begins with no fixed text."""
    for element in elements:
        if isinstance(element, dict):
            key = {"const_string": "value", "tag": "begin"}.get(str(element.get("type")), "")
            text = element.get(key, "")
            return text if isinstance(text, str) else ""
    return ""


def _without_start(element: Any, included: str) -> Any:
    """An element without the text that stands before it already."""
    if not included:
        return element
    key = "value" if element["type"] == "const_string" else "begin"
    return {**element, key: element[key][len(included) :]}


def _text_field(value: dict[str, Any], name: str, param: str) -> str:
    text = value.get(name)
    if not isinstance(text, str) or "\0" in text:
        raise bad(f"{param}.{name}", "must be a string without the character NUL")
    return text


def _list_field(value: dict[str, Any], name: str, param: str) -> list[Any]:
    elements = value.get(name)
    if not isinstance(elements, list) or not 0 < len(elements) <= MAX_TAGS:
        raise bad(f"{param}.{name}", f"must be an array of 1 to {MAX_TAGS} formats")
    return elements
