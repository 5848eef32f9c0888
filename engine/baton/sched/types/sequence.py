"""Sequence: a request inside the scheduler: its tokens, its pages and where it stands.

Life of a sequence, by node role (in brackets: the pages that it holds):

    null     WAITING ─▶ RUNNING [tree lock + private] ─▶ FINISHED
    prefill  WAITING ─▶ RUNNING ─▶ LEASED [same pages, for D to pull] ─▶ FINISHED
    decode   OPENING ─▶ TRANSFER [tree lock + private pages being filled] ─▶ RUNNING ─▶ FINISHED
    revoke   TRANSFER ─▶ OPENING (D: nothing had come; pages that P holds already go first)
    retract  RUNNING ─▶ WAITING (pages published to the tree, nothing held)
    suspend  WAITING | RUNNING ─▶ SUSPENDED ─▶ WAITING (by an operator; a prompt already announced
             to D keeps its pages)
    abort    OPENING | TRANSFER ─▶ ABORTING (until the transfer runtime has released the pages)
             ─▶ FINISHED

Invariants: `pages` only grows while RUNNING; `private` ⊆ pages; pages not in `private` belong to
the radix tree and are locked through `node`; computed ≤ len(tokens) + inflight.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.sched.types.request import FinishReason, ValidatedRequest

if TYPE_CHECKING:
    from baton.cache.host import HostPage
    from baton.cache.radix import PrefixProbe, RadixNode


SortKey = tuple[float, float, int]
"""Place in the order of importance: (priority, arrival, handle)."""


class SeqState(enum.Enum):
    WAITING = "waiting"
    OPENING = "opening"
    TRANSFER = "transfer"
    RUNNING = "running"
    SUSPENDED = "suspended"
    LEASED = "leased"
    ABORTING = "aborting"
    FINISHED = "finished"


TAKES_TOKENS = (SeqState.RUNNING, SeqState.WAITING, SeqState.SUSPENDED)
"""States in which a step in flight may still give a sequence tokens or logprobs."""

LEGAL: dict[SeqState, frozenset[SeqState]] = {
    SeqState.WAITING: frozenset(
        {SeqState.RUNNING, SeqState.SUSPENDED, SeqState.LEASED, SeqState.FINISHED}
    ),
    SeqState.OPENING: frozenset({SeqState.TRANSFER, SeqState.ABORTING, SeqState.FINISHED}),
    SeqState.TRANSFER: frozenset(
        {SeqState.RUNNING, SeqState.OPENING, SeqState.ABORTING, SeqState.FINISHED}
    ),
    SeqState.RUNNING: frozenset(
        {SeqState.WAITING, SeqState.SUSPENDED, SeqState.LEASED, SeqState.FINISHED}
    ),
    SeqState.SUSPENDED: frozenset({SeqState.WAITING, SeqState.LEASED, SeqState.FINISHED}),
    SeqState.LEASED: frozenset({SeqState.FINISHED}),
    SeqState.ABORTING: frozenset({SeqState.FINISHED}),
    SeqState.FINISHED: frozenset(),
}


class IllegalTransition(RuntimeError):
    """A programmer error: the scheduler tried to move a sequence along an edge that does not
    exist.
    """


@dataclass(slots=True)
class FurtherPages:
    """A sequence's pages of a further page group (cache.group_pages)."""

    width: int
    """Pages of the pool that one page of tokens takes."""
    pages: array[int] = field(default_factory=lambda: array("i"))
    """By position, `width` per page of tokens; NO_PAGE in front of `first`."""
    private: set[int] = field(default_factory=set)
    first: int = 0
    """First block that is held: all that follow are."""
    rolling: array[int] = field(default_factory=lambda: array("i"))
    """Private pages outside the table, of the newest snapshot that the tree gets at the sequence's
    end. Empty: there is none."""
    rolling_place: int = -1
    """The page of tokens that the rolling snapshot stands at the end of."""


