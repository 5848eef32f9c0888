"""Which parts of a grammar may be one lexeme without a change of meaning.

llguidance divides an answer into lexemes, each as long as possible, and does not go back: with the
lexemes [a-z]+ and "z" no text ends in a "z" of its own. A grammar in EBNF knows no lexemes; one
character each would be right, and slow: a free string then takes one step of the parser per
character and token of the vocabulary.

So parts without recursion become lexemes where that is safe: where no text of a lexeme A can be
continued, within any lexeme B, by a character that may also follow A. The search begins with the
largest such parts and divides those that are in conflict, down to single characters, which never
are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.server.request.grammar.ebnf.automaton import (
    CharAtoms,
    LexemeAutomaton,
    TooManyStates,
    build_automaton,
)
from baton.server.request.grammar.ebnf.recursion import reachable_rules, recursive_rules
from baton.server.request.grammar.ebnf.tree import (
    EMPTY,
    CharSet,
    EbnfNode,
    NodeChoice,
    NodeRepeat,
    NodeSequence,
    RuleRef,
    referred_rules,
)

MAX_LEXEMES = 200
"""With more, each conflict is looked for among so many pairs that all parts are divided instead."""


@dataclass(slots=True)
class LexemePlan:
    """Division of a grammar into lexemes and rules."""

    rules: Mapping[str, EbnfNode]
    root: str
    recursive: set[str]
    divided: set[EbnfNode] = field(default_factory=set)
    """Parts without recursion that are no lexeme all the same."""
    divides_all: bool = False
    """Every character is a lexeme of its own."""

    def is_lexeme(self, node: EbnfNode) -> bool:
        if isinstance(node, CharSet):
            return True
        if self.divides_all or node in self.divided:
            return False
        return not referred_rules(node) & self.recursive

    def parts_of(self, node: NodeSequence) -> list[EbnfNode]:
        """Parts of a sequence, those that make one lexeme together as one part."""
        parts: list[EbnfNode] = []
        run: list[EbnfNode] = []
        for part in (*node.parts, None):
            if part is not None and not referred_rules(part) & self.recursive:
                run.append(part)
                continue
            joined = NodeSequence(tuple(run))
            if len(run) > 1 and self.is_lexeme(joined):
                parts.append(joined)
            else:
                parts.extend(run)
            run = []
            if part is not None:
                parts.append(part)
        return parts

    def lexemes(self) -> list[EbnfNode]:
        """All lexemes, in order of appearance."""
        found: dict[EbnfNode, None] = {}
        visited: set[str] = set()
        queue: list[EbnfNode] = [RuleRef(self.root)]
        while queue:
            node = queue.pop()
            if self.is_lexeme(node):
                found[node] = None
            elif isinstance(node, RuleRef):
                if node.name not in visited:
                    visited.add(node.name)
                    queue.append(self.rules[node.name])
            else:
                queue.extend(self._divide(node))
        return list(found)

    def _divide(self, node: EbnfNode) -> list[EbnfNode]:
        if isinstance(node, NodeSequence):
            return self.parts_of(node)
        if isinstance(node, NodeChoice):
            return list(node.options)
        if isinstance(node, NodeRepeat):
            return [node.part]
        raise AssertionError(f"{node} cannot be divided")

    def divide_lexeme(self, node: EbnfNode) -> None:
        """Let its parts be lexemes instead."""
        self.divided.add(node)
        while isinstance(node, RuleRef):
            node = self.rules[node.name]
            self.divided.add(node)


def plan_lexemes(rules: Mapping[str, EbnfNode], root: str) -> LexemePlan:
    """Divide a grammar into the largest lexemes that do not change its meaning."""
    used = {name: rules[name] for name in reachable_rules(rules, root)}
    plan = LexemePlan(used, root, recursive_rules(used))
    if root not in plan.recursive:
        return plan
    search = _ConflictSearch(plan)
    while (node := search.find_conflict()) is not None:
        plan.divide_lexeme(node)
        if len(plan.lexemes()) > MAX_LEXEMES:
            plan.divides_all = True
            break
    return plan


class _ConflictSearch:
    def __init__(self, plan: LexemePlan) -> None:
        self._plan = plan
        self._atoms = CharAtoms(plan.rules.values())
        self._automata: dict[EbnfNode, LexemeAutomaton] = {}
        self._extensions: dict[tuple[EbnfNode, EbnfNode], int] = {}
        self._firsts = _first_sets(plan.rules, self._atoms)

    def find_conflict(self) -> EbnfNode | None:
        """A lexeme to be divided; None: there is no conflict."""
        lexemes = self._plan.lexemes()
        follows = _FollowSets(self._plan, self._firsts, self._atoms).of_lexemes()
        try:
            for node in lexemes:
                if node not in self._automata:
                    self._automata[node] = build_automaton(node, self._plan.rules, self._atoms)
            for first in lexemes:
                for second in lexemes:
                    if self._extension(first, second) & follows[first]:
                        return self._larger_of(first, second)
        except TooManyStates:
            return node if not isinstance(node, CharSet) else None
        return None

    def _extension(self, first: EbnfNode, second: EbnfNode) -> int:
        key = (first, second)
        if key not in self._extensions:
            automaton = self._automata[first]
            self._extensions[key] = automaton.extensions(self._automata[second])
        return self._extensions[key]

    def _larger_of(self, first: EbnfNode, second: EbnfNode) -> EbnfNode:
        sizes = {node: len(self._automata[node].moves) for node in (second, first)}
        divisible = [node for node in sizes if not isinstance(node, CharSet)]
        return max(divisible, key=lambda node: sizes[node])


@dataclass(slots=True)
class FirstSet:
    """Characters that a part may begin with, and True if it may be empty."""

    mask: int
    is_nullable: bool


def _first_sets(rules: Mapping[str, EbnfNode], atoms: CharAtoms) -> dict[str, FirstSet]:
    """By rule: the least fixed point."""
    firsts = {name: FirstSet(0, False) for name in rules}
    changed = True
    while changed:
        changed = False
        for name, node in rules.items():
            found = first_of(node, firsts, atoms)
            if found != firsts[name]:
                firsts[name] = found
                changed = True
    return firsts


def first_of(node: EbnfNode, firsts: Mapping[str, FirstSet], atoms: CharAtoms) -> FirstSet:
    if isinstance(node, CharSet):
        return FirstSet(atoms.mask_of(node.ranges), False)
    if isinstance(node, RuleRef):
        return firsts[node.name]
    if isinstance(node, NodeRepeat):
        inner = first_of(node.part, firsts, atoms)
        return FirstSet(inner.mask, inner.is_nullable or node.least == 0)
    mask = 0
    if isinstance(node, NodeChoice):
        options = [first_of(option, firsts, atoms) for option in node.options]
        for option in options:
            mask |= option.mask
        return FirstSet(mask, any(option.is_nullable for option in options))
    for part in node.parts:
        found = first_of(part, firsts, atoms)
        mask |= found.mask
        if not found.is_nullable:
            return FirstSet(mask, False)
    return FirstSet(mask, True)


class _FollowSets:
    """Characters that may follow each lexeme."""

    def __init__(self, plan: LexemePlan, firsts: Mapping[str, FirstSet], atoms: CharAtoms) -> None:
        self._plan = plan
        self._firsts = firsts
        self._atoms = atoms
        self._of_rule = dict.fromkeys(plan.rules, 0)
        self._of_lexeme: dict[EbnfNode, int] = {}
        self._changed = True

    def of_lexemes(self) -> Mapping[EbnfNode, int]:
        while self._changed:
            self._changed = False
            self._visit(RuleRef(self._plan.root), 0)
            for name, node in self._plan.rules.items():
                if not self._plan.is_lexeme(RuleRef(name)):
                    self._visit_inside(node, self._of_rule[name])
        return self._of_lexeme

    def _visit(self, node: EbnfNode, follow: int) -> None:
        plan = self._plan
        if plan.is_lexeme(node):
            before = self._of_lexeme.get(node, 0)
            self._of_lexeme[node] = before | follow
            self._changed |= self._of_lexeme[node] != before
        elif isinstance(node, RuleRef):
            before = self._of_rule[node.name]
            self._of_rule[node.name] = before | follow
            self._changed |= self._of_rule[node.name] != before
        else:
            self._visit_inside(node, follow)

    def _visit_inside(self, node: EbnfNode, follow: int) -> None:
        """Visit a part that is no lexeme, or the body of a rule that is none."""
        if self._plan.is_lexeme(node) or isinstance(node, RuleRef):
            self._visit(node, follow)
        elif isinstance(node, NodeChoice):
            for option in node.options:
                self._visit(option, follow)
        elif isinstance(node, NodeRepeat):
            inner = first_of(node.part, self._firsts, self._atoms)
            self._visit(node.part, follow | (inner.mask if node.most != 1 else 0))
        elif isinstance(node, NodeSequence) and node != EMPTY:
            for part in reversed(self._plan.parts_of(node)):
                self._visit(part, follow)
                found = first_of(part, self._firsts, self._atoms)
                follow = found.mask | (follow if found.is_nullable else 0)
