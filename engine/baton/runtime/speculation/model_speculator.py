"""Offers the drafts of a model or head, where the scheduler takes enough of them.

They take time, so the scheduler says how many it would take before they are made
(`Scheduler.draft_lengths`), by the share that came true before and the measured time of the draft
model's steps. Nothing is drafted while a step is in flight.

What comes true is known only where drafts are made. So that it is measured at all, a few are made
from time to time where none pay, for the sequence that the draft model is least behind of: a probe.
Probes take PROBE_SHARE of the time, because each defers the next one by its own duration.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from time import monotonic

from baton.runtime.speculation.drafter import TimedDrafter
from baton.runtime.speculation.model_drafter import LONGEST_ROW
from baton.runtime.speculation.speculator import (
    FORCED_ACCEPTANCE,
    HOPED_FOR,
    Constraints,
    FollowedSeq,
    LengthChooser,
    Speculator,
)
from baton.sched.types.draft_offer import DraftOffer
from baton.sched.types.plan import StepPlan
from baton.sched.types.sequence import Seq, is_ready_to_decode

PROBE_DRAFTS = 3
PROBE_SHARE = 0.01
"""Most of the time that goes into drafts that do not pay."""
CATCH_UP_TOKENS_PER_TOKEN = 16
"""A sequence is drafted for if the draft model is behind of it by at most so many tokens for each
that its answer may still have: a token of a prompt takes a draft model of a tenth of the size
about a 200th of a step, and drafts save some half of each step.
"""


class ModelSpeculator(Speculator):
    def __init__(
        self,
        drafter: TimedDrafter,
        most_drafts: int,
        constraints: Constraints,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        super().__init__(drafter, most_drafts, constraints)
        self._model = drafter
        self._clock = clock
        self._probe_due = 0.0
        self._probe_seconds = 0.0
        """Spent on the probe that has begun."""
        self._probed: int | None = None
        """Handle of the sequence of that probe."""

    def on_planned(self, plan: StepPlan) -> None:
        super().on_planned(plan)
        self._model.on_planned(plan)
        # The next part of a prompt follows with the next step.
        if self._model.is_catching_up:
            self._steps_to_linger = max(self._steps_to_linger, 1)

    def on_waited(self, seconds: float) -> None:
        super().on_waited(seconds - self._model.seconds)

    def would_draft(self, answering: Sequence[Seq], choose: LengthChooser) -> bool:
        self._on_look(answering)
        followed = self._follow_all(answering)
        constrained = [
            self._make_offer(each, HOPED_FOR, FORCED_ACCEPTANCE)
            for each in followed
            if each.seq.req.params.is_constrained
        ]
        expected = [self._expect(each) for each in followed if self._can_draft(each.seq)]
        if choose(expected, self._model.costs) or choose(constrained):
            return True
        return bool(expected) and self._is_probe_due

    def draft(self, answering: Sequence[Seq], choose: LengthChooser) -> float:
        wanted = {
            followed.seq.handle: followed
            for followed in self._follow_all(answering)
            if self._can_draft(followed.seq) and not self._is_forced(followed.seq)
        }
        expected = [self._expect(followed) for followed in wanted.values()]
        lengths = choose(expected, self._model.costs)
        is_probe = not lengths
        if is_probe:
            lengths = self._choose_probe(wanted)
        proposals = self._model.propose(list(lengths), list(lengths.values()))
        for handle, proposal in zip(lengths, proposals, strict=True):
            wanted[handle].proposal = proposal
        if is_probe and lengths:
            self._probe_seconds += self._model.seconds
            if not self._model.is_catching_up:
                self._end_probe()
        return self._model.seconds

    def _propose(self, answering: Sequence[Seq]) -> list[FollowedSeq]:
        """Proposals are made by `draft`."""
        return self._follow_all(answering)

    def _expect(self, followed: FollowedSeq) -> DraftOffer:
        """An offer of as many drafts as there may be, which are not known yet."""
        tokens = array("i", bytes(4 * self._limit(followed.seq)))
        return self._make_offer(followed, tokens, followed.share)

    def _can_draft(self, seq: Seq) -> bool:
        # A sequence that was sent back has no pages for its tokens yet.
        if not is_ready_to_decode(seq):
            return False
        behind = self._model.count_behind(seq)
        left = seq.max_total_tokens - len(seq.tokens)
        # The answer would be over before it has drafts, or soon after.
        if behind > LONGEST_ROW and behind > left * CATCH_UP_TOKENS_PER_TOKEN:
            return False
        return self._model.has_room(seq, self._limit(seq))

    def _is_forced(self, seq: Seq) -> bool:
        """True if a grammar says what comes next, or cannot be asked."""
        if not seq.req.params.is_constrained:
            return False
        # The slot's grammar is still that of its last owner.
        return not seq.pages_sent_to_runner or bool(self._constraints.forced_tokens(seq.slot))

    # ------------------------------------------------------------------ probes

    @property
    def _is_probe_due(self) -> bool:
        return self._clock() >= self._probe_due

    def _choose_probe(self, wanted: dict[int, FollowedSeq]) -> dict[int, int]:
        """A few drafts of one sequence, if it is time for some."""
        # Its answer has ended, or may have no drafts any more.
        if self._probed is not None and self._probed not in wanted:
            self._end_probe()
        if not wanted or not self._is_probe_due:
            return {}
        if self._probed is None:
            nearest = min(wanted.values(), key=lambda each: self._model.count_behind(each.seq))
            self._probed = nearest.seq.handle
        return {self._probed: min(PROBE_DRAFTS, self._limit(wanted[self._probed].seq))}

    def _end_probe(self) -> None:
        self._probe_due = self._clock() + self._probe_seconds / PROBE_SHARE
        self._probe_seconds = 0.0
        self._probed = None
