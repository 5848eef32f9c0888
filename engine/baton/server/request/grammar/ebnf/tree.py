"""Parts of a rule in EBNF."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

LAST_CHAR = 0x10FFFF

CharRanges: TypeAlias = tuple[tuple[int, int], ...]
"""Code points as pairs, first and last of a range; sorted, apart from each other."""


@dataclass(frozen=True, slots=True)
class CharSet:
    """Any character of a set."""

    ranges: CharRanges


@dataclass(frozen=True, slots=True)
class RuleRef:
    name: str


@dataclass(frozen=True, slots=True)
class NodeSequence:
    """Parts behind each other; none: the empty text."""

    parts: tuple[EbnfNode, ...]


@dataclass(frozen=True, slots=True)
class NodeChoice:
    options: tuple[EbnfNode, ...]


@dataclass(frozen=True, slots=True)
class NodeRepeat:
    part: EbnfNode
    least: int
    most: int | None
    """None: no limit."""


EbnfNode: TypeAlias = CharSet | RuleRef | NodeSequence | NodeChoice | NodeRepeat
EMPTY = NodeSequence(())


def merge_ranges(ranges: list[tuple[int, int]]) -> CharRanges:
    """The same set, sorted and without overlaps."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement_ranges(ranges: CharRanges) -> CharRanges:
    """All other characters."""
    others = []
    start = 0
    for low, high in ranges:
        if start < low:
            others.append((start, low - 1))
        start = high + 1
    if start <= LAST_CHAR:
        others.append((start, LAST_CHAR))
    return tuple(others)


def literal(text: str) -> EbnfNode:
    chars = tuple(CharSet(((ord(char), ord(char)),)) for char in text)
    return chars[0] if len(chars) == 1 else NodeSequence(chars)


def inner_nodes(node: EbnfNode) -> tuple[EbnfNode, ...]:
    """Parts of a node, in order."""
    if isinstance(node, NodeSequence):
        return node.parts
    if isinstance(node, NodeChoice):
        return node.options
    if isinstance(node, NodeRepeat):
        return (node.part,)
    return ()


def all_nodes(node: EbnfNode) -> Iterator[EbnfNode]:
    """The node and everything in it. Without recursion: clients nest as deeply as they like."""
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(inner_nodes(current))


def referred_rules(node: EbnfNode) -> set[str]:
    return {part.name for part in all_nodes(node) if isinstance(part, RuleRef)}
