"""How tokens become the text that a client sees."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextRules:
    """What the text layer does with an answer's tokens."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    continues_prompt: bool = False
    """The answer's text continues the prompt's."""
