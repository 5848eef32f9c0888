"""Candidates of a plan follow from its context and the outcomes that are sent back."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from baton.sched.fairness.sharing import SharingStrategy
from baton.sched.types.candidates import (
    REFUSED,
    CandidateEnded,
    CandidateOutcome,
    CandidatePlanned,
    CandidateQueries,
    CandidateRefused,
    PrefillContext,
    next_candidate,
)
from baton.sched.types.plan import StopReason
from baton.sched.types.sequence import Seq, SeqState
from tests.support.sched.sched_sim import request

ADMITTED = CandidatePlanned(tokens=8, was_admitted=True, is_unfinished=False)
STARTED = CandidatePlanned(tokens=8, was_admitted=True, is_unfinished=True)
CONTINUED = CandidatePlanned(tokens=8, was_admitted=False, is_unfinished=True)
FITS_NO_OTHER = CandidateRefused(StopReason.NO_PAGES, has_reservation=False, fits_no_other=True)
TOOK_RESERVATION = CandidateRefused(StopReason.NO_PAGES, has_reservation=True, fits_no_other=False)


def sequence(handle: int, state: SeqState = SeqState.WAITING, prompt_len: int = 8) -> Seq:
    seq = Seq(request(handle, [1] * prompt_len, 4), array("i", [1] * prompt_len), 4)
    seq.state = state
    return seq


def context_of(
    waiting: Sequence[Seq], unfinished: Sequence[Seq] = (), **changes: object
) -> PrefillContext:
    context = PrefillContext(
        unfinished=unfinished,
        reorders_unfinished=False,
        preemptor=None,
        reserved=None,
        max_partial_prefills=None,
        skip_ahead=8,
        free_slots=8,
        token_budget=64,
        queries=CandidateQueries(
            order_candidates=lambda _: iter(waiting),
            sort_unfinished=lambda context: list(context.unfinished),
            extend_tokens=lambda seq: seq.total_len,
            importance=lambda _: 0.0,
        ),
    )
    return context._replace(**changes)  # type: ignore[arg-type]


def tried(context: PrefillContext, outcomes: dict[int, CandidateOutcome]) -> list[int]:
    """Handles of the candidates; those without an outcome are admitted."""
    candidates = SharingStrategy().order_prefill(context)
    handles = []
    seq = next(candidates, None)
    while seq is not None:
        handles.append(seq.handle)
        seq = next_candidate(candidates, outcomes.get(seq.handle, ADMITTED))
    return handles


def test_context_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        context_of([]).skip_ahead = 1  # type: ignore[misc]


def test_prompts_in_progress_precede_waiting_requests() -> None:
    running = sequence(0, SeqState.RUNNING)
    context = context_of([sequence(1), sequence(2)], [running])
    assert tried(context, {0: CONTINUED}) == [0, 1, 2]


def test_admissions_end_with_the_last_slot() -> None:
    waiting = [sequence(handle) for handle in range(4)]
    assert tried(context_of(waiting, free_slots=2), {}) == [0, 1]
    assert tried(context_of(waiting, free_slots=2), {0: CandidateEnded()}) == [0, 1, 2]


def test_refusals_up_to_skip_ahead_are_passed() -> None:
    waiting = [sequence(handle) for handle in range(6)]
    refused = dict.fromkeys(range(6), REFUSED)
    assert tried(context_of(waiting, skip_ahead=2), refused) == [0, 1, 2]


def test_refusal_that_fits_no_other_ends_admissions() -> None:
    waiting = [sequence(handle) for handle in range(3)]
    assert tried(context_of(waiting), {1: FITS_NO_OTHER}) == [0, 1]


def test_request_starts_behind_unfinished_prompts_only_if_the_step_completes_it() -> None:
    waiting = [sequence(0), sequence(1, prompt_len=40), sequence(2, prompt_len=8)]
    context = context_of(waiting, reorders_unfinished=True, max_partial_prefills=1, token_budget=24)
    assert tried(context, {0: STARTED}) == [0, 2]


def test_only_the_preemptor_is_admitted_until_it_was_tried() -> None:
    waiting = [sequence(handle) for handle in range(4)]
    assert tried(context_of(waiting, preemptor=waiting[2]), {}) == [2, 3]


@pytest.mark.parametrize(
    ("first_outcome", "expected"),
    [(FITS_NO_OTHER, [0, 5]), (TOOK_RESERVATION, [0, 1])],
    ids=["untried", "taken by another"],
)
def test_reserved_request_comes_last_unless_another_took_the_reservation(
    first_outcome: CandidateOutcome, expected: list[int]
) -> None:
    context = context_of([sequence(0), sequence(1)], reserved=sequence(5))
    assert tried(context, {0: first_outcome}) == expected


def test_reserved_request_that_was_tried_is_not_tried_again() -> None:
    waiting = [sequence(handle) for handle in range(3)]
    assert tried(context_of(waiting, reserved=waiting[1]), {1: REFUSED}) == [0, 1, 2]
