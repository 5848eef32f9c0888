"""Finite automata of parts without recursion, over atoms of the alphabet.

An atom is a set of characters that every character set of the grammar contains as a whole or not at
all; sets of atoms are integers, bit i for atom i.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from baton.server.request.grammar.ebnf.tree import (
    LAST_CHAR,
    CharRanges,
    CharSet,
    EbnfNode,
    NodeChoice,
    NodeRepeat,
    NodeSequence,
    RuleRef,
    all_nodes,
)

MAX_STATES = 2000
"""States of an automaton, before and after it is made deterministic."""


class TooManyStates(Exception):
    """The automaton of a part is too large to be looked at."""


class CharAtoms:
    """Division of all characters into atoms."""

    def __init__(self, nodes: Iterable[EbnfNode]) -> None:
        bounds = {0, LAST_CHAR + 1}
        for node in nodes:
            for part in all_nodes(node):
                if isinstance(part, CharSet):
                    for low, high in part.ranges:
                        bounds |= {low, high + 1}
        self._starts = sorted(bounds)

    def mask_of(self, ranges: CharRanges) -> int:
        mask = 0
        for low, high in ranges:
            first = bisect.bisect_left(self._starts, low)
            behind = bisect.bisect_left(self._starts, high + 1)
            mask |= (1 << behind) - (1 << first)
        return mask


def bits_of(mask: int) -> Iterator[int]:
    """Single atoms of a set."""
    while mask:
        low = mask & -mask
        yield low
        mask ^= low


@dataclass(slots=True)
class _Builder:
    """Thompson's construction: one state in, one state out for each part."""

    rules: Mapping[str, EbnfNode]
    atoms: CharAtoms
    empty_moves: list[list[int]] = field(default_factory=list)
    char_moves: list[list[tuple[int, int]]] = field(default_factory=list)

    def add_state(self) -> int:
        if len(self.empty_moves) >= MAX_STATES:
            raise TooManyStates
        self.empty_moves.append([])
        self.char_moves.append([])
        return len(self.empty_moves) - 1

    def add(self, node: EbnfNode, start: int) -> int:
        """Add a part behind a state; returns the state behind the part."""
        if isinstance(node, CharSet):
            end = self.add_state()
            self.char_moves[start].append((self.atoms.mask_of(node.ranges), end))
            return end
        if isinstance(node, RuleRef):
            return self.add(self.rules[node.name], start)
        if isinstance(node, NodeSequence):
            for part in node.parts:
                start = self.add(part, start)
            return start
        if isinstance(node, NodeChoice):
            end = self.add_state()
            for option in node.options:
                begin = self.add_state()
                self.empty_moves[start].append(begin)
                self.empty_moves[self.add(option, begin)].append(end)
            return end
        return self._add_repeat(node, start)

    def _add_repeat(self, node: NodeRepeat, start: int) -> int:
        for _ in range(node.least):
            start = self.add(node.part, start)
        end = self.add_state()
        if node.most is None:
            loop = self.add_state()
            self.empty_moves[start].append(loop)
            self.empty_moves[loop].append(end)
            self.empty_moves[self.add(node.part, loop)].append(loop)
            return end
        for _ in range(node.most - node.least):
            self.empty_moves[start].append(end)
            start = self.add(node.part, start)
        self.empty_moves[start].append(end)
        return end


@dataclass(frozen=True, slots=True)
class LexemeAutomaton:
    """Deterministic; state 0 is the first."""

    moves: list[dict[int, int]]
    """By state: next state by atom."""
    accepting: list[bool]

    def extensions(self, other: LexemeAutomaton) -> int:
        """Characters with which a whole text of this one, not the empty text, may continue in
        `other`.
        """
        seen = {(0, 0)}
        queue = [(0, 0)]
        found = 0
        while queue:
            mine, others = queue.pop()
            if self.accepting[mine] and (mine, others) != (0, 0):
                for atom in other.moves[others]:
                    found |= atom
            for atom, next_mine in self.moves[mine].items():
                next_other = other.moves[others].get(atom)
                if next_other is not None and (next_mine, next_other) not in seen:
                    if len(seen) > MAX_STATES * 4:
                        raise TooManyStates
                    seen.add((next_mine, next_other))
                    queue.append((next_mine, next_other))
        return found


def build_automaton(
    node: EbnfNode, rules: Mapping[str, EbnfNode], atoms: CharAtoms
) -> LexemeAutomaton:
    """The automaton of a part without recursion. Raises TooManyStates."""
    builder = _Builder(rules, atoms)
    last = builder.add(node, builder.add_state())
    first = _closure(builder, {0})
    numbers = {first: 0}
    moves: list[dict[int, int]] = []
    accepting: list[bool] = []
    queue = [first]
    for states in queue:
        targets: dict[int, set[int]] = {}
        for state in states:
            for mask, target in builder.char_moves[state]:
                for atom in bits_of(mask):
                    targets.setdefault(atom, set()).add(target)
        row = {}
        for atom, reached in targets.items():
            closed = _closure(builder, reached)
            if closed not in numbers:
                if len(numbers) >= MAX_STATES:
                    raise TooManyStates
                numbers[closed] = len(numbers)
                queue.append(closed)
            row[atom] = numbers[closed]
        moves.append(row)
        accepting.append(last in states)
    return LexemeAutomaton(moves, accepting)


def _closure(builder: _Builder, states: set[int]) -> frozenset[int]:
    found = set(states)
    queue = list(states)
    while queue:
        for target in builder.empty_moves[queue.pop()]:
            if target not in found:
                found.add(target)
                queue.append(target)
    return frozenset(found)
