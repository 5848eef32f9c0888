r"""Text in EBNF to rules.

    root   ::= "[" item ("," item)* "]"     # strings, groups, | for alternatives, * + ? {n} {n,}
    {n,m} item   ::= [a-zA-Z_] [^\x00-\x1F\]]{0,3} | "\u00e9" | .

A rule ends where the next `name ::=` begins, so that line ends mean nothing inside one. Names are
letters, digits, `_`, `-` and `.`; escapes are `\n \t \r \\ \" \' \] \- \xHH \uHHHH \UHHHHHHHH` and
others of a single character. Look-ahead `(= …)` and functions such as `TagDispatch(…)` are
xgrammar's own, and are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from baton.server.request.grammar.ebnf.tree import (
    EMPTY,
    LAST_CHAR,
    CharSet,
    EbnfNode,
    NodeChoice,
    NodeRepeat,
    NodeSequence,
    RuleRef,
    complement_ranges,
    literal,
    merge_ranges,
    referred_rules,
)

ROOT = "root"
MAX_NESTING = 50
"""Groups inside each other."""
MAX_REPEAT = 10_000
FUNCTIONS = ("TagDispatch", "TokenTagDispatch", "Token", "ExcludeToken")
TOKEN = re.compile(
    r"""
    (?P<space>(?:\s|\#[^\n]*)+)
    |(?P<defines>::=)
    |(?P<name>[A-Za-z_][\w.-]*)
    |(?P<string>"(?:[^"\\\n]|\\.)*")
    |(?P<chars>\[(?:[^\]\\\n]|\\.)*\])
    |(?P<count>\{\s*\d{1,9}\s*(?:,\s*(?:\d{1,9})?\s*)?\})
    |(?P<sign>[()|*+?.=])
    """,
    re.VERBOSE | re.ASCII,
)
SIMPLE_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "0": "\0",
}
CODE_DIGITS = {"x": 2, "u": 4, "U": 8}
COUNTS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class EbnfError(ValueError):
    """The text is no grammar; the message says where and why."""


@dataclass(frozen=True, slots=True)
class EbnfToken:
    kind: str
    text: str
    line: int


def parse_grammar(text: str) -> dict[str, EbnfNode]:
    """Rules by name, of which one is `root`. Raises EbnfError."""
    tokens = _split_tokens(text)
    parser = _RuleParser(tokens)
    rules: dict[str, EbnfNode] = {}
    while parser.current.kind != "end":
        line = parser.current.line
        name = parser.take_rule_name()
        if name in rules:
            raise EbnfError(f"line {line}: rule {name} is defined twice")
        rules[name] = parser.parse_choice(0)
        if parser.current.kind not in ("end", "rule"):
            raise EbnfError(
                f"line {parser.current.line}: {parser.current.text!r} is not expected here"
            )
    if ROOT not in rules:
        raise EbnfError(f"there is no rule {ROOT!r}, where every answer begins")
    for name, node in rules.items():
        _check_references(name, node, rules)
    return rules


def _check_references(name: str, node: EbnfNode, rules: dict[str, EbnfNode]) -> None:
    missing = sorted(referred_rules(node) - rules.keys())
    if missing:
        raise EbnfError(f"rule {name} uses {missing[0]}, which is not defined")


def _split_tokens(text: str) -> list[EbnfToken]:
    """Tokens without white space and comments; a name before `::=` is of the kind `rule`."""
    tokens: list[EbnfToken] = []
    position = 0
    line = 1
    while position < len(text):
        found = TOKEN.match(text, position)
        if found is None:
            raise EbnfError(f"line {line}: {text[position : position + 20]!r} cannot be read")
        kind = found.lastgroup or ""
        if kind == "defines":
            if not tokens or tokens[-1].kind != "name":
                raise EbnfError(f"line {line}: ::= stands behind no rule name")
            tokens[-1] = EbnfToken("rule", tokens[-1].text, tokens[-1].line)
        elif found[0] in FUNCTIONS and text.startswith("(", found.end()):
            raise EbnfError(f"line {line}: {found[0]}(…) of xgrammar is not supported")
        elif kind != "space":
            tokens.append(EbnfToken(kind, found[0], line))
        line += found[0].count("\n")
        position = found.end()
    return [*tokens, EbnfToken("end", "the end", line)]


@dataclass(slots=True)
class _RuleParser:
    tokens: list[EbnfToken]
    position: int = field(default=0, init=False)

    @property
    def current(self) -> EbnfToken:
        return self.tokens[self.position]

    def take_rule_name(self) -> str:
        token = self.current
        if token.kind != "rule":
            raise EbnfError(
                f"line {token.line}: {token.text!r} stands where a rule begins, "
                'as in name ::= "text"'
            )
        self.position += 1
        return token.text

    def parse_choice(self, depth: int) -> EbnfNode:
        if depth > MAX_NESTING:
            raise EbnfError(
                f"line {self.current.line}: groups are nested more than {MAX_NESTING} levels deep"
            )
        options = [self._parse_sequence(depth)]
        while self.current.text == "|":
            self.position += 1
            options.append(self._parse_sequence(depth))
        return options[0] if len(options) == 1 else NodeChoice(tuple(options))

    def _parse_sequence(self, depth: int) -> EbnfNode:
        parts: list[EbnfNode] = []
        while (part := self._parse_part(depth)) is not None:
            parts.append(self._parse_counts(part))
        return parts[0] if len(parts) == 1 else NodeSequence(tuple(parts))

    def _parse_part(self, depth: int) -> EbnfNode | None:
        """The next part without its count; None where the sequence ends."""
        token = self.current
        if token.kind in ("end", "rule") or token.text in ("|", ")"):
            return None
        self.position += 1
        if token.kind == "name":
            return RuleRef(token.text)
        if token.kind == "string":
            text = "".join(chr(code) for code, _ in _read_chars(token.text[1:-1], token.line))
            return literal(text) if text else EMPTY
        if token.kind == "chars":
            return CharSet(_read_class(token.text[1:-1], token.line))
        if token.text == ".":
            return CharSet(((0, LAST_CHAR),))
        if token.text == "(":
            return self._parse_group(depth)
        raise EbnfError(f"line {token.line}: {token.text!r} is not expected here")

    def _parse_group(self, depth: int) -> EbnfNode:
        token = self.current
        if token.text == "=":
            raise EbnfError(f"line {token.line}: look-ahead (= …) is not supported")
        inner = self.parse_choice(depth + 1)
        if self.current.text != ")":
            raise EbnfError(f"line {token.line}: a group is not closed with )")
        self.position += 1
        return inner

    def _parse_counts(self, part: EbnfNode) -> EbnfNode:
        while True:
            token = self.current
            if token.text in COUNTS and token.kind == "sign":
                least, most = COUNTS[token.text]
            elif token.kind == "count":
                least, most = _read_count(token)
            else:
                return part
            self.position += 1
            part = NodeRepeat(part, least, most)


def _read_count(token: EbnfToken) -> tuple[int, int | None]:
    low, comma, high = token.text[1:-1].partition(",")
    least = int(low)
    most: int | None = least
    if comma:
        most = int(high) if high.strip() else None
    largest = least if most is None else most
    if largest > MAX_REPEAT or least > largest:
        raise EbnfError(
            f"line {token.line}: {token.text} must be from 0 to {MAX_REPEAT}, the smaller number "
            "first"
        )
    return least, most


def _read_class(body: str, line: int) -> tuple[tuple[int, int], ...]:
    is_negated = body.startswith("^")
    chars = _read_chars(body.removeprefix("^"), line)
    ranges = []
    position = 0
    while position < len(chars):
        low, _ = chars[position]
        is_range = position + 2 < len(chars) and chars[position + 1] == (ord("-"), False)
        high = chars[position + 2][0] if is_range else low
        if high < low:
            raise EbnfError(f"line {line}: the range {chr(low)!r}-{chr(high)!r} is empty")
        ranges.append((low, high))
        position += 3 if is_range else 1
    merged = merge_ranges(ranges)
    found = complement_ranges(merged) if is_negated else merged
    if not found:
        raise EbnfError(f"line {line}: the class [{body}] holds no character")
    return found


def _read_chars(text: str, line: int) -> list[tuple[int, bool]]:
    """Code points, and True for those that were escaped."""
    chars: list[tuple[int, bool]] = []
    position = 0
    while position < len(text):
        char = text[position]
        position += 1
        if char != "\\":
            chars.append((ord(char), False))
            continue
        char = text[position]
        position += 1
        if char in CODE_DIGITS:
            digits = text[position : position + CODE_DIGITS[char]]
            position += CODE_DIGITS[char]
            chars.append((_read_code(digits, CODE_DIGITS[char], line), True))
        else:
            chars.append((ord(SIMPLE_ESCAPES.get(char, char)), True))
    return chars


def _read_code(digits: str, count: int, line: int) -> int:
    if not re.fullmatch(f"[0-9A-Fa-f]{{{count}}}", digits):
        raise EbnfError(f"line {line}: an escape needs {count} hexadecimal digits, not {digits!r}")
    code = int(digits, 16)
    if code > LAST_CHAR or 0xD800 <= code <= 0xDFFF:
        raise EbnfError(f"line {line}: {digits} is no character of Unicode")
    return code
