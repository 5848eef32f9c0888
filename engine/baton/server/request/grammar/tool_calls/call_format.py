"""Interface of the formats of calls, and the parts that several formats share.

A format adds rules to a grammar. It has two answers to the question what an answer may be: calls
alone, or free text with calls. Where an answer may have one call only, it ends behind it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.server.request.grammar.constraint import AnswerConstraint
from baton.server.request.grammar.lark_builder import LarkBuilder

LEADING_NEWLINES = r"/\n{0,2}/"
"""Part of a rule in front of calls, between which and a reasoning models write line breaks. They
are no content.
"""
LINE_START = r"((.|\n)*\n)?[ \t]*"
"""Regex of a text up to a place at which nothing but blanks stands in its line."""
SPACE = r"[ \t\r\n]*"
NINE_LETTERS = "/[a-zA-Z0-9]{9}/"
"""Id of a call whose template takes nine letters and digits."""


@dataclass(frozen=True, slots=True)
class GrammarTool:
    """A tool in a grammar."""

    name: str
    arguments: AnswerConstraint


@dataclass(frozen=True, slots=True)
class CallScope:
    """Tools, and the grammar to which their calls are added. Methods return parts of a rule."""

    builder: LarkBuilder
    tools: tuple[GrammarTool, ...]
    is_single: bool
    """The answer has at most one call."""
    _parts: dict[str, str] = field(default_factory=dict)

    def add_once(self, key: str, write: Callable[[], str]) -> str:
        """A part that `write` adds to the grammar, or that it has added before for the same key."""
        if key not in self._parts:
            self._parts[key] = write()
        return self._parts[key]

    def arguments(self, tool: GrammarTool) -> str:
        """The JSON object of a tool's arguments."""
        return self.add_once(tool.name, lambda: self.builder.constraint(tool.arguments))

    def any_tool(self, write_call: Callable[[GrammarTool], str]) -> str:
        """A call of one of the tools."""
        return self.builder.add_rule(" | ".join(map(write_call, self.tools)), "call")

    def repeat(self, call: str, separator: str) -> str:
        """A call, or several where the answer may have them. `separator`: a part of a rule."""
        return call if self.is_single else f"{call} ({separator} {call})*"


class CallFormat(ABC):
    """How a model writes calls."""

    @abstractmethod
    def calls_alone(self, scope: CallScope) -> str:
        """At least one call, and nothing else."""

    @abstractmethod
    def calls_in_text(self, scope: CallScope) -> str:
        """Free text, in which what begins a call is a call of one of the tools."""

    def calls_behind_reasoning(self, scope: CallScope) -> str:
        """Calls alone, with the line breaks that may precede them."""
        return f"{LEADING_NEWLINES} ({self.calls_alone(scope)})"

    def calls_or_answer(self, scope: CallScope, answer: str) -> str:
        """Calls alone, or an answer without calls. `answer`: part of a rule."""
        return f"{self.calls_behind_reasoning(scope)} | {answer}"


class MarkedFormat(CallFormat):
    """A format in which a marker stands in front of calls.

    Behind the marker is a block: one call, or all of them.
    """

    begins: tuple[str, ...]
    """Texts that begin a block, in the order in which models prefer them."""
    separator: str | None = None
    """Text between two blocks. None: one block holds all calls."""
    lenient_begins: tuple[str, ...] = ()
    """Regexes of texts that also begin a call where one is read, and that free text does not
    match.
    """

    @abstractmethod
    def write_block(self, scope: CallScope, begin: str) -> str:
        """A block behind its begin."""

    def calls_alone(self, scope: CallScope) -> str:
        blocks = [
            f"{scope.builder.literal(begin)} {self.write_block(scope, begin)}"
            for begin in self.begins
        ]
        block = scope.builder.add_rule(" | ".join(blocks), "block")
        if self.separator is None:
            return block
        return scope.repeat(block, scope.builder.literal(self.separator))

    def calls_in_text(self, scope: CallScope) -> str:
        scope.builder.excluded_text.extend(self.lenient_begins)
        blocks = []
        for begin in self.begins:
            head, included = scope.builder.text_until(begin)
            rest = scope.builder.literal(begin[len(included) :])
            blocks.append(f"{head} {rest} {self.write_block(scope, begin)}")
        block = scope.builder.add_rule(" | ".join(blocks), "block")
        return f"({block} | FREE_TEXT)" if scope.is_single else f"{block}* FREE_TEXT"
