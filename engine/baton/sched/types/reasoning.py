"""Reasoning in front of an answer, as the rank has to know it: its beginning, end and limit."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ReasoningPhase(enum.Enum):
    """Place of an answer's end so far.

    The values are names of the text layer (`ReasoningStart`).
    """

    UNDECIDED = "undecided"
    """The answer's first text decides: a begin marker begins the reasoning."""
    INSIDE = "inside"
    """Within the reasoning."""
    BEHIND = "behind"
    """Behind the reasoning, of which only newlines follow."""
    CONTENT = "content"


@dataclass(frozen=True, slots=True)
class ReasoningMarker:
    """A text that begins or ends the reasoning."""

    ids: tuple[int, ...]
    """Tokens of the marker, as the tokenizer writes it."""
    text: str = ""
    """Not empty: it is recognized by its characters, whatever their tokens are."""


@dataclass(frozen=True, slots=True)
class ReasoningMessage:
    """Tokens between which the text of a message of reasoning stands, for models that write
    messages.
    """

    header: tuple[int, ...]
    ends: tuple[tuple[int, ...], ...]
    starts_inside: bool = False
    """The answer begins within the text of such a message."""


@dataclass(frozen=True, slots=True)
class ReasoningGate:
    """The reasoning of an answer that follows a grammar behind it, or whose reasoning is
    limited.
    """

    start: ReasoningPhase
    """Phase in which the answer begins."""
    has_text: bool = False
    """The reasoning in which the answer begins has text in the prompt."""
    begins: tuple[ReasoningMarker, ...] = ()
    ends: tuple[ReasoningMarker, ...] = ()
    call_ids: tuple[int, ...] = ()
    """Tokens that begin a call."""
    is_ended_by_calls: bool = False
    """A call ends the reasoning: its end marker was forgotten."""
    lead_newlines: int | None = 0
    """Newlines behind the reasoning that belong neither to it nor to the answer, at most. None: all
    of them, where no grammar counts the answer.
    """
    budget: int | None = None
    """Most tokens of the reasoning, its markers not counted; None: no limit."""
    message: ReasoningMessage | None = None
    """Not None: only text of these messages counts and is ended at the limit."""
    forced_end: tuple[int, ...] = ()
    """Tokens that end a reasoning which has reached its limit."""
