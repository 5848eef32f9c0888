"""How the model writes reasoning and tool calls: chosen by flags, or found in the checkpoint.

The chat template and the vocabulary decide, else the `model_type` of config.json.

The rules are in `engine/text/src/stream` (Rust).
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from baton.config import EngineConfig
from baton.sched.types.reasoning import ReasoningPhase
from baton.server.text.model_info import ModelFacts
from baton.server.text.native import load_or_refuse, native_extension
from baton.server.text.tokenizer import Tokenizer


class AnswerMarker(NamedTuple):
    """A text between which reasoning and calls stand."""

    text: str
    role: str
    """`MarkerRole` of engine/text/src/stream/markers.rs."""
    token_id: int | None
    """None: the marker is recognized by its characters."""


class AnswerFormat:
    """Formats of one model."""

    def __init__(self, native: Any) -> None:
        self.native = native
        """As other calls of the native extension take it."""
        self.tool_parser: str | None = native.tool_parser
        """Format of tool calls; None: there is none, and calls are not read."""
        self.reasoning_parser: str | None = native.reasoning_parser
        """Markers of the reasoning; None: answers have none."""
        self.canonical: str = native.canonical
        """All that decides how answers are read: part of the node's fingerprint."""
        self.markers = [AnswerMarker(*marker) for marker in native.markers]
        self.forced_reasoning_end: str | None = native.forced_reasoning_end
        """Text that ends a reasoning which is cut at its limit; None: there is no reasoning."""
        self.lead_newlines: int = native.lead_newlines
        """Newlines behind the reasoning that belong neither to it nor to the content, at most."""
        self.reasoning_message: tuple[str, list[str]] | None = native.reasoning_message
        """Header and ends of a message of reasoning, where the reasoning is messages."""
        self.content_header: str | None = native.content_header
        """Header of the message with the content, where messages of reasoning stand in front of
        it.
        """

    def reasoning_start(
        self, tokenizer: Tokenizer, prompt_end: array[int]
    ) -> tuple[ReasoningPhase, bool]:
        """Phase in which the answer to a prompt begins, and True if its reasoning has text
        there.
        """
        start = self.native.reasoning_start(tokenizer.native, prompt_end)
        if start is None:
            return ReasoningPhase.CONTENT, False
        name, has_text = start
        return ReasoningPhase(name), has_text


def load_answer_format(
    config: EngineConfig, facts: ModelFacts, tokenizer: Tokenizer
) -> AnswerFormat:
    """Raises ConfigError for a parser that there is not."""
    native = load_or_refuse(
        native_extension().AnswerFormat,
        facts.chat_template,
        tokenizer.native,
        config.tool_parser,
        config.reasoning_parser,
        model_type=facts.model_type,
        renders_tools=facts.renders_tools,
        unknown_tool_calls=config.unknown_tool_calls,
    )
    return AnswerFormat(native)
