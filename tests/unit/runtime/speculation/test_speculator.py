"""Offers of a speculator, and what it learns from the tokens that come."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from baton.runtime.speculation.acceptance import (
    STREAKS,
    Acceptance,
    AcceptanceByStreak,
    compare_drafts,
)
from baton.runtime.speculation.speculator import LINGER, LOOK_INTERVAL, Speculator
from baton.sched.types.plan import StepPlan, StopReason
from baton.sched.types.request import SamplingParams, ValidatedRequest
from baton.sched.types.sequence import Seq, SeqState


class Echo:
    """Proposes the sequence's own tokens again, and notes what it was told."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, list[int]] = {}

    def start(self, seq: Seq) -> None:
        self.tokens[seq.handle] = list(seq.tokens)

    def append(self, handle: int, tokens: array[int]) -> None:
        self.tokens[handle] += tokens

    def propose(self, handles: Sequence[int], most: Sequence[int]) -> list[array[int]]:
        return [array("i", self.tokens[h][:n]) for h, n in zip(handles, most, strict=True)]

    def finish(self, handle: int) -> None:
        self.ended[handle] = self.tokens.pop(handle)


class Grammars:
    """Of the sequence in slot 0."""

    def __init__(self, forced: Sequence[int] = (), admitted: int = 100) -> None:
        self.forced = list(forced)
        self.admitted = admitted

    def forced_tokens(self, slot: int) -> list[int]:
        return self.forced

    def count_admitted(self, slot: int, tokens: Sequence[int]) -> int:
        return min(self.admitted, len(tokens))


def sequence(handle: int = 0, grammar: str = "", draft_limit: int | None = None) -> Seq:
    req = ValidatedRequest(
        handle, "r", array("i", (1, 2, 3)), SamplingParams(grammar=grammar), draft_limit=draft_limit
    )
    seq = Seq(req, array("i", (1, 2, 3, 1)), 100)
    seq.state = SeqState.RUNNING
    seq.slot = 0
    seq.pages_sent_to_runner = 1
    return seq


def plan(*drafted: int) -> StepPlan:
    return StepPlan(1, (), 0, (), array("i"), StopReason.QUEUE_EMPTY, drafted=drafted)


@pytest.mark.parametrize(
    ("drafts", "drawn", "found"),
    [
        ([1, 2, 3], [1, 2, 3], (3, 3)),
        ([1, 2, 3], [1, 9, 3], (1, 2)),
        ([1, 2, 3], [1], (1, 1)),
        ([1], [1, 2, 3], (1, 1)),
        ([], [1], (0, 0)),
        ([7], [1], (0, 1)),
    ],
)
def test_drafts_count_up_to_the_first_wrong_one(
    drafts: list[int], drawn: list[int], found: tuple[int, int]
) -> None:
    assert compare_drafts(drafts, drawn) == found


def test_the_share_follows_what_was_compared() -> None:
    acceptance = Acceptance(0.5, 0.95)
    assert acceptance.share == 0.5
    for _ in range(100):
        acceptance.learn(3, 3)
    assert acceptance.share > 0.9
    for _ in range(100):
        acceptance.learn(0, 1)
    assert acceptance.share < 0.1


def test_a_new_sequence_is_expected_to_do_as_the_last_ones() -> None:
    speculator = Speculator(Echo(), 4, Grammars())
    first = sequence(0)
    for _ in range(30):
        (offer,) = speculator.make_offers([first])
        first.tokens.append(9)
    assert offer.acceptance < 0.1
    offers = speculator.make_offers([sequence(1)])
    assert offers[0].acceptance < 0.2


def test_share_of_an_answer_that_copies_is_not_that_of_its_other_parts() -> None:
    acceptance = AcceptanceByStreak([0.5] * len(STREAKS), 0.995)
    for _ in range(40):
        acceptance.learn(0, 0, 1)  # wrong at once
        acceptance.learn(0, 12, 13)  # twelve of a copied text, and its end
    assert acceptance.share(0) < 0.55
    assert acceptance.share(1) > 0.9
    assert acceptance.share(11) == acceptance.share(8) < acceptance.share(7)
    # What follows longer streaks is not less sure than what was seen of shorter ones.
    fresh = AcceptanceByStreak([0.5] * len(STREAKS), 0.995)
    fresh.learn(0, 4, 4)
    assert fresh.share(8) >= fresh.share(4) >= fresh.share(1) > 0.6


def test_proposals_are_compared_whether_they_were_drafted_or_not() -> None:
    speculator = Speculator(Echo(), 4, Grammars())
    seq = sequence()
    (offer,) = speculator.look([seq])
    assert (offer.handle, offer.known, list(offer.tokens)) == (0, 4, [1, 2, 3, 1])
    seq.tokens.extend((1, 2, 3, 1))
    (later,) = speculator.look([seq])
    assert later.acceptance > offer.acceptance


def test_looks_come_in_intervals_and_drafting_lingers() -> None:
    speculator = Speculator(Echo(), 4, Grammars())
    assert speculator.is_look_due
    speculator.look([sequence(handle) for handle in range(2 * LOOK_INTERVAL)])
    for _ in range(LOOK_INTERVAL):
        assert not speculator.is_look_due
        speculator.on_planned(plan())
    assert speculator.is_look_due
    speculator.look([sequence()])
    speculator.on_planned(plan())
    assert speculator.is_look_due, "one answer is looked at in each step"
    assert not speculator.is_drafting
    speculator.on_planned(plan(3))
    for _ in range(LINGER):
        assert speculator.is_drafting
        speculator.on_planned(plan())
    assert not speculator.is_drafting


def test_forced_tokens_of_a_grammar_come_first() -> None:
    speculator = Speculator(Echo(), 4, Grammars(forced=[5, 6, 7, 8, 9]))
    (offer,) = speculator.make_offers([sequence(grammar="g")])
    assert list(offer.tokens) == [5, 6, 7, 8]
    assert offer.acceptance > 0.9


def test_drafts_end_where_the_grammar_refuses_them() -> None:
    speculator = Speculator(Echo(), 4, Grammars(admitted=2))
    (offer,) = speculator.make_offers([sequence(grammar="g")])
    assert list(offer.tokens) == [1, 2]
    assert Speculator(Echo(), 4, Grammars(admitted=0)).make_offers([sequence(grammar="g")]) == []


def test_a_slot_that_the_runner_does_not_know_is_not_asked() -> None:
    """Its grammar is still that of the sequence before."""
    seq = sequence(grammar="g")
    seq.pages_sent_to_runner = 0
    assert Speculator(Echo(), 4, Grammars(forced=[5])).make_offers([seq]) == []


@pytest.mark.parametrize(("limit", "drafts"), [(None, 4), (0, 0), (2, 2), (50, 4)])
def test_a_request_limits_its_drafts(limit: int | None, drafts: int) -> None:
    offers = Speculator(Echo(), 4, Grammars()).make_offers([sequence(draft_limit=limit)])
    assert sum(len(offer.tokens) for offer in offers) == drafts


def test_an_ended_sequence_is_left_with_all_its_tokens() -> None:
    drafter = Echo()
    speculator = Speculator(drafter, 4, Grammars())
    seq = sequence()
    speculator.make_offers([seq])
    seq.tokens.extend((8, 9))
    seq.state = SeqState.FINISHED
    speculator.make_offers([])
    assert drafter.ended == {0: [1, 2, 3, 1, 8, 9]}
