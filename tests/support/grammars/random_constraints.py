"""Random constraints of one seed, with a judge for finished answers: schemas with parts that no value satisfies, names
that run out and keywords that meet, choices, regexes, grammars in EBNF and structural tags.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jsonschema
import regex

from tests.support.grammars.dead_end_schemas import dead_end_schema
from tests.support.grammars.naive_ebnf import Node, derives, write_rules

Judge = Callable[[str], bool]
LETTERS = "abcxyz019 -_\"'\\{}[],:\n\té€😀"
REGEX_LEAVES = (
    "a", "b", "-", "é", "😀", "[a-z]", "[^a-c\\n]", "[0-9]", "[^\\s\\S]", ".", "\\.", "(?:ab|a)", "[\\x00-\\x1f]",
    "[一-龥]", "(?:)", "\\n", "[^\\x00-\\x7f]", "\\\"",
)  # fmt: skip
COUNTS = ("*", "+", "?", "{0}", "{2}", "{0,3}", "{1,4}", "{2,}", "{0,200}", "{30,60}")

BACKTRACKING_SECS = 2.0


@dataclass(frozen=True)
class RandomConstraint:
    """Fields of a request's body, and a judge of its finished answers."""

    body: Mapping[str, Any]
    judge: Judge
    """False for a text that is outside the constraint."""
    is_strict: bool = True
    """False for a schema whose keywords may be ignored: then its judge is too severe."""
    is_costly_to_judge: bool = False


def random_constraint(rng: random.Random) -> RandomConstraint:
    forms = (_schema, _schema, _schema, _schema, _choice, _regex, _grammar, _grammar, _tags)
    return rng.choice(forms)(rng)


def _schema(rng: random.Random) -> RandomConstraint:
    schema = dead_end_schema(rng)
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )

    def judge(text: str) -> bool:
        return validator.is_valid(json.loads(text))

    if rng.random() < 0.6:
        is_strict = rng.random() < 0.5
        named = {"name": "n", "schema": schema, "strict": is_strict}
        form = {"type": "json_schema", "json_schema": named}
        return RandomConstraint({"response_format": form}, judge, is_strict=is_strict)
    fields = {"json": schema}
    if rng.random() < 0.3:
        fields["disable_any_whitespace"] = True
    elif rng.random() < 0.2:
        fields["whitespace_pattern"] = rng.choice((r"[ \t]{0,3}", r"[\n ]?", "( |\\n  )"))
    if rng.random() < 0.2:
        fields["disable_additional_properties"] = True
    return RandomConstraint({"structured_outputs": fields}, judge, is_strict=False)


def _choice(rng: random.Random) -> RandomConstraint:
    count = rng.choice((1, 2, 3, 10, 100, 2500))
    front = rng.choice(("", "", "label-", '{"'))
    texts = [front + _text(rng, rng.choice((0, 1, 3, 12))) for _ in range(count)]
    texts += [text + _text(rng, 2) for text in texts[:3]]
    field = rng.choice(("guided_choice", "choice"))
    body = {field: texts} if field == "guided_choice" else {"structured_outputs": {field: texts}}
    allowed = frozenset(texts)
    return RandomConstraint(body, allowed.__contains__)


def _text(rng: random.Random, length: int) -> str:
    return "".join(rng.choices(LETTERS, k=length))


def _regex(rng: random.Random) -> RandomConstraint:
    source = _regex_text(rng, 3)
    pattern = regex.compile(source)

    def judge(text: str) -> bool:
        try:
            return pattern.fullmatch(text, timeout=BACKTRACKING_SECS) is not None
        except TimeoutError:
            # Nested counts backtrack for hours; such a text is not shown to be outside.
            return True

    body = {rng.choice(("regex", "guided_regex")): source}
    return RandomConstraint(body, judge)


def _regex_text(rng: random.Random, depth: int) -> str:
    kind = rng.random()
    if depth == 0 or kind < 0.25:
        return rng.choice(REGEX_LEAVES)
    if kind < 0.6:
        return "".join(_regex_text(rng, depth - 1) for _ in range(rng.randint(1, 4)))
    inner = _regex_text(rng, depth - 1)
    if kind < 0.8:
        return f"(?:{inner}){rng.choice(COUNTS)}"
    others = [_regex_text(rng, depth - 1) for _ in range(rng.randint(1, 4))]
    return f"(?:{'|'.join([inner, *others])})"


