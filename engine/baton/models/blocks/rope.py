"""Cosine and sine tables of rotary embedding, in float32 and with transformers' order of
operations.

A table row is a position, a column a frequency; dimension i of a head turns together with i + R/2,
where R is the number of dimensions that turn: all of a head, or its first ones. On the CPU tables
start short and double when a longer context appears, so that a model made for 128 Ki tokens does
not pay for them at start. Elsewhere they are whole from the beginning, and stay where they are: captured CUDA graphs
know their address.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baton.models.spec.rope import LONGROPE, RopeSpec

_FIRST_POSITIONS = 4096


def inverse_frequencies(rope: RopeSpec, rotary_dim: int) -> Tensor:
    """float32 [rotary_dim / 2]: radians per position of each pair of dimensions."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "llama3":
        return _scale_llama3(plain, rope)
    if rope.kind == LONGROPE:
        return 1.0 / (torch.tensor(rope.factors, dtype=torch.float32) * rope.theta**exponents)
    if rope.kind == "yarn":
        return _scale_yarn(exponents, rope, rotary_dim)
    return plain / rope.factor  # linear; 1 for the default kind


def _scale_llama3(plain: Tensor, rope: RopeSpec) -> Tensor:
    """Slow turns are stretched by `factor`, fast ones kept, those between blended (Llama 3.1's
    reference code)."""
    wavelength = 2 * math.pi / plain
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_stretched = rope.original_max_position / rope.low_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    unstretched = torch.where(wavelength < longest_kept, plain, blended)
    return torch.where(wavelength > shortest_stretched, plain / rope.factor, unstretched)


def _scale_yarn(exponents: Tensor, rope: RopeSpec, rotary_dim: int) -> Tensor:
    """Dimensions turning more than beta_fast times in the original context are kept, fewer than beta_slow stretched,
    with a linear ramp between (arXiv 2309.00071 §3.2)."""

    def dimension_turning(times: float) -> float:
        per_turn = rope.original_max_position / (times * 2 * math.pi)
        return rotary_dim * math.log(per_turn) / (2 * math.log(rope.theta))

    low = dimension_turning(rope.beta_fast)
    high = dimension_turning(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, rotary_dim - 1)
    width = (high - low) or 0.001
    stretched = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    period = rope.theta**exponents
    return (1.0 / (rope.factor * period)) * stretched + (1.0 / period) * (1 - stretched)


class RopeTables:
    """cos and sin, float32 [positions, R / 2], long enough for every position asked for so far.

    They are computed on the host, whose rounding the tests know, and then put on their device: there they are the two
    halves of one table [positions, R], which is what kernels want (layers.ops_cuda).
    """

    def __init__(self, rope: RopeSpec, head_dim: int, max_context: int) -> None:
        self.rotary_dim = rope.rotary_dim(head_dim)
        """Dimensions of a head that turn, the first ones."""
        self._frequencies = inverse_frequencies(rope, self.rotary_dim)
        self._scale = rope.attention_factor
        self._device = torch.device("cpu")
        self._max_context = max_context
        self._fill_tables(min(max_context, _FIRST_POSITIONS))

    def ensure_positions(self, positions: int) -> None:
        """Make rows [0, positions) present."""
        if positions > len(self.cos):
            self._fill_tables(max(positions, 2 * len(self.cos)))

    def to(self, device: torch.device) -> None:
        if device != self._device:
            self._device = device
            self._fill_tables(self._max_context)

    def _fill_tables(self, positions: int) -> None:
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * self._frequencies
        cos = angles.cos() * self._scale
        sin = angles.sin() * self._scale
        if self._device.type != "cpu":
            cos, sin = torch.cat((cos, sin), dim=1).to(self._device).chunk(2, dim=1)
        self.cos = cos
        self.sin = sin
