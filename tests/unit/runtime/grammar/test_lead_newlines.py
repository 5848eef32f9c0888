"""Newlines behind the reasoning, of which a grammar does not know, up to the number that models write."""

from __future__ import annotations

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from baton.runtime.grammar.gated_grammar import GatedGrammar, GateVocabulary
from baton.runtime.grammar.sequence_grammar import SequenceGrammar
from baton.runtime.grammar.token_constraint import GrammarState
from baton.runtime.grammar.token_masks import MaskFiller, is_allowed
from baton.runtime.grammar.token_trie import TokenizerSource, build_trie
from baton.sched.types.reasoning import ReasoningPhase
from tests.support.grammars.reasoning import (
    LONG_NEWLINES,
    make_gate,
    make_thinking_checkpoint,
    token_of,
)
from tests.support.models.checkpoints import EOS, VOCAB

ONE = token_of("\n")
TWO, THREE = LONG_NEWLINES + 1, LONG_NEWLINES + 2
NEWLINES = {ONE: 1, TWO: 2, THREE: 3}


@pytest.fixture(scope="module")
def trie(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    path = make_thinking_checkpoint(tmp_path_factory.mktemp("thinking") / "llama")
    text = (path / "tokenizer.json").read_text()
    added = [(TWO, "\n\n", False), (THREE, "\n\n\n", False)]
    return build_trie(TokenizerSource(text, added, [EOS]), VOCAB)


def start(trie: LLTokenizer, most: int | None, grammar: str) -> GatedGrammar:
    def start_grammar() -> SequenceGrammar:
        return SequenceGrammar(LLMatcher(trie, grammar), frozenset([EOS]))

    gate = make_gate(ReasoningPhase.BEHIND, lead_newlines=most)
    return GatedGrammar(gate, GateVocabulary(trie), start_grammar)


def allowed_newlines(trie: LLTokenizer, constraint: GatedGrammar) -> set[int]:
    masks, _ = MaskFiller(trie.vocab_size, VOCAB, 1).fill_masks([constraint])
    return {count for token, count in NEWLINES.items() if is_allowed(np.asarray(masks[0]), token)}


@pytest.mark.parametrize(
    ("most", "output", "allowed"),
    [
        (2, [], {1, 2}),
        (2, [ONE], {1}),
        (2, [ONE, ONE], set()),
        (2, [TWO], set()),
        (1, [], {1}),
        (1, [ONE], set()),
        (0, [], set()),
        (3, [], {1, 2, 3}),
        (3, [TWO], {1}),
    ],
)
def test_so_many_newlines_may_stand_in_front_of_a_grammar(
    trie: LLTokenizer, most: int, output: list[int], allowed: set[int]
) -> None:
    constraint = start(trie, most, "start: /[ab]{3}/")
    for token in output:
        assert constraint.advance(token) is GrammarState.OPEN
    assert allowed_newlines(trie, constraint) == allowed


def test_further_newlines_are_the_grammars(trie: LLTokenizer) -> None:
    constraint = start(trie, 2, r"start: /\n\n[ab]/")
    for token, state in (
        (ONE, GrammarState.OPEN),
        (TWO, GrammarState.OPEN),  # with the first one they are three
        (token_of("a"), GrammarState.COMPLETE),
    ):
        assert constraint.advance(token) is state
