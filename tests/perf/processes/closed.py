"""Clients that wait for their answers: `concurrency` of them work off a list of conversations, through any router."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import aiohttp

from baton_ops.bench.measured_request import RequestTiming, send_request
from baton_ops.sim.report import percentile


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt, whole, and the length of its answer."""

    prompt: str
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Seen:
    seconds: float
    timings: tuple[RequestTiming, ...]

    def ms(self, name: str, q: float) -> float:
        return percentile(sorted(getattr(t, name) for t in self.timings), q) * 1e3

    @property
    def hit_rate(self) -> float:
        return sum(t.cached_tokens for t in self.timings) / sum(
            t.prompt_tokens for t in self.timings
        )

    @property
    def rate(self) -> float:
        return len(self.timings) / self.seconds


async def run(
    session: aiohttp.ClientSession,
    url: str,
    conversations: Iterable[Sequence[Turn]],
    concurrency: int,
) -> Seen:
    """Every turn of a conversation after the one before. Raises what a failed request raises."""
    queue = iter(conversations)
    timings: list[RequestTiming] = []

    async def client() -> None:
        for turns in queue:
            for turn in turns:
                timings.append(
                    await send_request(
                        session, url, "demo", turn.prompt, turn.answer_tokens, chat=True
                    )
                )

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in itertools.repeat(None, concurrency)))
    return Seen(time.perf_counter() - began, tuple(timings))
