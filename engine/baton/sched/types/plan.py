"""Plan and result of a forward pass: integers only, so that a plan can be logged, sent and
replayed.
"""

from __future__ import annotations

import enum
import functools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from baton.cache.host import CopyRun
from baton.cache.int_array import IntArray
from baton.sched.types.request import SamplingParams

UNKNOWN_TOKEN = -1
"""In Row.tokens: the token sampled by the step before, which the runner reads from its token table.
"""

INVALID_TOKEN = -2
"""In StepResult.tokens: the row's logits hold NaN or infinity, so no token was chosen.

No input to a later step.
"""

GRAMMAR_FAILED_TOKEN = -3
"""In StepResult.tokens: the row's mask allows no token, or the matcher of its grammar has failed.

No input to a later step.
"""


class ForwardMode(enum.Enum):
    """Which phases a step holds; an IDLE step has no rows and is executed for its copies of pages
    and states."""

    IDLE = "idle"
    EXTEND = "extend"
    DECODE = "decode"
    MIXED = "mixed"


class StopReason(enum.Enum):
    """Why planning took no further prompt tokens: a label of metrics, logs and tests."""

    QUEUE_EMPTY = "queue_empty"
    TOKEN_BUDGET = "token_budget"
    NO_PAGES = "no_pages"
    NO_SLOT = "no_slot"
    MAX_REQUESTS = "max_requests"
    PREEMPTED = "preempted"
    DECODE_ONLY = "decode_only"


class Row(NamedTuple):
    """Tokens [start, start + n) of one sequence.

    `tokens` holds the n input ids (UNKNOWN_TOKEN for the one still being sampled). `pages` continue
    the slot's page table at index `page_base`: only what the runner does not know yet. `sample`:
    draw the next token after it. A tuple: a step makes hundreds, and frozen dataclasses take three
    times as long to make. `new_row` halves it again.
    """

    handle: int
    slot: int
    start: int
    n: int
    sample: bool
    tokens: array[int]
    page_base: int
    pages: array[int]


new_row: Callable[[tuple[int, int, int, int, bool, array[int], int, array[int]]], Row] = (
    functools.partial(tuple.__new__, Row)
)
"""A Row of its fields in order, without the Python call of the generated `__new__`: for the loop
over decode rows.
"""


@dataclass(frozen=True, slots=True)
class AdmittedSeq:
    """A sequence took `slot`: what sampling needs to know about it.

    `history` = all tokens known so far.
    """

    handle: int
    slot: int
    params: SamplingParams
    prompt_tokens: int
    history: array[int]
    logprob_position: int | None = None
    """First position of the prompt whose logprob is missing; None: no prompt logprobs are
    missing.
    """


class FurtherGrowth(NamedTuple):
    """Pages that continue a slot's page table of a further page group at index `base`."""

    slot: int
    group: int
    """0 is the first one after group 0."""
    base: int
    pages: IntArray


class StateCopy(NamedTuple):
    """A copy between a slot's running state and pages that are the sequence's own."""

    kind: Literal["park", "load", "save"]
    """`park`: to the pages, before all rows: the slot gets another owner. `load`: from the pages,
    before the slot's row. `save`: to the pages, behind it."""
    slot: int
    tokens: int
    """How many tokens the state has seen: a row begins or ends there."""
    pages: IntArray


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: int
    rows: tuple[Row, ...]
    """Decode rows first, by priority and arrival; then those with drafts, likewise; then prompt
    chunks, by priority and in policy order.
    """
    num_decode: int
    """Decode rows of one token."""
    admitted: tuple[AdmittedSeq, ...]
    new_pages: array[int]
    """Pages that got a new owner in this plan: their old content is void from now on."""
    stopped_by: StopReason
    retracted: int = 0
    copies: tuple[CopyRun, ...] = ()
    """Pages to move between device and host before the rows run, in this order."""
    further: tuple[FurtherGrowth, ...] = ()
    """Growth of the rows' page tables in further page groups."""
    drafted: tuple[int, ...] = ()
    """Rows behind the decode rows: how many drafted tokens follow the known one in each. Such a row
    draws a token behind each of its tokens.
    """
    states: tuple[StateCopy, ...] = ()
    """Those that park a state come first."""

    @property
    def num_answering(self) -> int:
        """Rows that extend an answer, with drafts or without: those in front of the prompts."""
        return self.num_decode + len(self.drafted)

    @property
    def prompt_rows(self) -> tuple[Row, ...]:
        return self.rows[self.num_answering :]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(row.n for row in self.prompt_rows)

    @property
    def mode(self) -> ForwardMode:
        if not self.rows:
            return ForwardMode.IDLE
        if self.num_answering == len(self.rows):
            return ForwardMode.DECODE
        return ForwardMode.MIXED if self.num_answering else ForwardMode.EXTEND

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes, drafted ones included."""
        return self.num_decode + sum(row.n for row in self.rows[self.num_decode :])


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprob of one sampled token and the k most likely alternatives at its position."""

    chosen: float
    top_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()
    id_logprobs: Sequence[float] = ()
    """Logprobs of SamplingParams.logprob_token_ids, in their order."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of consecutive prompt tokens, one record each.

        | logprob | rank | k ids, most likely first | their k logprobs | logprobs of ids asked for |

    Numbers of 4 bytes, little-endian: ids and ranks are int32, logprobs float32.
    """

    position: int
    """Position of the first token."""
    count: int
    """Tokens described."""
    top: int
    """k; at most the vocabulary."""
    records: bytes

    def from_position(self, position: int) -> PromptLogprobs | None:
        """Without the tokens in front of `position`; None: that is all of them."""
        skipped = position - self.position
        if skipped <= 0:
            return self
        if skipped >= self.count:
            return None
        width = len(self.records) // self.count
        return PromptLogprobs(
            position, self.count - skipped, self.top, self.records[skipped * width :]
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens of a step, one per row with `sample` or a run of them (`runs`), in row order; logprobs
    by index into `tokens` where asked for.
    """

    tokens: Sequence[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    completed: frozenset[int] = frozenset()
    """Indices into `tokens` of those that complete the grammar of their answer."""
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    """By handle, of the prompt tokens that the step's rows predict."""
    copy_seconds: float = 0.0
    """How long the plan's copies took; 0 when it is not known."""
    runs: tuple[int, ...] = ()
    """How many of `tokens` each row with `sample` has; empty: one each.

    A run is what the row's sequence would have drawn step by step: drafted tokens as far as they
    are those, then one more.
    """
    damaged_pages: tuple[int, ...] = ()
    """Pages whose checksum is not what it was when they left for the host: their places among all
    pages that the plan's copies bring back, in order. No token computed from them is right.
    """
