"""A naive reading of EBNF: all short words of a grammar, by definition, as a least fixed point."""

from __future__ import annotations

from collections.abc import Mapping

Node = tuple[object, ...]
"""("text", str), ("chars", frozenset), ("ref", name), ("seq", [Node]), ("alt", [Node]) or
("rep", Node, least, most).
"""
Words = set[str]


def words_of(rules: Mapping[str, Node], longest: int) -> Words:
    """The words of the rule `root` with at most `longest` characters.

    Each rule's words grow from none until no rule adds one: there are finitely many short words.
    """
    known: dict[str, Words] = {name: set() for name in rules}
    grows = True
    while grows:
        grows = False
        for name, body in rules.items():
            words = _node_words(body, known, longest)
            grows = grows or not words <= known[name]
            known[name] |= words
    return known["root"]


def _node_words(node: Node, known: Mapping[str, Words], longest: int) -> Words:
    kind = node[0]
    if kind == "text":
        text = str(node[1])
        return {text} if len(text) <= longest else set()
    if kind == "chars":
        chars = node[1]
        assert isinstance(chars, frozenset)
        return set(chars) if longest else set()
    if kind == "ref":
        return known[str(node[1])]
    if kind == "rep":
        return _repeated_words(node, known, longest)
    parts = [_node_words(part, known, longest) for part in node[1]]  # type: ignore[attr-defined]
    if kind == "alt":
        return set().union(*parts)
    words = {""}
    for part in parts:
        words = _joined(words, part, longest)
    return words


def _repeated_words(node: Node, known: Mapping[str, Words], longest: int) -> Words:
    _, part, least, most = node
    assert isinstance(part, tuple)
    assert isinstance(least, int)
    once = _node_words(part, known, longest)
    words = {""}
    for _ in range(least):
        words = _joined(words, once, longest)
    found = set(words)
    count = least
    while words and (most is None or count < most):  # type: ignore[operator]
        words = _joined(words, once, longest) - found
        found |= words
        count += 1
    return found


def _joined(left: Words, right: Words, longest: int) -> Words:
    return {a + b for a in left for b in right if len(a) + len(b) <= longest}


def derives(rules: Mapping[str, Node], text: str) -> bool:
    """True if the text is a word of the rule `root`.

    The places where each rule ends, by the place where it begins, grow from none until none is added.
    """
    known: dict[tuple[str, int], set[int]] = {("root", 0): set()}
    grows = True
    while grows:
        grows = False
        for name, start in list(known):
            places = len(known)
            ends = _node_ends(rules[name], text, start, known)
            grows = grows or len(known) > places or not ends <= known[name, start]
            known[name, start] |= ends
    return len(text) in known["root", 0]


def _node_ends(
    node: Node, text: str, start: int, known: dict[tuple[str, int], set[int]]
) -> set[int]:
    """Places where a part ends that begins at `start`. Rules that are met for the first time become known."""
    kind = node[0]
    if kind == "text":
        part = str(node[1])
        return {start + len(part)} if text.startswith(part, start) else set()
    if kind == "chars":
        chars = node[1]
        assert isinstance(chars, frozenset)
        return {start + 1} if text[start : start + 1] in chars else set()
    if kind == "ref":
        return set(known.setdefault((str(node[1]), start), set()))
    if kind == "rep":
        return _repeated_ends(node, text, start, known)
    parts: list[Node] = node[1]  # type: ignore[assignment]
    if kind == "alt":
        return set().union(*(_node_ends(part, text, start, known) for part in parts))
    ends = {start}
    for part in parts:
        ends = {end for begin in ends for end in _node_ends(part, text, begin, known)}
    return ends


def _repeated_ends(
    node: Node, text: str, start: int, known: dict[tuple[str, int], set[int]]
) -> set[int]:
    _, part, least, most = node
    assert isinstance(part, tuple)
    assert isinstance(least, int)
    ends = {start}
    found = set(ends) if least == 0 else set()
    count = 0
    while ends and (most is None or count < most):  # type: ignore[operator]
        ends = {end for begin in ends for end in _node_ends(part, text, begin, known)}
        count += 1
        if count >= least:
            is_new = not ends <= found
            found |= ends
            if not is_new:
                break
        elif count > least + len(text):
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
