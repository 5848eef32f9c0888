"""Rules of EBNF as rules and terminals of Lark, with names of their own.

Names in EBNF may hold characters that Lark does not know, and one grammar may be a part of another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from baton.errors import BadRequest
from baton.server.fields import bad
from baton.server.request.grammar.ebnf.lexemes import LexemePlan, plan_lexemes
from baton.server.request.grammar.ebnf.parser import ROOT, EbnfError, parse_grammar
from baton.server.request.grammar.ebnf.productive import without_unproductive_parts
from baton.server.request.grammar.ebnf.recursion import without_simple_recursion
from baton.server.request.grammar.ebnf.tree import (
    CharSet,
    EbnfNode,
    NodeChoice,
    NodeRepeat,
    NodeSequence,
    RuleRef,
)
from baton.server.request.grammar.lark import class_regex, quote_text

LARK = re.compile(r"\A\s*%llguidance\b|^\s*start\s*:(?!:=)", re.MULTILINE)
"""A text of llguidance's own language, which is passed on as it is (matches SGLang)."""


def ebnf_grammar(text: str, param: str) -> str:
    """The whole text of a grammar given in EBNF or Lark. Raises BadRequest."""
    if LARK.search(text):
        return text
    lines, root = ebnf_rules(text, param, prefix="r")
    return "\n".join([f"start: {root}", *lines]) + "\n"


def ebnf_rules(text: str, param: str, *, prefix: str) -> tuple[list[str], str]:
    """Lark's rules of a grammar, and the name of its root. Raises BadRequest.

    Args:
        prefix: of all their names: a lower-case letter, then letters and digits.
    """
    try:
        parsed = parse_grammar(text)
    except EbnfError as err:
        raise BadRequest(f"{param} is no grammar in EBNF: {err}", param=param) from err
    productive = without_unproductive_parts(parsed)
    if ROOT not in productive:
        raise bad(param, f"has no answer: each text of its rule {ROOT} would contain another one")
    rules = without_simple_recursion(productive)
    emitter = _LarkEmitter(plan_lexemes(rules, ROOT), prefix)
    root = emitter.rule_part(RuleRef(ROOT))
    emitter.define_pending()
    return emitter.lines, root


@dataclass(slots=True)
class _LarkEmitter:
    plan: LexemePlan
    prefix: str
    lines: list[str] = field(default_factory=list)
    _rules: dict[str, str] = field(default_factory=dict)
    """Lark's names of rules that are no lexemes."""
    _terminals: dict[EbnfNode, str] = field(default_factory=dict)
    _pending_rules: list[str] = field(default_factory=list)
    _pending_terminals: list[EbnfNode] = field(default_factory=list)

    def define_pending(self) -> None:
        """Define all rules and terminals that others refer to."""
        while self._pending_rules or self._pending_terminals:
            if self._pending_rules:
                name = self._pending_rules.pop()
                body = self._inside_rule(self.plan.rules[name])
                self.lines.append(f"{self._rules[name]}: {body}")
                continue
            node = self._pending_terminals.pop()
            inner = self.plan.rules[node.name] if isinstance(node, RuleRef) else node
            self.lines.append(f"{self._terminals[node]}: {self._terminal_part(inner)}")

    def rule_part(self, node: EbnfNode) -> str:
        """A part in a rule."""
        if isinstance(node, CharSet):
            return f"/{class_regex(list(node.ranges))}/"
        if node == NodeSequence(()):
            return '""'
        if self.plan.is_lexeme(node):
            return self._terminal_name(node)
        if isinstance(node, RuleRef):
            return self._rule_name(node.name)
        return self._inside_rule(node)

    def _inside_rule(self, node: EbnfNode) -> str:
        if isinstance(node, NodeChoice):
            return f"({' | '.join(map(self.rule_part, node.options))})"
        if isinstance(node, NodeSequence) and node.parts and not self.plan.is_lexeme(node):
            return f"({' '.join(map(self.rule_part, self.plan.parts_of(node)))})"
        if isinstance(node, NodeRepeat) and not self.plan.is_lexeme(node):
            return f"({self.rule_part(node.part)}){repeat_sign(node)}"
        return self.rule_part(node)

    def _terminal_part(self, node: EbnfNode) -> str:
        """A part in a terminal."""
        if isinstance(node, CharSet):
            return f"/{class_regex(list(node.ranges))}/"
        if isinstance(node, RuleRef):
            return self._terminal_name(node)
        if isinstance(node, NodeChoice):
            return f"({' | '.join(map(self._terminal_part, node.options))})"
        if isinstance(node, NodeRepeat):
            return f"({self._terminal_part(node.part)}){repeat_sign(node)}"
        text = literal_text(node)
        if text is not None:
            return quote_text(text)
        return f"({' '.join(map(self._terminal_part, node.parts))})"

    def _rule_name(self, name: str) -> str:
        if name not in self._rules:
            self._rules[name] = f"{self.prefix}_{len(self._rules)}"
            self._pending_rules.append(name)
        return self._rules[name]

    def _terminal_name(self, node: EbnfNode) -> str:
        if node not in self._terminals:
            self._terminals[node] = f"{self.prefix.upper()}_{len(self._terminals)}"
            self._pending_terminals.append(node)
        return self._terminals[node]


def literal_text(node: NodeSequence) -> str | None:
    """The text of a sequence of single characters; None for another sequence."""
    chars = []
    for part in node.parts:
        if not isinstance(part, CharSet) or len(part.ranges) != 1:
            return None
        low, high = part.ranges[0]
        if low != high:
            return None
        chars.append(chr(low))
    return "".join(chars)


def repeat_sign(node: NodeRepeat) -> str:
    signs = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    most = "" if node.most is None else str(node.most)
    return signs.get((node.least, node.most), f"{{{node.least},{most}}}")