def _grammar(rng: random.Random) -> RandomConstraint:
    names = ["root", "a", "b", "c", "d"][: rng.randint(1, 5)]
    rules = {name: _node(rng, names, 3) for name in names}
    body = {rng.choice(("ebnf", "guided_grammar")): write_rules(rules)}
    return RandomConstraint(body, lambda text: derives(rules, text), is_costly_to_judge=True)


def _node(rng: random.Random, names: list[str], depth: int) -> Node:
    kind = rng.random()
    if depth == 0 or kind < 0.2:
        return rng.choice(
            (
                ("text", _text(rng, rng.choice((0, 1, 1, 2, 6)))),
                ("text", rng.choice("ab,")),
                ("chars", frozenset(rng.sample("abc012,", rng.randint(1, 4)))),
            )
        )
    if kind < 0.4:
        return ("ref", rng.choice(names))
    if kind < 0.65:
        return ("seq", [_node(rng, names, depth - 1) for _ in range(rng.randint(0, 4))])
    if kind < 0.85:
        return ("alt", [_node(rng, names, depth - 1) for _ in range(rng.randint(1, 4))])
    least = rng.choice((0, 0, 1, 3))
    most = rng.choice((None, least, least + 1, least + 5))
    return ("rep", _node(rng, names, depth - 1), least, most)


def _tags(rng: random.Random) -> RandomConstraint:
    """Tags are read by no standard: their judge is the end of the answer."""
    form = _format(rng, 2, is_last=True)
    body = {"response_format": {"type": "structural_tag", "format": form}}
    return RandomConstraint(body, lambda text: True)


def _format(rng: random.Random, depth: int, *, is_last: bool) -> dict[str, Any]:
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "const_string", "value": rng.choice(("", "x", "<a>", "</a>", "é\n"))},
        lambda: {"type": "json_schema", "json_schema": dead_end_schema(rng)},
        lambda: {"type": "regex", "pattern": _regex_text(rng, 2)},
        lambda: {"type": "grammar", "grammar": write_rules({"root": _node(rng, ["root"], 2)})},
    ]
    if is_last:
        kinds.append(lambda: {"type": "any_text"})
    if depth:
        kinds += [
            lambda: {
                "type": "sequence",
                "elements": [
                    _format(rng, depth - 1, is_last=False) for _ in range(rng.randint(1, 3))
                ],
            },
            lambda: {
                "type": "or",
                "elements": [
                    _format(rng, depth - 1, is_last=is_last) for _ in range(rng.randint(1, 3))
                ],
            },
            lambda: {"type": "optional", "content": _format(rng, depth - 1, is_last=is_last)},
            lambda: {"type": "star", "content": _format(rng, depth - 1, is_last=False)},
            lambda: {"type": "plus", "content": _format(rng, depth - 1, is_last=False)},
            lambda: {
                "type": "repeat",
                "content": _format(rng, depth - 1, is_last=False),
                "min": rng.randint(0, 2),
                "max": rng.choice((-1, 2, 3)),
            },
            lambda: _tag(rng, depth),
            lambda: {
                "type": "tags_with_separator",
                "tags": [_tag(rng, depth) for _ in range(rng.randint(1, 3))],
                "separator": rng.choice(("", ",", "\n")),
                "at_least_one": rng.random() < 0.5,
                "stop_after_first": rng.random() < 0.3,
            },
        ]
        if is_last:
            kinds.append(
                lambda: {
                    "type": "triggered_tags",
                    "triggers": ["<"],
                    "tags": [_tag(rng, depth) for _ in range(rng.randint(1, 3))],
                    "at_least_one": rng.random() < 0.5,
                    "stop_after_first": rng.random() < 0.3,
                }
            )
    return rng.choice(kinds)()


def _tag(rng: random.Random, depth: int) -> dict[str, Any]:
    return {
        "type": "tag",
        "begin": rng.choice(("<a>", "<b>", "<", "<f=x>")),
        "content": _format(rng, depth - 1, is_last=rng.random() < 0.4),
        "end": rng.choice(("</a>", "", ">", ["</a>", "|"])),
    }
