"""Validated request: tokens, sampling parameters, and where its KV comes from.

A request changes type as it earns trust: the wire body (server) becomes `ValidatedRequest` (here),
which the scheduler wraps in a `sched.types.sequence.Seq` with its mutable progress. No I/O.
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field

from baton.cache.int_array import IntArray
from baton.sched.types.reasoning import ReasoningGate


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen.

    Ranges are checked at the edge (server.request.validation); `top_k` 0 means no limit.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    """Always set: the client's, else drawn from the room or at random.

    Token i uses hash(seed, position i) only.
    """
    stop_token_ids: tuple[int, ...] = ()
    """The request's own stop ids *and* the model's end-of-sequence ids, unless ignore_eos."""
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_tokens: bytes = b""
    """Bit t % 8 of byte t // 8 is set where token t may be drawn; empty: every token may."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the answer may not contain; each has a token at least."""
    resumed: int = 0
    """So many last tokens of the prompt are the beginning of the answer, drawn by an engine that is
    gone.
    """
    logprobs: int = -1
    """-1: none; 0: the chosen token's logprob; k > 0: also the k most likely tokens at each
    position.
    """
    logprob_token_ids: tuple[int, ...] = ()
    """Ids whose logprobs are reported at each position that has logprobs."""
    prompt_logprobs: int = -1
    """Logprobs of the prompt's tokens: -1: none; k: each with the k most likely tokens at its
    position.
    """
    prompt_logprobs_start: int = 1
    """First position of the prompt whose logprob is computed; the first token of all has none."""
    grammar: str = ""
    """Text of the grammar that the answer follows, as llguidance reads it; "": the answer is
    free.
    """
    reasoning: ReasoningGate | None = None
    """Reasoning in front of the grammar, or with a limit; None: the grammar begins with the answer,
    and nothing is limited.
    """

    @property
    def is_constrained(self) -> bool:
        """True if the rank restricts the answer's tokens."""
        return bool(self.grammar) or self.reasoning is not None


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where P and D meet for one request: the router's bootstrap fields."""

    host: str
    port: int
    room: int
    attempt: int = 0
    prefill_dp_rank: int = 0
    """P's rank. -1 on D when the router did not name it: room % the prefill node's dp_size, which
    /route reports.
    """


@dataclass(frozen=True, slots=True)
class ValidatedRequest:
    """A request the scheduler may trust: 1 ≤ len(prompt), len(prompt) + max_new_tokens ≤ context
    length.
    """

    handle: int
    """Unique in the front that sent it; rows of messages refer to it."""
    rid: str
    prompt: IntArray
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int | None = None
    """The client's; None counts as lowest when priority scheduling is on
    (sched.types.priority.PriorityRule).
    """
    namespace: bytes = b""
    """Radix cache namespace (extra_key / cache_salt): equal prompts of different namespaces share
    nothing.
    """
    arrival: float = 0.0
    """Scheduler-monotonic seconds; never reset."""
    rendezvous: Rendezvous | None = None
    """Set on P and D nodes for a disaggregated request; None: this node does both phases."""
    deadline: float | None = None
    """Absolute, same clock as arrival: after it the request ends with `timeout`."""
    ttft_deadline: float | None = None
    """Absolute: when the client wants the first token (policy edf, metric deadline_missed)."""
    priority_class: str = ""
    """Name from --priority-classes; "" counts as the middle one."""
    trace: bytes = b""
    """Not empty: a timeline (sched.types.request_timeline) is recorded, and handed back with
    this.
    """
    tenant: str = ""
    """For whom this is computed (sched.fairness.tenants); "": no tenant, and without a tenant's
    limits.
    """
    prediction: IntArray = field(default_factory=lambda: array("i"))
    """Tokens that the client expects in the answer: drafts may come from them."""
    draft_limit: int | None = None
    """Most drafted tokens of a step; None: as many as the engine's flags allow."""


class FinishReason(enum.IntEnum):
    """Why a request ended; the value travels in EmittedTokens.finish."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
