"""A tokenizer with markers of reasoning and calls, and with some longer tokens; gates for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from baton.sched.types.reasoning import ReasoningGate, ReasoningMarker, ReasoningPhase
from tests.support.models.checkpoints import EOS, make_checkpoint

BEGIN, END, CALL, LONG_END, LONG_NEWLINES = range(EOS + 1, EOS + 6)
ADDED = {
    BEGIN: "<think>",
    END: "</think>",
    CALL: "<tool_call>",
    LONG_END: "o:{",
    LONG_NEWLINES: "o:\n\n",
}


def make_thinking_checkpoint(path: Path) -> Path:
    """A checkpoint with random weights whose tokenizer has these tokens."""
    make_checkpoint("llama", path)
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["added_tokens"] += [
        {
            "id": token, "content": text, "special": False, "normalized": False, "single_word": False,
            "lstrip": False, "rstrip": False,
        }
        for token, text in ADDED.items()
    ]  # fmt: skip
    file.write_text(json.dumps(tokenizer))
    return path


def token_of(char: str) -> int:
    """The token of an ASCII character."""
    from tokenizers import pre_tokenizers

    shown = {"\n": "Ċ", " ": "Ġ"}.get(char, char)
    return sorted(pre_tokenizers.ByteLevel.alphabet()).index(shown)


def tokens_of(text: str) -> list[int]:
    return [token_of(char) for char in text]


FORCED_END = (token_of("\n"), END, token_of("\n"), token_of("\n"))


def make_gate(start: ReasoningPhase, **more: Any) -> ReasoningGate:
    return ReasoningGate(
        **{
            "start": start,
            "begins": (ReasoningMarker((BEGIN,)),),
            "ends": (ReasoningMarker((END,)),),
            "call_ids": (CALL,),
            "is_ended_by_calls": True,
            "forced_end": FORCED_END,
            "lead_newlines": 2,
            **more,
        }
    )
