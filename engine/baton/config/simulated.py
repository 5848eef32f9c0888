"""--simulate: an engine whose device is a step-time model, a roofline with five numbers, and two
for copies of KV.

    step = fixed + max(weights, per-token * tokens) + attention * sum(new * context)
         + KV reading * sum(decode contexts)

The linear layers either wait for their weights (small steps, decode) or compute (prompts);
attention comes on top. This is the usual roofline of a decoder; it knows no kernels, no clocks of a
real card and no host time (overlap hides it).

`reference` is a device of round numbers: 10 000 prompt tokens/s, a prompt of 100 000 tokens takes
25 s. Ratios between policies are what it is good for. `h200-8b` is derived: 8e9 parameters in bf16,
32 layers, 32 query and 8 KV heads of 128, on 4.8 TB/s and 990 Tflop/s, of which 80 % (memory), 60 %
(linear layers) and 40 % (attention) are reached:

    weights     16e9 B / 3.84e12 B/s = 4.2 ms
    KV          2*32*8*128*2 B = 131 kB / 3.84e12 B/s = 34 ns
    per token   16e9 flop / 594e12 = 27 us
    attention   4*32*32*128 flop / 396e12 = 1.3 ns
    transfer    131 kB / 20e9 B/s = 6.6 us
    host copy   131 kB / 10e9 B/s = 13 us
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from baton.config.flags import opt
from baton.errors import ConfigError

BLOCK_TOKENS = 512
"""Prompt tokens per hash id of a trace, which length_scale has to divide."""
PAGE_BYTES = 64
"""The least the transfer runtime moves: a simulated page is never read, and its journey is modeled
(runtime.simulated.engine)."""
NODE = {"max_total_tokens": 1_000_000, "chunked_prefill_size": 8192, "max_running_requests": 256}
"""A node of the size that the step-time models speak of; the engine's own defaults are for a
laptop.
"""
TOKEN_BYTES = 4
"""Bytes of text per token, where a simulated engine has no tokenizer."""
CONTEXT_LENGTH = 1 << 24
"""No model limits it; the pool does."""
VOCAB_SIZE = 1 << 31
"""Simulated tokens are four bytes of text without the top bit; ids of a tokenizer are below it,
too.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Defaults: `reference`."""

    step_ms: float = opt(0.5, "fixed time of a step [ms]")
    token_us: float = opt(100.0, "linear layers, computing: per token of the step [us]")
    weights_ms: float = opt(
        4.7, "linear layers, reading weights: per step, the larger of the two counts [ms]"
    )
    attention_ns: float = opt(3.0, "prompt attention: per new token and token of its context [ns]")
    kv_read_ns: float = opt(
        34.0, "decode attention: per token of a decoding request's context [ns]"
    )
    copy_us: float = opt(13.0, "between device and host: per token whose KV is copied [us]")
    transfer_ms: float = opt(2.0, "P: fixed time until D has taken a finished prompt's pages [ms]")
    transfer_us: float = opt(6.6, "P: that time per prompt token [us]")

    def prefill_seconds(self, new: int, cached: int) -> float:
        """A prompt's own share of the steps that compute `new` tokens behind `cached` ones, without
        fixed times.
        """
        return (
            new * self.token_us * 1e-6 + new * (cached + (new + 1) / 2) * self.attention_ns * 1e-9
        )

    def copy_seconds(self, tokens: int) -> float:
        return tokens * self.copy_us * 1e-6

    def transfer_seconds(self, tokens: int) -> float:
        return self.transfer_ms * 1e-3 + tokens * self.transfer_us * 1e-6


PRESETS: dict[str, StepModel] = {
    "reference": StepModel(),
    "h200-8b": StepModel(
        step_ms=0.5,
        token_us=27.0,
        weights_ms=4.2,
        attention_ns=1.3,
        kv_read_ns=34.0,
        transfer_ms=2.0,
        transfer_us=6.6,
    ),
}


@dataclass(frozen=True, slots=True)
class Simulated:
    """--simulate, read."""

    model: StepModel
    speed: float = 1.0
    """Simulated seconds per second."""
    length_scale: int = 1
    """Real tokens that one token stands for."""


def parse_device(text: str) -> Simulated:
    """`reference` or `h200-8b,speed=8,length_scale=8,token_us=50`.

    Raises ConfigError with every mistake.
    """
    preset, *changes = text.split(",")
    bad: list[str] = []
    if preset not in PRESETS:
        bad.append(f"there is no device {preset!r}; there are {', '.join(PRESETS)}")
    known_names = ("speed", "length_scale", *(f.name for f in dataclasses.fields(StepModel)))
    values: dict[str, float] = {}
    for change in changes:
        name, _, number = change.partition("=")
        try:
            values[name] = float(number)
        except ValueError:
            bad.append(f"{change!r}: give name=number")
            continue
        if name not in known_names:
            bad.append(f"there is no number {name!r}; there are {', '.join(known_names)}")
        elif not 0 <= values[name] < math.inf:
            bad.append(f"{change}: must not be negative")
    speed = values.pop("speed", 1.0)
    scale = values.pop("length_scale", 1.0)
    if speed <= 0:
        bad.append(f"speed={speed:g}: must be above 0")
    if scale < 1 or scale != int(scale) or BLOCK_TOKENS % int(scale):
        bad.append(f"length_scale={scale:g}: use a divisor of {BLOCK_TOKENS}")
    if bad:
        raise ConfigError("\n".join(f"--simulate {text}: {line}" for line in bad))
    return Simulated(dataclasses.replace(PRESETS[preset], **values), speed, int(scale))


def flag_defaults(text: str) -> dict[str, Any]:
    """Engine flags whose default differs with --simulate, in simulated tokens.

    Raises ConfigError.
    """
    scale = parse_device(text).length_scale
    return {
        name: value if name == "max_running_requests" else scale_tokens(value, scale)
        for name, value in NODE.items()
    }


def scale_tokens(tokens: int, scale: int) -> int:
    """Simulated tokens that stand for `tokens` real ones, at least one."""
    return max(-(-tokens // scale), 1)
