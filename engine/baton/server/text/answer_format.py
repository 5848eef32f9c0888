"""How the model writes reasoning and tool calls: chosen by flags, or found in the chat template and the vocabulary.

The rules are in `engine/text/src/stream` (Rust).
"""

from __future__ import annotations

from typing import Any

from baton.config import EngineConfig
from baton.server.text.model_info import ModelFacts
from baton.server.text.native import load_or_refuse, native_extension
from baton.server.text.tokenizer import Tokenizer


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
    )
    return AnswerFormat(native)
