"""How tokens become the text that a client sees."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextRules:
    """Rules by which the text layer makes text of an answer's tokens."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    continues_prompt: bool = False
    """The answer's text continues the prompt's."""
