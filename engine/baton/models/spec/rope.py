"""Rotary embedding, as far as computing it goes."""

from __future__ import annotations

from dataclasses import dataclass, replace

LONGROPE = "longrope"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Base `theta` and how its frequencies are stretched (`kind`)."""

    theta: float
    kind: str = "default"
    """default | linear | llama3 | yarn | longrope"""
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cos and sin."""
    score_factor: float = 1.0
    """Multiplies scores, in classes with latent attention."""
    partial: float = 1.0
    """The first dimensions of a head that turn, as a share of all; the others pass."""
    factors: tuple[float, ...] = ()
    """With longrope: divides the frequency of each pair of dimensions that turns."""
    long_factors: tuple[float, ...] = ()
    """`factors` where contexts above `original_max_position` are served."""
    long_attention_factor: float = 1.0
    """`attention_factor` there."""

    def rotary_dim(self, head_dim: int) -> int:
        """Dimensions that turn."""
        return int(head_dim * self.partial)

    def is_long_for(self, context: int) -> bool:
        """Return whether contexts of so many tokens need the long factors."""
        return self.kind == LONGROPE and context > self.original_max_position

    def for_context(self, context: int) -> RopeSpec:
        """The embedding of a model that serves prompts and answers of up to `context` tokens."""
        if not self.is_long_for(context):
            return self
        return replace(self, factors=self.long_factors, attention_factor=self.long_attention_factor)
