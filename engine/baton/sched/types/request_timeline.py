"""Timeline of a traced request in the scheduler: times and amounts, from which the front makes
spans.

1. a request that carries a trace (`ValidatedRequest.trace`) gets a RequestTimeline when it is
   queued first;
2. the hooks of sched.metrics.collector write it, the same calls that count and time all requests
   for the metrics;
3. when the scheduler forgets the request its timeline leaves as an event, complete.

Times are seconds on the clock of ValidatedRequest.arrival. Bounded: after MAX_EVENTS further ones
are only counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_EVENTS = 64
"""A prompt of 32k tokens has as many chunks of 512."""


@dataclass(frozen=True, slots=True)
class PulledPages:
    """D: how a prompt's pages came, as the transfer runtime reports it (kv_transfer's
    PullStats).
    """

    transport: str
    """shm, tcp, or none: all of it was here."""
    pages: int
    bytes: int
    pull_seconds: float
    """From the first pull to the last page verified."""
    room_seconds: float
    """From opening the room to there."""


@dataclass(frozen=True, slots=True)
class FirstTokenStages:
    """A request's way to its first token, for the router's timeline of it."""

    queue_seconds: float
    """From arrival until slot and pages were given."""
    pulled: PulledPages | None = None
    """D: how the pages of its prompt came."""


@dataclass(slots=True)
class RequestTimeline:
    handle: int
    trace: bytes
    """Handed back as it came; only the front knows what is in it."""
    prompt_tokens: int
    admitted_at: float | None = None
    """Slot and pages were given: it begins to compute, or on D its pages may come."""
    is_transfer: bool = False
    """D: P computes the prompt."""
    announced_at: float | None = None
    """D: P said that it holds pages before room was made for them here."""
    first_token_at: float | None = None
    ended_at: float = 0.0
    cached_tokens: int = 0
    computed_tokens: int = 0
    """Prompt tokens computed here before the first token."""
    steps: int = 0
    """Forward passes which that took."""
    recomputed_tokens: int = 0
    """Computed again after the first token, because it was sent back."""
    output_tokens: int = 0
    draft_tokens: int = 0
    """Drafted for it (speculative decoding)."""
    drafts_drawn: int = 0
    """Those of them that were the tokens drawn."""
    retractions: int = 0
    preemptions: int = 0
    pulled: PulledPages | None = None
    leased_pages: int = 0
    """P: pages kept for D from the first token on."""
    finish: str = ""
    """stop, length, abort, error; of a lease why it ended: DONE or the transfer runtime's reason
    code.
    """
    error: str = ""
    """Code of the error that it ended with."""
    events: list[tuple[float, str, int]] = field(default_factory=list)
    """(when, what, tokens), in order: computed, admitted (again), retracted, preempted, suspended,
    revoked.
    """
    lost_events: int = 0

    def add_event(self, time: float, name: str, tokens: int) -> None:
        if len(self.events) < MAX_EVENTS:
            self.events.append((time, name, tokens))
        else:
            self.lost_events += 1

    def on_computed(self, time: float, tokens: int) -> None:
        """A step has computed so many of its tokens; said before the token that the step
        sampled.
        """
        if self.first_token_at is None:
            self.steps += 1
            self.computed_tokens += tokens
        else:
            self.recomputed_tokens += tokens
        self.add_event(time, "computed", tokens)