@dataclass(slots=True, eq=False)
class Seq:
    req: ValidatedRequest
    tokens: array[int]
    """Prompt and every generated token that is known."""
    max_new_tokens: int
    """The request's limit, cut so that prompt + answer fit the KV pool."""
    handle: int = field(init=False)
    prompt_len: int = field(init=False)
    max_total_tokens: int = field(init=False)
    """Prompt and the longest allowed answer."""
    logprob_position: int = field(init=False)
    """First position of the prompt whose logprob is missing; `prompt_len`: none is."""
    has_fixed_length: bool = field(init=False)
    """The answer has exactly as many tokens as it may (ignore_eos, no grammar), and is generated
    here.
    """
    is_lease: bool = False
    """The request ends here with a lease on its pages: a prompt prefilled for a D node."""
    state: SeqState = SeqState.WAITING
    slot: int = -1
    pages: array[int] = field(default_factory=lambda: array("i"))
    private: set[int] = field(default_factory=set)
    further: list[FurtherPages] = field(default_factory=list)
    """By further page group, while it holds pages; `pages` and `private` are those of group 0."""
    state_pages: array[int] = field(default_factory=lambda: array("i"))
    """Pages outside the tree for a state that travels with the prompt: on P the one that D gets, on
    D the one that came. Empty: it needs none, or has none yet."""
    state_tokens: int = -1
    """How many tokens the state in `state_pages` has seen when the planned steps are done; -1: no
    state is in them."""
    node: RadixNode | None = None
    computed: int = 0
    """Tokens whose KV exists or is being computed by a step in flight: with drafts the token that
    is drawn next is one of them, whatever it will be.
    """
    committed: int = 0
    """Tokens whose KV was computed by a committed step."""
    inflight: int = 0
    """1 while a step in flight samples this sequence's next token."""
    drafts_in_flight: int = 0
    """Drafted tokens behind the known one in the row that a step in flight has of it."""
    draft_counts: tuple[int, int] = (0, 0)
    """Drafted tokens that committed steps had of it: accepted, rejected."""
    inflight_steps: int = 0
    """Steps in flight that hold a row of this sequence."""
    distrusted_step: int = 0
    """Rows of steps up to this one may have read a damaged page: nothing of them counts."""
    published: int = 0
    """Pages of this sequence's prefix that the tree holds and `node` locks."""
    pages_sent_to_runner: int = 0
    """How much of `pages` the runner knows."""
    is_released: bool = False
    """P: its room ended before the prompt was computed; no lease follows."""
    announced_pages: int = 0
    """P: prompt pages already offered to D."""
    is_announced: bool = False
    """D: P holds pages of it, and will finish it whatever happens here."""
    is_revoking: bool = False
    """D: it was asked to give its pages back."""
    cached_tokens: int = -1
    """Prompt tokens that this request got from the cache instead of computing them; -1: has not
    run.
    """
    pages_were_released: bool = False
    """Set once it had pages and gave them up: what it finds in the cache now may be its own work.
    """
    admitted_step: int = -1
    """Steps that had been planned when it was last admitted."""
    tokens_computed_at_arrival: int = 0
    """Prompt tokens the engine had computed when this request arrived."""
    has_started: bool = False
    """A step has computed some of it, its KV has arrived, or an operator suspended it: it is never
    turned away.
    """
    pinned: list[HostPage] = field(default_factory=list)
    """While preempted: pages of it that the host tier must not drop."""
    retractions: int = 0
    preemptions: int = 0
    finish: FinishReason | None = None
    sort_key: SortKey = (0.0, 0.0, 0)
    """While it runs: its place among the running (PriorityRule.sort_key), kept because each plan
    compares them all.
    """
    adjusted_priority: float | None = None
    """Replaces the priority in the queue order, larger is better (--priority-adjustment-function).
    """
    start_priority: float | None = None
    """Replaces the base priority in the queue order of a request that states none, where requests
    age.
    """
    probe: PrefixProbe | None = None
    """Cached prefix of this sequence when an order last asked."""
    _key: bytes = b""

    def __post_init__(self) -> None:
        self.handle = self.req.handle
        self.prompt_len = len(self.req.prompt)
        self.max_total_tokens = self.prompt_len + self.max_new_tokens
        params = self.req.params
        self.logprob_position = self.prompt_len
        if params.prompt_logprobs >= 0:
            self.logprob_position = min(params.prompt_logprobs_start, self.prompt_len)
        self.has_fixed_length = params.ignore_eos and not params.grammar and not self.is_lease

    @property
    def key(self) -> bytes:
        """`tokens` as the radix tree spells them (little-endian int32); made once per length."""
        if len(self._key) != len(self.tokens) * self.tokens.itemsize:
            self._key = self.tokens.tobytes()
        return self._key

    @property
    def reusable_tokens(self) -> int:
        """Most tokens whose KV may come from a cache: at least the last one is computed, and every
        row that predicts a prompt token whose logprob is missing.
        """
        if self.logprob_position < self.prompt_len:
            return self.logprob_position - 1
        return len(self.tokens) - 1

    @property
    def generated(self) -> int:
        """Tokens generated so far, the one in flight included."""
        return len(self.tokens) - self.prompt_len + self.inflight

    @property
    def total_len(self) -> int:
        """Known tokens plus the one in flight."""
        return len(self.tokens) + self.inflight

    @property
    def extend_tokens(self) -> int:
        """Tokens to compute before the next sample; 1 for a decoding sequence."""
        return len(self.tokens) + self.inflight - self.computed

    @property
    def is_decoding(self) -> bool:
        total = len(self.tokens) + self.inflight
        return total - self.computed == 1 and total > self.prompt_len

    @property
    def has_announced_pages(self) -> bool:
        """P: D may be reading some of its pages, so they stay where they are."""
        return self.is_lease and self.announced_pages > 0

    def move_to(self, state: SeqState) -> None:
        if state not in LEGAL[self.state]:
            raise IllegalTransition(f"request {self.req.rid}: {self.state.value} -> {state.value}")
        self.state = state


def wants_row(seq: Seq) -> bool:
    """True if tokens are left to compute. A sequence with its last token in flight waits for it."""
    return seq.extend_tokens > 0 and seq.generated < seq.max_new_tokens


def is_ready_to_decode(seq: Seq) -> bool:
    """True if a step may compute the next token of the answer: one token is left to compute, the
    answer is unfinished.
    """
    return seq.extend_tokens == 1 and seq.prompt_len < seq.total_len < seq.max_total_tokens


def is_partial(seq: Seq) -> bool:
    """True if a later step has to compute a part of the prompt."""
    return not seq.is_decoding and wants_row(seq)


def partial_of(seqs: Iterable[Seq]) -> list[Seq]:
    """Select the partial ones. Most sequences decode: they are distinguished without a call."""
    return [
        seq
        for seq in seqs
        if (seq.computed < seq.prompt_len or len(seq.tokens) + seq.inflight - seq.computed > 1)
        and is_partial(seq)
    ]
