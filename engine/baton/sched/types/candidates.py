"""Exchange between the prefill planner and the strategy that orders its candidates.

1. The planner hands a `PrefillContext` to the strategy, once per plan.
2. The strategy yields one candidate at a time; the planner tries it and sends back a
   `CandidateOutcome`.
3. The strategy chooses the next candidate from the context and the outcomes so far; the planner
   stops asking when the step is full.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.sched.types.plan import StopReason
from baton.sched.types.sequence import Seq


class CandidatePlanned(NamedTuple):
    """The step computes `tokens` of the candidate's prompt (D: its pages are granted)."""

    tokens: int
    was_admitted: bool
    """The candidate was a waiting request; it holds a slot now."""
    is_unfinished: bool
    """A later step has to compute the rest of its prompt."""


class CandidateRefused(NamedTuple):
    """A waiting request was not admitted: a slot or pages were missing."""

    reason: StopReason
    has_reservation: bool
    """Pages are kept for this request from now on."""
    fits_no_other: bool
    """No other waiting request would get pages in this plan."""


class CandidateEnded(NamedTuple):
    """A waiting request ended with an error: its first token could not come in time."""


CandidateOutcome = CandidatePlanned | CandidateRefused | CandidateEnded
REFUSED = CandidateRefused(StopReason.NO_PAGES, has_reservation=False, fits_no_other=False)
"""A refusal that concerns no other candidate."""
Candidates = Generator[Seq, CandidateOutcome, None]
"""Sequences to try, one at a time; each outcome is sent back before the next one is asked for."""


def next_candidate(candidates: Candidates, outcome: CandidateOutcome) -> Seq | None:
    """Send the outcome of the last candidate and return the next one; None: there is none."""
    try:
        return candidates.send(outcome)
    except StopIteration:
        return None


def fixed_candidates(seqs: Iterable[Seq]) -> Candidates:
    """Candidates in this order, whatever their outcomes."""
    for seq in seqs:  # noqa: UP028 - `yield from` would send the outcomes to the iterator
        yield seq


def refuse_each(candidates: Candidates) -> Iterator[Seq]:
    """All candidates in the order in which they are tried when none of them can be admitted."""
    seq = next(candidates, None)
    while seq is not None:
        yield seq
        seq = next_candidate(candidates, REFUSED)


class PrefillContext(NamedTuple):
    """Facts of one plan that its candidates are chosen by. A tuple: every plan makes one."""

    unfinished: Sequence[Seq]
    """Prompts in progress."""
    reorders_unfinished: bool
    """Prompts in progress compete with waiting requests in policy order; else they go first."""
    preemptor: Seq | None
    """The waiting request that others were preempted for in this plan.

    No other one is admitted before it.
    """
    reserved: Seq | None
    """The waiting request that pages are kept for.

    It is tried when all others have been, unless it was tried before.
    """
    max_partial_prefills: int | None
    """A request starts only behind fewer unfinished prompts, or if this step completes it.

    None: no limit.
    """
    skip_ahead: int
    """Waiting requests that may be passed over."""
    free_slots: int
    token_budget: int
    """Prompt tokens that the step may compute."""
    queries: CandidateQueries


@dataclass(frozen=True, slots=True)
class CandidateQueries:
    """Questions about candidates that have the same form in every plan; asking changes no table."""

    order_candidates: Callable[[PrefillContext], Iterator[Seq]]
    """Waiting requests in policy order, the prompts in progress among them if they are
    reordered.
    """
    sort_unfinished: Callable[[PrefillContext], list[Seq]]
    """Prompts in progress in policy order."""
    extend_tokens: Callable[[Seq], int]
    """Tokens of a waiting request that are not cached."""
    importance: Callable[[Seq], float]
    """Rank by priority alone, smaller first."""
