"""Compiled grammars with many users: they get further lexers, and answers do not depend on which."""

from __future__ import annotations

import random
import select
from array import array
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from baton.runtime.grammar import store as store_module
from baton.runtime.grammar import token_masks
from baton.runtime.grammar.store import GrammarStore
from baton.runtime.grammar.token_constraint import GrammarState, TokenConstraint
from baton.sched.types.plan import AdmittedSeq
from baton.sched.types.request import SamplingParams
from tests.support.grammars.engines import make_store

SECS = 30.0
TEXT = 'start: %json {"type": "object", "properties": {"k": {"type": "string"}}}'
THREADS = 4


@pytest.fixture
def store(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> GrammarStore:
    monkeypatch.setattr(store_module, "USERS_PER_LEXER", 2)
    monkeypatch.setattr(token_masks, "PARALLEL_SECS", 0.0)
    return make_store(checkpoint, threads=THREADS)


def compile_one(store: GrammarStore, handle: int, text: str) -> None:
    """Wait until this request's grammar is there. Everything asked for before it is there then, too."""
    if store.request(handle, text):
        return
    outcomes = []
    while not outcomes:
        readable, _, _ = select.select([store.event_fd], [], [], SECS)
        assert readable, "the end of a compilation was not reported"
        outcomes = store.take_outcomes()
    assert [(outcome.handle, outcome.error) for outcome in outcomes] == [(handle, None)]


def start_sequences(store: GrammarStore, users: int) -> list[TokenConstraint]:
    """Sequences of as many requests with one grammar, which start when all lexers are there."""
    for handle in range(users):
        compile_one(store, handle, TEXT)
    compile_one(store, users, 'start: "another grammar"')
    made = []
    for handle in range(users):
        params = SamplingParams(max_new_tokens=9, grammar=TEXT)
        sequence = store.start_sequence(
            AdmittedSeq(
                slot=0, handle=handle, params=params, prompt_tokens=1, history=array("i", [3])
            )
        )
        assert sequence is not None
        made.append(sequence)
    return made


def lexer_counts(sequences: list[TokenConstraint]) -> list[int]:
    """Number of sequences of each lexer."""
    return sorted(Counter(id(sequence.lexer) for sequence in sequences).values())


def test_sequences_are_shared_out_among_a_lexer_per_thread(store: GrammarStore) -> None:
    sequences = start_sequences(store, 40)
    assert lexer_counts(sequences) == [10] * THREADS
    masks, usable = store.filler.fill_masks(sequences)
    assert all(usable)
    assert len(np.unique(masks, axis=0)) == 1
    token = int(token_masks.allowed_ids(masks[0])[0])
    for sequence in sequences:
        sequence.advance(token)
    masks, usable = store.filler.fill_masks(sequences)
    assert all(usable)
    assert len(np.unique(masks, axis=0)) == 1


def test_grammar_with_few_users_has_one_lexer(store: GrammarStore) -> None:
    assert lexer_counts(start_sequences(store, 1)) == [1]


def test_grammar_that_takes_long_to_compile_is_compiled_once(
    store: GrammarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "COSTLY_COMPILE_SECS", -1.0)
    assert lexer_counts(start_sequences(store, 12)) == [12]


def test_grammar_whose_lexer_is_full_is_compiled_again(
    store: GrammarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers with one grammar share the states of its lexer, which are limited; later ones go on with others."""
    limits = {**store_module.RANK_LIMITS, "max_lexer_states": 100}
    monkeypatch.setattr(store_module, "RANK_LIMITS", limits)
    text = "start: /[ab]*a[ab]{12}c/"
    rng = random.Random(1)
    states = []
    for handle in range(4):
        compile_one(store, handle, text)
        params = SamplingParams(max_new_tokens=9, grammar=text)
        admitted = AdmittedSeq(
            slot=0, handle=handle, params=params, prompt_tokens=1, history=array("i", [3])
        )
        sequence = store.start_sequence(admitted)
        assert sequence is not None
        tokens = 0
        while tokens < 2000:
            masks, (is_usable,) = store.filler.fill_masks([sequence])
            if not is_usable:
                break
            sequence.advance(rng.choice(token_masks.allowed_ids(masks[0]).tolist()[:2]))
            tokens += 1
        states.append((sequence.state, tokens > 10))
    assert states == [(GrammarState.FAILED, True)] * 4
