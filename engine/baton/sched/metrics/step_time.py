"""Predicted duration of a step, learned from those that ran: it sizes prompt chunks by time instead
of tokens.

Small models, each a least-squares fit with exponentially fading memory:

    decode step    seconds = base + per_row * rows
    drafts         seconds beyond that = per_draft * drafted tokens
    prompt chunks  seconds beyond both = per_token * tokens + per_pair * pairs

where pairs counts (new token, token it attends to): the part of a long prompt's cost that grows
with its context. A step teaches one model: that of the prompts where it has some, else that of the
drafts. The memory of each model fades only when a step of its own kind is seen, so that an hour of
decoding forgets nothing about prompts; that of the prompts fades by tokens, so that many short
prompts do not displace the observation of a long one. Coefficients are never negative; until
something was observed a prompt token costs 1 / INITIAL_PREFILL_RATE.

This is the engine's only estimate of prefill throughput. It may refuse a request only while
`confirms` holds: the evidence is a prompt of comparable length that was computed recently. Evidence
expires, so that a wrong estimate refuses requests for EVIDENCE_SECS at most: then the next prompt
is computed and corrects it.
"""

from __future__ import annotations

import math

from baton.sched.types.plan import StepPlan

INITIAL_PREFILL_RATE = 2000.0
"""Assumed until steps have been observed [tokens/s]."""
MEMORY = 0.98
"""Weight that an observation keeps when the next full step of its kind comes: about the last 50
count.
"""
EVIDENCE_SECS = 10.0
"""How long a computed prompt confirms the estimate for prompts up to twice as long [s]."""
INITIAL_DRAFT_SHARE = 0.1
"""Time of a drafted token, as a share of a step with one row, until one has been observed."""
TOKENS_UNIT = 1e3
PAIRS_UNIT = 1e6


class StepTimeFit:
    """y = a * u + b * v with a, b >= 0, from fading observations."""

    def __init__(self) -> None:
        self._uu = self._uv = self._vv = self._uy = self._vy = 0.0
        self.a = self.b = 0.0

    def observe(self, u: float, v: float, y: float, keep: float = MEMORY) -> None:
        """`keep`: weight that earlier observations retain."""
        self._uu = self._uu * keep + u * u
        self._uv = self._uv * keep + u * v
        self._vv = self._vv * keep + v * v
        self._uy = self._uy * keep + u * y
        self._vy = self._vy * keep + v * y
        det = self._uu * self._vv - self._uv * self._uv
        if det > 1e-9 * self._uu * self._vv:
            self.a = (self._uy * self._vv - self._vy * self._uv) / det
            self.b = (self._vy * self._uu - self._uy * self._uv) / det
            if self.a >= 0 and self.b >= 0:
                return
        # One of the two terms has no influence, or both have the same one: keep the one that fits
        # better alone.
        alone_a = self._uy / self._uu if self._uu else 0.0
        alone_b = self._vy / self._vv if self._vv else 0.0
        if alone_a * self._uy >= alone_b * self._vy:
            self.a = max(alone_a, 0.0)
            self.b = 0.0
        else:
            self.a = 0.0
            self.b = max(alone_b, 0.0)

    @property
    def ratio(self) -> float | None:
        """y per u, weighted by u; None before the first observation."""
        return self._uy / self._uu if self._uu else None


def attended_pairs(start: int, n: int) -> int:
    """(new token, token it attends to) pairs of a chunk [start, start + n)."""
    return n * start + n * (n + 1) // 2


class StepTime:
    """`step_tokens`: tokens of a full step."""

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._decode = StepTimeFit()
        self._draft = StepTimeFit()
        self._prompt = StepTimeFit()
        self._prompt.a = TOKENS_UNIT / INITIAL_PREFILL_RATE
        self._evidence = (-math.inf, 0)
        """(time, tokens) of a prompt that was computed."""

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second: the mean over recent steps, weighted by tokens."""
        seconds = self._prompt.ratio
        return TOKENS_UNIT / seconds if seconds else INITIAL_PREFILL_RATE

    def on_prompt_computed(self, tokens: int, now: float) -> None:
        """All of a prompt's `tokens` uncached tokens have been computed."""
        if tokens >= self._evidence[1] or not self.confirms(self._evidence[1], now):
            self._evidence = now, tokens

    def confirms(self, tokens: int, now: float) -> bool:
        """True if a prompt at least half as long was computed within EVIDENCE_SECS."""
        time, most_tokens = self._evidence
        return now - time <= EVIDENCE_SECS and tokens <= 2 * most_tokens

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a step that took `seconds` on the device."""
        rows = plan.num_answering
        drafts = sum(plan.drafted)
        if rows == len(plan.rows):
            if drafts:
                beyond = max(seconds - self.decode_seconds(rows), 0.0)
                self._draft.observe(drafts, 0.0, beyond)
            elif rows:
                self._decode.observe(1.0, rows, seconds)
            return
        tokens = pairs = 0
        for row in plan.prompt_rows:
            tokens += row.n
            pairs += attended_pairs(row.start, row.n)
        beyond = max(seconds - self.decode_seconds(rows) - self.draft_seconds(drafts), 0.0)
        keep = MEMORY ** min(tokens / self._step_tokens, 1.0)
        self._prompt.observe(tokens / TOKENS_UNIT, pairs / PAIRS_UNIT, beyond, keep)

    def decode_seconds(self, rows: int) -> float:
        """A step's time without prompt chunks."""
        return self._decode.a + self._decode.b * rows

    def draft_seconds(self, drafts: int) -> float:
        """Time that so many drafted tokens add to a step."""
        per_draft = self._draft.ratio
        if per_draft is None:
            per_draft = INITIAL_DRAFT_SHARE * self.decode_seconds(1)
        return per_draft * drafts

    def chunk_seconds(self, start: int, n: int) -> float:
        """Time that prompt tokens [start, start + n) add to a step."""
        return (
            self._prompt.a * n / TOKENS_UNIT
            + self._prompt.b * attended_pairs(start, n) / PAIRS_UNIT
        )

    def chunk_tokens(self, start: int, seconds: float) -> int:
        """The most prompt tokens from `start` on that add no more than `seconds` to a step."""
        if seconds <= 0:
            return 0
        # per_pair / 2 * n^2 + (per_token + per_pair * (start + 1/2)) * n = seconds
        half = self._prompt.b / PAIRS_UNIT / 2
        linear = self._prompt.a / TOKENS_UNIT + 2 * half * (start + 0.5)
        if linear <= 0 and half <= 0:
            return UNBOUNDED
        n = 2 * seconds / (linear + math.sqrt(linear * linear + 4 * half * seconds))
        return min(int(n), UNBOUNDED)


UNBOUNDED = 2**31
"""Chunk length when prompt tokens seem to cost nothing."""
