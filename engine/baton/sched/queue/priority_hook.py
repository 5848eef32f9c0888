"""Arguments of --priority-adjustment-function: values, so that a hook can keep them and can break
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestView:
    """A waiting request."""

    id: str
    priority: int
    """The stated one or --default-priority; larger is better, whatever the flags say; without one
    -2^31.
    """
    priority_class: str
    tenant: str
    wait_secs: float
    work_tokens: int
    """Tokens to compute before its next token."""
    answer_tokens: int
    """Tokens it is expected to generate after that."""
    generated_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class LoadView:
    """The engine rank that it waits for."""

    waiting: int
    running: int
    free_pages: int
    """Free or evictable."""
    prefill_rate: float
    """Prompt tokens per second, measured."""
