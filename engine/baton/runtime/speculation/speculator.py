"""Offers drafted tokens for the steps of one rank, and learns which drafts come true.

1. Every few steps, at most LOOK_INTERVAL, the speculator looks at the running answers without
   waiting for the device: it compares its last proposals with the tokens that came, whether a step
   had them as drafts or not, and proposes again. So acceptance is measured where nothing is
   drafted, at no cost but the host's.
2. Where the scheduler would draft (Scheduler.draft_lengths), the loop waits for the steps in
   flight, because drafts follow the last token, and offers what is proposed then; it does so before
   each step until LINGER steps in a row had no drafts.

The scheduler decides how many of the drafts a row gets (sched.planner.drafts). Grammars: their
forced tokens are offered before any other, and drafts end in front of the first token that a
grammar refuses.

Deterministic: all that it knows are the tokens of sequences. For drafts that take time there is
`model_speculator`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.runtime.speculation.acceptance import (
    FIRST_SHARE,
    RANK_MEMORY,
    SEQ_MEMORY,
    STREAKS,
    AcceptanceByStreak,
    compare_drafts,
)
from baton.runtime.speculation.drafter import Drafter
from baton.sched.planner.draft_lengths import NO_DRAFTING_COSTS, DraftingCosts
from baton.sched.types.draft_offer import DraftOffer
from baton.sched.types.plan import StepPlan
from baton.sched.types.sequence import Seq, SeqState

LOOK_INTERVAL = 8
LINGER = 4
FORCED_ACCEPTANCE = 0.98
"""Of the tokens that a grammar forces: the model may spell the same text with other tokens."""
HOPED_FOR = array("i", (0, 0))
"""Stands for the forced tokens of a grammar that cannot be asked while a step is in progress."""
WAIT_SMOOTHING = 0.1
LONGEST_WAIT_SECS = 0.1
"""A longer pause between two steps was not the planning."""


class Constraints(Protocol):
    """What the runner knows of the grammars of answers, by slot."""

    def forced_tokens(self, slot: int) -> list[int]: ...
    def count_admitted(self, slot: int, tokens: Sequence[int]) -> int: ...


class LengthChooser(Protocol):
    def __call__(
        self, offers: Sequence[DraftOffer], drafting: DraftingCosts = NO_DRAFTING_COSTS
    ) -> dict[int, int]:
        """Scheduler.draft_lengths."""


@dataclass(slots=True)
class FollowedSeq:
    seq: Seq
    known: int
    """Tokens of it that the drafter knows."""
    acceptance: AcceptanceByStreak
    streak: int = 0
    """Drafts that came true since the last one that did not."""
    proposal: array[int] = field(default_factory=lambda: array("i"))
    """Made behind the first `known` tokens."""

    @property
    def share(self) -> float:
        """Expected share of the next drafts that are drawn where those in front of them were."""
        return self.acceptance.share(self.streak)


class Speculator:
    def __init__(self, drafter: Drafter, most_drafts: int, constraints: Constraints) -> None:
        self._drafter = drafter
        self._most = most_drafts
        self._constraints = constraints
        self._followed: dict[int, FollowedSeq] = {}
        self._acceptance = AcceptanceByStreak([FIRST_SHARE] * len(STREAKS), RANK_MEMORY)
        """Of all sequences: what is expected of a new one."""
        self._steps_to_look = 0
        self._steps_to_linger = 0
        self.wait_secs = 0.0
        """Smoothed time in which the device waited for the host between two steps [s]."""

    @property
    def is_drafting(self) -> bool:
        """True while each step is planned with the last tokens known."""
        return self._steps_to_linger > 0

    @property
    def is_look_due(self) -> bool:
        return self._steps_to_look <= 0

    def on_planned(self, plan: StepPlan) -> None:
        self._steps_to_look -= 1
        self._steps_to_linger = LINGER if plan.drafted else max(self._steps_to_linger - 1, 0)

    def on_waited(self, seconds: float) -> None:
        """The device waited so long for a step that was planned with the last tokens known."""
        if seconds <= LONGEST_WAIT_SECS:
            self.wait_secs += WAIT_SMOOTHING * (seconds - self.wait_secs)

    def would_draft(self, answering: Sequence[Seq], choose: LengthChooser) -> bool:
        """True if the next step is to be planned with the last tokens known. Steps may be in
        flight.
        """
        return bool(choose(self.look(answering)))

    def draft(self, answering: Sequence[Seq], choose: LengthChooser) -> float:
        """Make drafts that take time, while no step is in flight. Returns how long they took
        [s].
        """
        return 0.0

    def look(self, answering: Sequence[Seq]) -> list[DraftOffer]:
        """Offers behind the tokens known so far, with steps in flight: to decide by."""
        self._on_look(answering)
        offers = []
        for followed in self._propose(answering):
            tokens = followed.proposal
            if not tokens and followed.seq.req.params.is_constrained:
                tokens = HOPED_FOR
            if tokens:
                offers.append(self._make_offer(followed, tokens, followed.share))
        return offers

    def _on_look(self, answering: Sequence[Seq]) -> None:
        # A look takes time for each answer: a few are looked at in each step, so that drafting
        # begins with their first tokens.
        self._steps_to_look = min(len(answering), LOOK_INTERVAL)

    def make_offers(self, answering: Sequence[Seq]) -> list[DraftOffer]:
        """Offers for the next step, while none is in flight."""
        offers = []
        for followed in self._propose(answering):
            seq = followed.seq
            tokens = followed.proposal
            acceptance = followed.share
            if seq.req.params.is_constrained:
                # The slot's grammar is still that of its last owner.
                if not seq.pages_sent_to_runner:
                    continue
                forced = self._constraints.forced_tokens(seq.slot)
                if forced:
                    tokens = array("i", forced[: self._limit(seq)])
                    acceptance = FORCED_ACCEPTANCE
                else:
                    tokens = tokens[: self._constraints.count_admitted(seq.slot, tokens)]
            if tokens:
                offers.append(self._make_offer(followed, tokens, acceptance))
        return offers

    def _make_offer(
        self, followed: FollowedSeq, tokens: array[int], acceptance: float
    ) -> DraftOffer:
        return DraftOffer(followed.seq.handle, followed.known, tokens, acceptance)

    def _propose(self, answering: Sequence[Seq]) -> list[FollowedSeq]:
        """Take over the tokens that came, and propose for all that may be drafted for."""
        current = self._follow_all(answering)
        fresh = [followed for followed in current if not followed.proposal]
        handles = [followed.seq.handle for followed in fresh]
        proposals = self._drafter.propose(handles, [self._limit(f.seq) for f in fresh])
        for followed, proposal in zip(fresh, proposals, strict=True):
            followed.proposal = proposal
        return current

    def _follow_all(self, answering: Sequence[Seq]) -> list[FollowedSeq]:
        """Take over the tokens that came. Returns those that may be drafted for."""
        self._drop_ended()
        return [self._follow(seq) for seq in answering if self._limit(seq)]

    def _limit(self, seq: Seq) -> int:
        """Most drafts of a row of this sequence."""
        asked = seq.req.draft_limit
        return self._most if asked is None else min(self._most, asked)

    def _follow(self, seq: Seq) -> FollowedSeq:
        followed = self._followed.get(seq.handle)
        if followed is None:
            self._drafter.start(seq)
            acceptance = AcceptanceByStreak(self._acceptance.shares, SEQ_MEMORY)
            followed = self._followed[seq.handle] = FollowedSeq(seq, len(seq.tokens), acceptance)
            return followed
        self._take_over_tokens(followed)
        return followed

    def _take_over_tokens(self, followed: FollowedSeq) -> None:
        came = followed.seq.tokens[followed.known :]
        if not came:
            return
        right, trials = compare_drafts(followed.proposal, came)
        for acceptance in (followed.acceptance, self._acceptance):
            acceptance.learn(followed.streak, right, trials)
        followed.streak = followed.streak + right if right == trials else 0
        followed.proposal = array("i")
        followed.known += len(came)
        self._drafter.append(followed.seq.handle, came)

    def _drop_ended(self) -> None:
        ended = [f for f in self._followed.values() if f.seq.state is SeqState.FINISHED]
        for followed in ended:
            self._take_over_tokens(followed)
            self._drafter.finish(followed.seq.handle)
            del self._followed[followed.seq.handle]
