"""Drafted tokens that a drafter offers for the next step."""

from __future__ import annotations

from array import array
from typing import NamedTuple


class DraftOffer(NamedTuple):
    """Tokens that may follow the known ones of one sequence.

    The planner decides how many of them a row gets (sched.planner.draft_lengths).
    """

    handle: int
    known: int
    """Tokens of the sequence when the offer was made: an offer for another length is stale."""
    tokens: array[int]
    acceptance: float
    """Share of drafted tokens that are drawn where those in front of them were, 0 to 1."""
