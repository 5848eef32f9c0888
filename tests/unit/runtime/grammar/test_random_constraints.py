"""Random constraints, with parts that have no value: answered to their end, or refused."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from baton.sched.types.request import FinishReason
from baton.server.request.grammar.request_grammar import GrammarCheck, make_request_grammar
from tests.support.grammars.naive_ebnf import Node, derives, words_of
from tests.support.grammars.random_walks import (
    MARKERS,
    make_piece_store,
    walk_constraints,
    walk_grammars,
)

CONSTRAINTS = 100
ANSWERS = 3
LONGEST = 150
TEXT_AND_NUMBER = {
    "type": "array",
    "prefixItems": [{"const": "<a>"}, {"const": 1}],
    "items": False,
    "minItems": 2,
}
"""Written as rules of llguidance's language, as all schemas with numbers."""
TAG_WITH_NUMBER = {
    "type": "sequence",
    "elements": [
        {"type": "const_string", "value": "x"},
        {"type": "json_schema", "json_schema": TEXT_AND_NUMBER},
    ],
}


def test_accepted_constraints_are_answered_to_their_end(tmp_path: Path) -> None:
    """tests/fault/test_grammar_ends.py does this for thousands."""
    store = make_piece_store(tmp_path)
    report = walk_constraints(store, range(CONSTRAINTS), answers=ANSWERS, longest=LONGEST)
    assert not report.problems, "\n".join(report.problems)
    assert report.outcomes["accepted"] > CONSTRAINTS // 2
    assert report.outcomes["judged"] > CONSTRAINTS


@pytest.mark.parametrize(
    "body",
    [
        {"guided_choice": ["<a>"]},
        {"regex": r"x?<a>+"},
        {"ebnf": 'root ::= "<a>" root | "<a>"'},
        {"json_schema": {"const": "<|eos|>"}},
        {"json_schema": TEXT_AND_NUMBER},
        {"response_format": {"type": "structural_tag", "format": TAG_WITH_NUMBER}},
    ],
    ids=str,
)
def test_text_that_looks_like_a_special_token_is_written_in_letters(
    tmp_path: Path, body: dict[str, object]
) -> None:
    grammar = make_request_grammar(GrammarCheck(body), "none", MARKERS)
    store = make_piece_store(tmp_path)
    (answers,) = walk_grammars(store, [grammar.text], random.Random(1), answers=5, longest=LONGEST)
    for answer in answers:
        assert answer.finish is FinishReason.STOP
        assert "<a>" in answer.text() or answer.text() == '"<|eos|>"'


def test_derived_texts_are_the_words_of_a_grammar() -> None:
    """The judge of answers to grammars agrees with the naive reading."""
    rules: dict[str, Node] = {
        "root": ("alt", [("seq", [("ref", "a"), ("ref", "root")]), ("text", "b"), ("ref", "root")]),
        "a": ("rep", ("alt", [("text", ""), ("chars", frozenset("ab"))]), 1, 2),
    }
    words = words_of(rules, 4)
    assert {text for text in ["", *_texts("abc", 4)] if derives(rules, text)} == words


def _texts(letters: str, longest: int) -> list[str]:
    texts = [""]
    found = []
    for _ in range(longest):
        texts = [text + letter for text in texts for letter in letters]
        found += texts
    return found
