"""A naive matcher of EBNF: all ends of all ways to match, by definition, with memory of what was tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Node = tuple[object, ...]
"""("text", str), ("chars", frozenset), ("ref", name), ("seq", [Node]), ("alt", [Node]) or
("rep", Node, least, most).
"""


@dataclass
class NaiveMatcher:
    rules: Mapping[str, Node]
    text: str
    known: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    """Ends of each rule from each start, found so far: grows to the least fixed point."""

    def matches(self) -> bool:
        while True:
            before = sum(map(len, self.known.values()))
            ends = self._ends(("ref", "root"), 0, set())
            if sum(map(len, self.known.values())) == before:
                return len(self.text) in ends

    def _ends(self, node: Node, start: int, active: set[tuple[str, int]]) -> set[int]:
        kind = node[0]
        if kind == "text":
            text = node[1]
            assert isinstance(text, str)
            return {start + len(text)} if self.text.startswith(text, start) else set()
        if kind == "chars":
            chars = node[1]
            assert isinstance(chars, frozenset)
            return (
                {start + 1}
                if self.text[start : start + 1] in chars and start < len(self.text)
                else set()
            )
        if kind == "ref":
            return self._rule_ends(str(node[1]), start, active)
        if kind == "seq":
            starts = {start}
            for part in node[1]:  # type: ignore[attr-defined]
                starts = {end for at in starts for end in self._ends(part, at, active)}
            return starts
        if kind == "alt":
            return {end for part in node[1] for end in self._ends(part, start, active)}  # type: ignore[attr-defined]
        return self._repeated_ends(node, start, active)

    def _rule_ends(self, name: str, start: int, active: set[tuple[str, int]]) -> set[int]:
        key = (name, start)
        found = self.known.setdefault(key, set())
        if key not in active:
            found |= self._ends(self.rules[name], start, active | {key})
        return set(found)

    def _repeated_ends(self, node: Node, start: int, active: set[tuple[str, int]]) -> set[int]:
        _, part, least, most = node
        assert isinstance(part, tuple)
        assert isinstance(least, int)
        starts = {start}
        found = {start} if least == 0 else set()
        limit = most if isinstance(most, int) else least + len(self.text) + 1
        for count in range(1, limit + 1):
            starts = {end for at in starts for end in self._ends(part, at, active)}
            if count >= least:
                found |= starts
            if not starts:
                break
        return found


def write_rules(rules: Mapping[str, Node]) -> str:
    """The rules in EBNF."""
    return "\n".join(f"{name} ::= {write_node(node)}" for name, node in rules.items()) + "\n"


def write_node(node: Node) -> str:
    kind = node[0]
    if kind == "text":
        return '"' + "".join(_escaped(char) for char in str(node[1])) + '"'
    if kind == "chars":
        chars = node[1]
        assert isinstance(chars, frozenset)
        return "[" + "".join(f"\\u{ord(char):04x}" for char in sorted(chars)) + "]"
    if kind == "ref":
        return str(node[1])
    if kind == "seq":
        return "(" + " ".join(map(write_node, node[1])) + ")" if node[1] else '""'  # type: ignore[arg-type]
    if kind == "alt":
        return "(" + "\n | ".join(map(write_node, node[1])) + ")"  # type: ignore[arg-type]
    _, part, least, most = node
    assert isinstance(part, tuple)
    most_text = "" if most is None else most
    return f"({write_node(part)}){{{least},{most_text}}}"


def _escaped(char: str) -> str:
    return {'"': '\\"', "\\": "\\\\", "\n": "\\n"}.get(char, char)
