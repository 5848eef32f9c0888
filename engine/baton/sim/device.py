"""A device that is not there, in real time: `baton engine --simulate` runs the scheduler's plans on it (sim.live).

A step lasts as long as the step-time model says, divided by `speed`; an answer is a fixed text, as long as was asked
for. Steps that follow each other begin where the one before ended, however late this process was woken, so that a
busy machine delays single answers and does not slow the modelled device down.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from baton.config import EngineConfig
from baton.errors import ConfigError
from baton.sched.plan import StepPlan, StepResult, TokenLogprobs
from baton.sim.model import PRESETS, StepModel
from baton.sim.trace import BLOCK_TOKENS, scaled

PAGE_BYTES = 64
"""The least the transfer runtime moves: nobody reads a simulated page, and its journey is modelled (sim.live)."""
NODE = {"max_total_tokens": 1_000_000, "chunked_prefill_size": 8192, "max_running_requests": 256}
"""A node of the size that the step-time models speak of; the engine's own defaults are for a laptop."""
CONTEXT_LENGTH = 1 << 24
"""No model limits it; the pool does."""
LATE_SECS = 0.005
"""A step that begins this soon after the last one's end was waiting for it."""
NO_MEANING = (
    "load_format", "dtype", "tp_size", "dist_timeout", "device", "attention_backend", "disable_cuda_graph",
    "cuda_graph_max_bs", "cpu_threads", "kv_pool_mib", "mem_fraction_static", "host_kv_gib",
)  # fmt: skip
"""Engine flags about a device that is there: refused, not swallowed."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """--simulate, read."""

    preset: str
    model: StepModel
    speed: float = 1.0
    """Simulated seconds per second."""
    length_scale: int = 1
    """Real tokens that one token stands for."""


def read(text: str) -> Simulated:
    """`reference` or `h200-8b,speed=8,length_scale=8,token_us=50`. Raises ConfigError with every mistake."""
    preset, *changes = text.split(",")
    bad: list[str] = []
    if preset not in PRESETS:
        bad.append(f"there is no device {preset!r}; there are {', '.join(PRESETS)}")
    known = ("speed", "length_scale", *(f.name for f in dataclasses.fields(StepModel)))
    values: dict[str, float] = {}
    for change in changes:
        name, _, number = change.partition("=")
        try:
            values[name] = float(number)
        except ValueError:
            bad.append(f"{change!r}: give name=number")
            continue
        if name not in known:
            bad.append(f"there is no number {name!r}; there are {', '.join(known)}")
        elif not 0 <= values[name] < math.inf:
            bad.append(f"{change}: must not be negative")
    speed, scale = values.pop("speed", 1.0), values.pop("length_scale", 1.0)
    if speed <= 0:
        bad.append(f"speed={speed:g}: must be above 0")
    if scale < 1 or scale != int(scale) or BLOCK_TOKENS % int(scale):
        bad.append(f"length_scale={scale:g}: use a divisor of {BLOCK_TOKENS}")
    if bad:
        raise ConfigError("\n".join(f"--simulate {text}: {line}" for line in bad))
    return Simulated(preset, dataclasses.replace(PRESETS[preset], **values), speed, int(scale))


def defaults(text: str) -> dict[str, Any]:
    """Engine flags whose default differs with --simulate, in simulated tokens. Raises ConfigError."""
    scale = read(text).length_scale
    return {name: value if name == "max_running_requests" else scaled(value, scale) for name, value in NODE.items()}


def answer_tokens(config: EngineConfig) -> Sequence[int]:
    """What answers consist of, over and over: words of the four-byte tokenizer, or ids that every tokenizer has."""
    if uses_four_bytes(config):
        from baton.sim.tokens import WORDS, word_id

        return [word_id(word) for word in WORDS]
    return range(3, 1000)


def uses_four_bytes(config: EngineConfig) -> bool:
    """Without a tokenizer of one's own, a token is four bytes of text."""
    return config.simulate is not None and config.tokenizer_path is None and config.model_path == "demo"


class SimRunner:
    """runtime.loop.Device. `pool`: the native pool, told which pages get new content as on a P node."""

    page_bytes = PAGE_BYTES

    def __init__(
        self,
        simulated: Simulated,
        answer: Sequence[int],
        pool: Any = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._simulated = simulated
        self._answer = answer
        self._pool = pool
        self._clock = clock
        self._sleep = sleep
        self._ended = -math.inf
        self._logprobs: dict[int, int] = {}
        """Slot → what its request asked for."""

    def execute(self, plan: StepPlan) -> StepResult:
        if self._pool is not None and plan.new_pages:
            self._pool.begin_write(plan.new_pages.tobytes())
        for admitted in plan.admitted:
            self._logprobs[admitted.slot] = admitted.params.logprobs
        now = self._clock()
        began = self._ended if now - self._ended < LATE_SECS else now
        seconds = self._simulated.model.step_seconds(plan, self._simulated.length_scale) / self._simulated.speed
        self._ended = began + seconds
        self._sleep(max(self._ended - now, 0.0))
        sampling = [row for row in plan.rows if row.sample]
        tokens = [self._answer[(row.start + row.n) % len(self._answer)] for row in sampling]
        asked = ((i, self._logprobs[row.slot]) for i, row in enumerate(sampling))
        return StepResult(tokens, {i: _certain(tokens[i], k) for i, k in asked if k >= 0})


def _certain(token: int, k: int) -> TokenLogprobs:
    return TokenLogprobs(0.0, (token,), (0.0,)) if k else TokenLogprobs(0.0)
