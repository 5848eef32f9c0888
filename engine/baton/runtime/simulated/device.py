"""A device that is not there, in real time: `baton engine --simulate` runs the scheduler's plans on
it (runtime.simulated.engine).

A step lasts as long as the step-time model says, divided by `speed`; an answer is a fixed text, as
long as was asked for. Steps that follow each other begin where the one before ended, however late
this process was woken, so that a busy machine delays single answers and does not slow the modeled
device down.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.config import EngineConfig, uses_four_bytes
from baton.config.simulated import TOKEN_BYTES, Simulated, StepModel
from baton.sched.types.plan import StepPlan, StepResult, TokenLogprobs

LATE_SECS = 0.005
"""A step that begins this soon after the last one's end was waiting for it."""
WORDS = (
    "no",
    "one",
    "is",
    "in",
    "but",
    "the",
    "run",
    "has",
    "its",
    "own",
    "end",
    "and",
    "so",
    "on",
    ";",
)
"""Words of simulated answers, each behind a space."""


def answer_tokens(config: EngineConfig) -> Sequence[int]:
    """Tokens that answers repeat: words of the four-byte tokenizer, or ids that every tokenizer
    has.
    """
    if uses_four_bytes(config):
        return [int.from_bytes(word.rjust(TOKEN_BYTES).encode(), sys.byteorder) for word in WORDS]
    return range(3, 1000)


def step_seconds(model: StepModel, plan: StepPlan, scale: int) -> float:
    """Seconds of this step, in which every token stands for `scale` real ones.

    A step with decode rows then stands for `scale` real steps, over which its prompt chunks are
    spread.
    """
    new = attended = decode_context = 0
    for i, row in enumerate(plan.rows):
        new += row.n
        # The context is read once for all tokens of a row that verifies drafts.
        if i < plan.num_answering:
            decode_context += row.start + row.n
        else:
            attended += row.n * row.start + row.n * (row.n + 1) // 2
    real_steps = scale if plan.num_decode else 1
    linear = max(model.weights_ms * 1e-3 * real_steps, model.token_us * 1e-6 * new * scale)
    attention = model.attention_ns * attended + model.kv_read_ns * decode_context
    return model.step_ms * 1e-3 * real_steps + linear + attention * 1e-9 * scale * scale


@dataclass(eq=False, slots=True)
class SimRunner:
    """Device of the engine loop whose steps only take time."""

    simulated: Simulated
    answer: Sequence[int]
    pool: Any = None
    """The native pool, notified which pages get new content as on a P node."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _ended: float = field(default=-math.inf, init=False)
    _logprobs: dict[int, int] = field(default_factory=dict, init=False)
    """Slot → what its request asked for."""

    def execute(self, plan: StepPlan) -> StepResult:
        if self.pool is not None and plan.new_pages:
            self.pool.begin_write(plan.new_pages.tobytes())
        for admitted in plan.admitted:
            self._logprobs[admitted.slot] = admitted.params.logprobs
        now = self.clock()
        began = self._ended if now - self._ended < LATE_SECS else now
        seconds = (
            step_seconds(self.simulated.model, plan, self.simulated.length_scale)
            / self.simulated.speed
        )
        self._ended = began + seconds
        self.sleep(max(self._ended - now, 0.0))
        sampling = [row for row in plan.rows if row.sample]
        tokens = [self.answer[(row.start + row.n) % len(self.answer)] for row in sampling]
        requested = ((i, self._logprobs[row.slot]) for i, row in enumerate(sampling))
        return StepResult(
            tokens, {i: _certain_logprobs(tokens[i], k) for i, k in requested if k >= 0}
        )


def _certain_logprobs(token: int, k: int) -> TokenLogprobs:
    return TokenLogprobs(0.0, (token,), (0.0,)) if k else TokenLogprobs(0.0)
