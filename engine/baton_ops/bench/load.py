"""Measured request, and the closed-loop load made of such.

In a round `concurrency` clients each send their next request when the last is answered. Prompts are
random token ids of a fixed length (the first `shared_tokens` equal in all of them), answers have a
fixed length, so that servers get the same work. Clock: monotonic, in this process.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from baton.config.flags import opt

FIRST_ID = 3
LAST_ID = 1000
"""Ids every tokenizer has and that are not special in common models."""

OUTPUT_MEMBERS = ("content", "reasoning_content", "reasoning", "tool_calls")
"""Members of a chat event that hold output of the model."""


@dataclass(frozen=True, slots=True)
class LoadShape:
    """Requests of one round, as flags say."""

    requests: int = opt(16, "requests per round")
    concurrency: int = opt(4, "requests at once")
    prompt_tokens: int = opt(512, "prompt length [tokens]")
    output_tokens: int = opt(32, "answer length [tokens]")
    shared_tokens: int = opt(0, "equal start of all prompts [tokens]")


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


@dataclass(frozen=True, slots=True)
class LoadRound:
    """All timings of one round against one server."""

    seconds: float
    timings: tuple[RequestTiming, ...]
    failures: tuple[str, ...]

    @property
    def tokens_per_second(self) -> float:
        return sum(t.tokens for t in self.timings) / self.seconds


def make_prompts(work: LoadShape, seed: int) -> list[list[int]]:
    """The round's prompts; the shared part depends on nothing, the rest on `seed`."""
    shared = random.Random(0)
    random_part = random.Random(seed)
    start = [
        shared.randrange(FIRST_ID, LAST_ID)
        for _ in range(min(work.shared_tokens, work.prompt_tokens))
    ]
    remaining_tokens = work.prompt_tokens - len(start)
    return [
        start + [random_part.randrange(FIRST_ID, LAST_ID) for _ in range(remaining_tokens)]
        for _ in range(work.requests)
    ]


async def run_round(
    session: aiohttp.ClientSession, url: str, model: str, work: LoadShape, seed: int
) -> LoadRound:
    """Send one round to `url`; never raises for a failed request: its reason is in `failures`."""
    queue = make_prompts(work, seed)
    timings: list[RequestTiming] = []
    failures: list[str] = []

    async def run_client() -> None:
        while queue:
            prompt = queue.pop()
            try:
                timings.append(await send_request(session, url, model, prompt, work.output_tokens))
            except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as err:
                failures.append(f"{type(err).__name__}: {err}")

    began = time.perf_counter()
    await asyncio.gather(*(run_client() for _ in range(work.concurrency)))
    return LoadRound(time.perf_counter() - began, tuple(timings), tuple(failures))


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
