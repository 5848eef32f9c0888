"""Rotary embedding, as far as computing it goes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Base `theta` and how its frequencies are stretched (`kind`)."""

    theta: float
    kind: str = "default"
    """default | linear | llama3 | yarn"""
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cos and sin."""
    partial: float = 1.0
    """The first dimensions of a head that turn, as a share of all; the others pass."""

    def rotary_dim(self, head_dim: int) -> int:
        """Dimensions that turn."""
        return int(head_dim * self.partial)
