"""One measured request: a streamed answer of fixed length, and the times its client saw.

Clock: monotonic, in this process.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

OUTPUT_MEMBERS = ("content", "reasoning_content", "reasoning", "tool_calls")
"""Members of a chat event that hold output of the model."""


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Times of one request as its client saw them [s]."""

    ttft: float
    e2e: float
    tokens: int
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def tpot(self) -> float:
        """Mean time per token after the first."""
        return (self.e2e - self.ttft) / max(self.tokens - 1, 1)


async def send_request(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    prompt: list[int] | str,
    tokens: int,
    *,
    chat: bool = False,
) -> RequestTiming:
    """Receive a streamed answer of exactly `tokens` tokens.

    Raises ClientError, TimeoutError, or ValueError.

    `chat`: the prompt is a user's message, not a completion's; it is text then.
    """
    path = "chat/completions" if chat else "completions"
    input_fields = (
        {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    )
    body = {
        "model": model,
        **input_fields,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    first = last = 0.0
    usage: dict[str, Any] = {}
    async with session.post(f"{url}/v1/{path}", json=body) as response:
        if response.status != 200:
            raise ValueError(f"status {response.status}: {(await response.text())[:200]}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            before = last
            last = time.perf_counter()
            # After the first token only usage and errors are read: the client must not become the
            # bottleneck.
            if first and b'"usage"' not in line and b'"error"' not in line:
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(f"error event: {event['error']}")
            usage = event.get("usage") or usage
            if not event["choices"]:
                last = before
            elif not first and _has_text(event["choices"][0]):
                first = last
    if usage.get("completion_tokens") != tokens:
        raise ValueError(f"{usage.get('completion_tokens')} tokens came, {tokens} were asked for")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return RequestTiming(
        (first or last) - began, last - began, tokens, usage.get("prompt_tokens") or 0, cached
    )


def _has_text(choice: dict[str, Any]) -> bool:
    """True if a choice carries output or an end, not only the role.

    A token may be part of a character and show nothing; then the next one counts.
    """
    delta = choice.get("delta", {})
    output = (choice.get("text"), *(delta.get(name) for name in OUTPUT_MEMBERS))
    return any(output) or bool(choice.get("finish_reason"))
