"""What a drafter does for the sequences of one rank."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

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
