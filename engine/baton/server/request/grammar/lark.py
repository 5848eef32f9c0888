"""Pieces of llguidance's grammar language, a dialect of Lark: rules are lower case, terminals upper
case.

A terminal is one lexeme, which llguidance's lexer makes as long as it can; it does not go back.
Text is written in strings as JSON writes them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from baton.server.fields import decode_exact, encode_exact

NO_OPTIONS = "%llguidance {}"
"""First line of a grammar with llguidance's usual options."""
NO_FORCING = '%llguidance {"no_forcing": true}'
SINGLE_SPACE = '%llguidance {"ignore_once": true}'
"""First line of a grammar in which the text of `%ignore` stands at most once between two
lexemes.
"""
SINGLE_SPACE_NO_FORCING = '%llguidance {"ignore_once": true, "no_forcing": true}'


@dataclass(frozen=True, slots=True)
class GrammarText:
    """A grammar that is not checked."""

    text: str
    schemas: tuple[str, ...] = ()
    """Grammars to be checked with it, for its keywords without effect."""


def quote_text(text: str) -> str:
    """A literal. Lone surrogates must have been refused."""
    return json.dumps(text, ensure_ascii=False)


def regex_terminal(regex: str) -> str:
    """A regex of Rust's syntax between Lark's delimiters, which it may contain itself."""
    out: list[str] = []
    is_escaped = False
    for char in regex:
        if char == "/":
            if is_escaped:
                out.pop()
            out.append("\\x2F")
        elif char == "\n":
            if is_escaped:
                out.pop()
            out.append("\\n")
        else:
            out.append(char)
        is_escaped = char == "\\" and not is_escaped
    return "/" + "".join(out) + "/"


def escape_regex(text: str) -> str:
    """A regex that matches this text."""
    return "".join(map(_char_text, map(ord, text)))


def class_regex(ranges: list[tuple[int, int]], *, is_negated: bool = False) -> str:
    """A character class as a regex. `ranges`: pairs of code points, inclusive; none: no character
    (all if negated).
    """
    if not ranges:
        return "(?s:.)" if is_negated else "[^\\u{0}-\\u{10FFFF}]"
    body = "".join(_range_text(low, high) for low, high in ranges)
    return f"[{'^' if is_negated else ''}{body}]"


def _range_text(low: int, high: int) -> str:
    return _char_text(low) if low == high else f"{_char_text(low)}-{_char_text(high)}"


def _char_text(code: int) -> str:
    char = chr(code)
    if char.isascii() and char.isalnum():
        return char
    return f"\\u{{{code:X}}}"


def without_forcing(text: str) -> str:
    """The same grammar, in which the model may divide text into tokens as it likes.

    Where only one text can follow, llguidance allows the tokens of the tokenizer's own division
    alone. Of a text that looks like a special token that is this token, which llguidance refuses a
    moment later: the answer fails.
    """
    if text.startswith("{"):
        grammars = decode_exact(text)
        inner = grammars["grammars"][0]["name"]
        outer = {"name": "start", "lark_grammar": f"{NO_FORCING}\nstart: @{inner}\n"}
        return encode_exact({**grammars, "grammars": [outer, *grammars["grammars"]]}).decode()
    for options, changed in ((NO_OPTIONS, NO_FORCING), (SINGLE_SPACE, SINGLE_SPACE_NO_FORCING)):
        if text.startswith(f"{options}\n"):
            return changed + text.removeprefix(options)
    # A client's own grammar may state options: they are its own matter.
    return text if "%llguidance" in text else f"{NO_FORCING}\n{text}"
