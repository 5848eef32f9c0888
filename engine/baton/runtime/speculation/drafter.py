"""What a drafter does for the sequences of one rank."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from baton.sched.planner.draft_lengths import DraftingCosts
from baton.sched.types.plan import StepPlan
from baton.sched.types.sequence import Seq


class Drafter(Protocol):
    """Proposes tokens that may follow those of a sequence. Knows sequences by handle."""

    def start(self, seq: Seq) -> None:
        """Follow a sequence from its tokens so far."""

    def append(self, handle: int, tokens: array[int]) -> None:
        """The sequence has these tokens, too."""

    def propose(self, handles: Sequence[int], most: Sequence[int]) -> list[array[int]]:
        """At most so many tokens for each sequence; none where nothing is known."""

    def finish(self, handle: int) -> None:
        """The sequence has ended, with all the tokens that were appended."""


class TimedDrafter(Drafter, Protocol):
    """A drafter whose proposals take time on the device."""

    @property
    def costs(self) -> DraftingCosts: ...
    @property
    def seconds(self) -> float:
        """Time that the last call of `propose` took on the device."""

    @property
    def is_catching_up(self) -> bool:
        """The last call of `propose` left sequences behind."""

    def count_behind(self, seq: Seq) -> int:
        """Tokens of the sequence that are computed before it gets drafts."""

    def has_room(self, seq: Seq, drafts: int) -> bool:
        """True if the sequence may have so many."""

    def on_planned(self, plan: StepPlan) -> None:
        """The model will compute this step next."""


def cut_failed(drafts: array[int]) -> array[int]:
    """The drafts in front of the first negative one, which stands for logits that are no numbers:
    nothing follows from it."""
    failed = next((place for place, token in enumerate(drafts) if token < 0), len(drafts))
    return drafts[:failed]
