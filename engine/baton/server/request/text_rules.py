"""How tokens become the text that a client sees."""

from __future__ import annotations

from dataclasses import dataclass

from baton.server.request.tools import CallableTool


@dataclass(frozen=True, slots=True)
class TextRules:
    """Rules by which the text layer makes text of an answer's tokens."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    continues_prompt: bool = False
    """The answer's text continues the prompt's."""


@dataclass(frozen=True, slots=True)
class ReadingRules:
    """Rules by which the text layer reads the parts of an answer: reasoning, content and tool calls."""

    tools: tuple[CallableTool, ...] = ()
    """Tools that the answer may call; empty: calls are not read."""
    calls_before: int = 0
    """Tool calls in the conversation before the answer."""
    parallel_tool_calls: bool = True
    """False: the answer ends behind its first call."""
    separate_reasoning: bool = True
    """False: reasoning and its markers are content."""
    stream_reasoning: bool = True
    """False: reasoning is sent when it is complete."""
    include_reasoning: bool = True
    """False: reasoning is generated and not sent."""
