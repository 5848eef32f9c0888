"""Kinds of answers whose cost per token is compared: plain text, tool calls, reasoning, and other APIs.

Simulated engines answer with words whatever is asked. An answer that begins within a call or a reasoning is one that
the engine resumes (docs/protocol.md, Resuming a stream): `baton_resume` has the tokens up to there, the engine reads
them as its own and goes on behind them, with the arguments of the call or the text of the reasoning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

CALL_BEGIN = '<tool_call>\n{"name": "write_file", "arguments": {"content": "'
REASONING_BEGIN = "<think>\n"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
    "required": ["path", "content"],
}
DESCRIPTION = "Writes a file"
CHAT_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "write_file", "description": DESCRIPTION, "parameters": PARAMETERS},
}
RESPONSES_TOOL: dict[str, Any] = {
    "type": "function",
    "name": "write_file",
    "description": DESCRIPTION,
    "parameters": PARAMETERS,
}
MESSAGES_TOOL: dict[str, Any] = {
    "name": "write_file",
    "description": DESCRIPTION,
    "input_schema": PARAMETERS,
}
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"


@dataclass(frozen=True, slots=True)
class AnswerArm:
    """A kind of answer."""

    name: str
    path: str
    members: dict[str, Any]
    """Members of the request beside those of every request."""
    begin: str
    """Beginning of the answer, which the engine resumes behind; empty for an answer from its first token on."""
    marker: str
    """Text that the event of each token has once, and other events do not have."""


PLAIN = AnswerArm("plain", CHAT, {}, "", '"delta":{"content":')
ARMS = (
    PLAIN,
    AnswerArm("tool call", CHAT, {"tools": [CHAT_TOOL]}, CALL_BEGIN, '"function":{"arguments":'),
    AnswerArm("reasoning", CHAT, {}, REASONING_BEGIN, '"delta":{"reasoning_content":'),
    AnswerArm("tools, text", CHAT, {"tools": [CHAT_TOOL]}, "", '"delta":{"content":'),
    AnswerArm("responses", RESPONSES, {}, "", "event: response.output_text.delta"),
    AnswerArm(
        "responses, call",
        RESPONSES,
        {"tools": [RESPONSES_TOOL]},
        CALL_BEGIN,
        "event: response.function_call_arguments.delta",
    ),
    AnswerArm("messages", MESSAGES, {}, "", "event: content_block_delta"),
    AnswerArm(
        "messages, call", MESSAGES, {"tools": [MESSAGES_TOOL]}, CALL_BEGIN, '"input_json_delta"'
    ),
)


def encode(tokenizer: Path, text: str) -> Sequence[int]:
    """Token ids of `text`. `tokenizer`: a directory with tokenizer.json."""
    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
    return ids


def arm_job(arm: AnswerArm, tokenizer: Path, streams: int, tokens: int) -> dict[str, Any]:
    """Job of the client for `streams` answers of `tokens` tokens, their beginning not counted."""
    members = dict(arm.members)
    begin = encode(tokenizer, arm.begin) if arm.begin else ()
    if begin:
        members["baton_resume"] = {"ids": list(begin), "seed": 1, "created": 1, "events": 4}
    return {
        "measure": "tokens",
        "streams": streams,
        "tokens": tokens,
        "begun_tokens": len(begin),
        "content": "",
        "path": arm.path,
        "members": members,
        "marker": arm.marker,
    }
