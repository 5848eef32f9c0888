"""Rules of a grammar that consists of several parts: literals, schemas, free text.

Literals are divided at the tokens that stand for a whole marker (`markers`). Where a marker is
text, the free text before it is a lazy lexeme, which ends with the first marker.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.server.request.grammar.constraint import AnswerConstraint, ConstraintKind
from baton.server.request.grammar.ebnf.emitter import ebnf_rules
from baton.server.request.grammar.json_schema import schema_part
from baton.server.request.grammar.lark import (
    NO_OPTIONS,
    escape_regex,
    quote_text,
    regex_terminal,
)
from baton.server.request.grammar.markers import MarkerTokens

FREE_TEXT = r"(.|\n)*"
"""Regex of any text."""


@dataclass(slots=True)
class LarkBuilder:
    """Collects the rules of a grammar. Its methods return parts of a rule."""

    markers: MarkerTokens
    whitespace: str
    lines: list[str] = field(default_factory=list)
    excluded_text: list[str] = field(default_factory=list)
    """Regexes that free text does not match."""
    checked_schemas: list[str] = field(default_factory=list)
    """Grammars of the schemas of `schema`, whose check names keywords without effect."""
    _heads: dict[str, str] = field(default_factory=dict)
    _terminals: dict[str, str] = field(default_factory=dict)
    """Names of terminals by what they match."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def add_rule(self, body: str, prefix: str = "part", attributes: str = "") -> str:
        """Define a rule; returns its name."""
        name = f"{prefix}_{next(self._numbers)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def literal(self, text: str) -> str:
        parts = self.markers.split(text)
        return " ".join(map(_part_text, parts)) or '""'

    def is_token(self, marker: str) -> bool:
        """True for a marker that the vocabulary has as one token."""
        parts = self.markers.split(marker)
        return len(parts) == 1 and isinstance(parts[0], int)

    def schema(self, schema: Any, param: str) -> str:
        constraint = AnswerConstraint(ConstraintKind.JSON_SCHEMA, schema, param)
        part = schema_part(constraint, self.whitespace)
        self.checked_schemas += part.schemas
        return self.add_rule(part.text, "json")

    def constraint(self, constraint: AnswerConstraint) -> str:
        """JSON of a schema, with the options that the constraint states."""
        return self.add_rule(schema_part(constraint, self.whitespace).text, "json")

    def ebnf(self, grammar: str, param: str) -> str:
        """The rules of a grammar in EBNF; returns its root."""
        rules, root = ebnf_rules(grammar, param, prefix=f"g{next(self._numbers)}")
        self.lines += rules
        return root

    def terminal(self, regexes: Sequence[str], excluded: Sequence[str] = ()) -> str:
        """Lexeme: a text that as a whole matches each of `regexes` and none of `excluded`."""
        parts = [*map(regex_terminal, regexes), *(f"~{regex_terminal(each)}" for each in excluded)]
        body = " & ".join(parts)
        if body not in self._terminals:
            self._terminals[body] = f"TEXT_{next(self._numbers)}"
            self.lines.append(f"{self._terminals[body]}: {body}")
        return self._terminals[body]

    def text_until(self, marker: str) -> tuple[str, str]:
        """Free text up to the first `marker`, and that part of the marker which it includes."""
        if marker not in self._heads:
            self._heads[marker] = self._add_head(marker)
        return self._heads[marker], self._head_text(marker)

    def _add_head(self, marker: str) -> str:
        first, *others = self.markers.split(marker)
        if isinstance(first, int):
            return f"FREE_TEXT {_part_text(first)}"
        if others:
            # The text in front of a token is common; with the token it is the marker.
            front = self.terminal([FREE_TEXT + escape_regex(first)])
            return f"{front} {_part_text(others[0])}"
        return self.add_rule(f"FREE_TEXT {quote_text(first)}", "head", "[lazy]")

    def _head_text(self, marker: str) -> str:
        parts = self.markers.split(marker)
        is_text_first = isinstance(parts[0], str)
        return "".join(map(self._text_of, parts[: 2 if is_text_first else 1]))

    def _text_of(self, part: str | int) -> str:
        return part if isinstance(part, str) else self.markers.text_of(part)

    def text(self, start: str) -> str:
        """The whole grammar."""
        excluded = [f"& ~{regex_terminal(regex)}" for regex in self.excluded_text]
        free_text = " ".join([f"/{FREE_TEXT}/", *excluded])
        fixed = [NO_OPTIONS, f"start: {start}", f"FREE_TEXT: {free_text}"]
        return "\n".join([*fixed, *self.lines]) + "\n"


def _part_text(part: str | int) -> str:
    return quote_text(part) if isinstance(part, str) else f"<[{part}]>"
