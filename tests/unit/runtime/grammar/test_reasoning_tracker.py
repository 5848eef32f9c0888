"""The end of the reasoning, against a reading of the whole text by one regular expression."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from baton.runtime.grammar.reasoning_tracker import (
    ReasoningTracker,
    TokenPlace,
    tokens_of_answer,
)
from baton.sched.types.reasoning import ReasoningGate, ReasoningMarker, ReasoningPhase
from tests.support.effort import examples

PIECES = ("a", "b{", " ", "\n", "\n\n", "x\n", "«", "»", "☎")
"""Tokens by id; the last three are the markers that begin and end the reasoning, and a call."""
BEGIN, END, CALL = 6, 7, 8
TOKENS = st.lists(st.integers(0, len(PIECES) - 1), max_size=14)


def piece_bytes(token: int) -> bytes:
    return PIECES[token].encode()


def gate(start: ReasoningPhase, **more: object) -> ReasoningGate:
    return ReasoningGate(
        start=start,
        begins=(ReasoningMarker((BEGIN,)),),
        ends=(ReasoningMarker((END,)),),
        call_ids=(CALL,),
        is_ended_by_calls=True,
        **{"lead_newlines": 2, **more},  # type: ignore[arg-type]
    )


def naive_answer(start: ReasoningPhase, text: str) -> str | None:
    """Text behind the reasoning, by the documented rules; None: there is none yet."""
    if start is ReasoningPhase.CONTENT:
        return text
    if start is ReasoningPhase.UNDECIDED:
        found = re.match(r"\s*«", text)
        if found is None:
            return text if text.strip() else None
        return naive_answer(ReasoningPhase.INSIDE, text[found.end() :])
    if start is ReasoningPhase.INSIDE:
        is_blank = True
        for place, char in enumerate(text):
            if char == "»":
                return naive_answer(ReasoningPhase.BEHIND, text[place + 1 :])
            if char == "☎":
                return text[place:]
            if char == "«" and is_blank:
                continue
            is_blank = is_blank and char in " \n"
        return None
    newlines = re.match(r"\n*", text)
    assert newlines is not None
    rest = text[newlines.end() :]
    if not rest:
        return None
    if rest[0] == "«":
        return naive_answer(ReasoningPhase.INSIDE, rest[1:])
    return rest


def has_many_newlines(start: ReasoningPhase, text: str) -> bool:
    """Behind the reasoning stand more newlines than models write: which token of them begins the
    answer is not to be seen in the text.
    """
    begins_behind = start is ReasoningPhase.BEHIND and text.startswith("\n\n\n")
    return begins_behind or "»\n\n\n" in text


@pytest.mark.parametrize("start", ReasoningPhase)
@given(tokens=TOKENS)
@settings(max_examples=examples(400), deadline=None)
def test_answer_is_that_of_the_whole_text(start: ReasoningPhase, tokens: list[int]) -> None:
    text = "".join(PIECES[token] for token in tokens)
    assume(not has_many_newlines(start, text))
    answer = tokens_of_answer(gate(start), piece_bytes, tokens)
    assert "".join(PIECES[token] for token in answer) == (naive_answer(start, text) or "")


@pytest.mark.parametrize("start", ReasoningPhase)
@given(tokens=TOKENS, budget=st.none() | st.integers(0, 5), data=st.data())
@settings(max_examples=examples(200), deadline=None)
def test_forced_tokens_end_a_reasoning_at_its_limit(
    start: ReasoningPhase, tokens: list[int], budget: int | None, data: st.DataObject
) -> None:
    """An answer that follows the forced tokens has at most `budget` tokens in each block, and the
    end behind them; a tracker that is fed the tokens again stands in the same state.
    """
    forced_end = (3, END, 4)
    limited = gate(start, budget=budget, forced_end=forced_end)
    tracker = ReasoningTracker(limited, piece_bytes)
    output: list[int] = []
    free_inside = 0
    wanted: list[int] = []
    for token in tokens:
        forced = tracker.forced_token
        if wanted:
            assert forced == wanted.pop(0)
        elif forced is not None:
            assert budget is not None
            assert free_inside >= budget
            assert forced == forced_end[0]
            wanted = list(forced_end[1:])
        drawn = token if forced is None else forced
        was_inside = tracker.phase is ReasoningPhase.INSIDE
        place = tracker.advance(drawn)
        output.append(drawn)
        if was_inside and forced is None and tracker.phase is ReasoningPhase.INSIDE:
            free_inside += place is TokenPlace.REASONING
            assert budget is None or free_inside <= budget + output.count(BEGIN)
    again = ReasoningTracker(limited, piece_bytes)
    for token in output:
        again.advance(token)
    assert (again.phase, again.forced_token, again.lead_newlines) == (
        tracker.phase,
        tracker.forced_token,
        tracker.lead_newlines,
    )


@pytest.mark.parametrize(
    ("pieces", "answer"),
    [
        (("Here is", " my thoughts:", " a", "nd The End", "."), "."),
        (("Here is", " my thoughts: The", " End", "\n\n", "{"), "{"),
        (("Here is", " my house", "The End"), "Here is my houseThe End"),
        (("\n", "Here is my thoughts:The En", "The End", "\n", "{"), "{"),
        (("The End", "x"), "The Endx"),
        (("Here is my thoughts:", "The End\n", "\n", "{"), "{"),
    ],
)
def test_markers_that_are_text_are_found_across_tokens(
    pieces: tuple[str, ...], answer: str
) -> None:
    texts = [piece.encode() for piece in pieces]
    text_gate = ReasoningGate(
        start=ReasoningPhase.UNDECIDED,
        begins=(ReasoningMarker((0, 1), "Here is my thoughts:"),),
        ends=(ReasoningMarker((3,), "The End"),),
        lead_newlines=2,
    )
    found = tokens_of_answer(text_gate, texts.__getitem__, range(len(texts)))
    assert "".join(pieces[token] for token in found) == answer


def test_end_marker_of_several_tokens_is_completed() -> None:
    """Nothing else may stand in front of its last token."""
    channel_gate = ReasoningGate(
        start=ReasoningPhase.INSIDE, ends=(ReasoningMarker((BEGIN, 0, END)),)
    )
    tracker = ReasoningTracker(channel_gate, piece_bytes)
    forced = []
    for token in (0, BEGIN, BEGIN, 0, END, BEGIN, 0):
        tracker.advance(token)
        forced.append(tracker.forced_token)
    assert forced == [None, None, None, END, None, None, None]


def test_end_marker_of_several_tokens_is_found() -> None:
    channel_gate = ReasoningGate(
        start=ReasoningPhase.INSIDE, ends=(ReasoningMarker((BEGIN, 0, END)),)
    )
    tokens = [BEGIN, 0, BEGIN, 1, BEGIN, BEGIN, 0, END, 1, 0]
    assert tokens_of_answer(channel_gate, piece_bytes, tokens) == [1, 0]


def test_other_text_in_the_token_of_an_end_marker_is_reported() -> None:
    text_gate = ReasoningGate(start=ReasoningPhase.INSIDE, ends=(ReasoningMarker((0,), "The End"),))
    tracker = ReasoningTracker(text_gate, [b"The E", b"nd{"].__getitem__)
    tracker.advance(0)
    assert not tracker.has_overrun
    tracker.advance(1)
    assert tracker.has_overrun
