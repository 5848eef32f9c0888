"""The limit of a reasoning that is messages (gpt-oss), against a reading of the whole text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from baton.runtime.grammar.gated_grammar import GatedGrammar, GateVocabulary
from baton.runtime.grammar.reasoning_tracker import ReasoningTracker
from baton.sched.types.reasoning import (
    ReasoningGate,
    ReasoningMarker,
    ReasoningMessage,
    ReasoningPhase,
)
from baton.sched.types.request import SamplingParams
from tests.support.effort import examples
from tests.support.engines.engine_run import make_engine
from tests.support.grammars.engines import follow_grammars, make_store, request, run_to_end
from tests.support.grammars.reasoning import make_thinking_checkpoint

PIECES = "abCAFYmESs"
"""Tokens by id: text, then channel, analysis, final, commentary, message, end, start, assistant."""
HEADER = "CAm"
FINAL = "CFm"
TO_FINAL = "ESs" + FINAL
TO_NEXT = "ESs"


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(PIECES.index(char) for char in text)


def gate(budget: int, forced_end: str, *, starts_inside: bool = False) -> ReasoningGate:
    ends = tuple(ids_of(char) for char in "ESC")
    return ReasoningGate(
        start=ReasoningPhase.INSIDE,
        ends=(ReasoningMarker(ids_of(FINAL)),),
        budget=budget,
        forced_end=ids_of(forced_end),
        message=ReasoningMessage(ids_of(HEADER), ends, starts_inside),
    )


class PieceTrie:
    """The part of llguidance's tokenizer that a gate without a grammar needs."""

    eos_tokens = ()

    def decode_bytes(self, tokens: list[int]) -> bytes:
        return b"".join(map(piece_bytes, tokens))


def piece_bytes(token: int) -> bytes:
    return PIECES[token].encode()


def follow(tracker: ReasoningTracker, wishes: list[int]) -> str:
    """The answer of a model that would write `wishes` and is held to forced and banned tokens."""
    answer = ""
    for wish in wishes:
        token = wish if tracker.forced_token is None else tracker.forced_token
        if token == tracker.second_header_id:
            token = PIECES.index("Y")
        tracker.advance(token)
        answer += PIECES[token]
    return answer


def texts_of_reasoning(answer: str, *, starts_inside: bool) -> list[str]:
    """Texts of the messages with reasoning in front of the content."""
    reasoning = (HEADER if starts_inside else "") + answer
    reasoning = reasoning.partition(FINAL)[0]
    return re.findall(f"{HEADER}([^ESC]*)", reasoning)


@pytest.mark.parametrize("starts_inside", [False, True])
@pytest.mark.parametrize("forced_end", [TO_FINAL, TO_NEXT])
@given(
    parts=st.lists(st.sampled_from([*PIECES, HEADER, HEADER, FINAL, "CYm", "abab"]), max_size=14),
    budget=st.integers(0, 6),
)
@settings(max_examples=examples(300), deadline=None)
def test_text_of_all_messages_has_at_most_the_limit(
    forced_end: str, starts_inside: bool, parts: list[str], budget: int
) -> None:
    limited = gate(budget, forced_end, starts_inside=starts_inside)
    tracker = ReasoningTracker(limited, piece_bytes)
    answer = follow(tracker, list(ids_of("".join(parts) + "ab")))
    texts = texts_of_reasoning(answer, starts_inside=starts_inside)
    total = sum(map(len, texts))
    assert total <= budget
    # At the limit the forced end follows, as far as the answer goes.
    assert tracker.is_at_limit == (bool(texts) and total == budget)
    if tracker.is_at_limit:
        begin = (HEADER if starts_inside else "") + answer
        places = [
            found.end() for found in re.finditer(f"{HEADER}[^ESC]*", begin.partition(FINAL)[0])
        ]
        behind = begin[places[-1] :]
        assert behind[: len(forced_end)] == forced_end[: len(behind)]
    again = ReasoningTracker(limited, piece_bytes)
    for token in ids_of(answer):
        again.advance(token)
    assert (again.phase, again.forced_token) == (tracker.phase, tracker.forced_token)


def test_second_header_is_banned_behind_the_limit() -> None:
    vocabulary = GateVocabulary(cast(LLTokenizer, PieceTrie()))
    constraint = GatedGrammar(gate(1, TO_NEXT, starts_inside=True), vocabulary, None)
    for token in ids_of("a" + TO_NEXT):
        assert constraint.banned_ids == ()
        constraint.advance(token)
    assert constraint.banned_ids == ()
    constraint.advance(PIECES.index("C"))
    assert list(constraint.banned_ids) == [PIECES.index("A")]


def test_no_reasoning_follows_its_limit() -> None:
    tracker = ReasoningTracker(gate(2, TO_NEXT), piece_bytes)
    answer = follow(tracker, list(ids_of("CAmabbbbCAmbaESsCFmab")))
    assert answer == "CAmabESsCYmbaESsCFmab"


def test_engine_ends_messages_at_their_limit(tmp_path: Path) -> None:
    """A model that wants to write one token for ever."""
    checkpoint = make_thinking_checkpoint(tmp_path / "llama")
    engine = follow_grammars(make_engine(checkpoint), make_store(checkpoint))
    limited = gate(3, TO_FINAL, starts_inside=True)
    params = SamplingParams(
        reasoning=limited, logit_bias=((1, 60.0),), max_new_tokens=14, temperature=0.0
    )
    (answer,) = run_to_end(engine, [request([1, 2, 3], params)])
    assert answer.tokens == [*[1] * 3, *ids_of(TO_FINAL), *[1] * 5]
    engine.close()
