"""Clients that stream chat answers through the router's Service and check that each answer is whole."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass, field

import httpx

from deploy.tests.e2e.cluster import TestCluster

HEADERS = {"Authorization": "Bearer demo"}
MAX_TOKENS = 100


def question(number: int) -> dict[str, object]:
    return {
        "model": "demo",
        "stream": True,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "messages": [{"role": "user", "content": f"Question {number}: how do KV pages get from P to D?"}],
    }


@dataclass
class StreamResult:
    """Answer of one stream: `problem` is empty if it ended with a finish reason and [DONE] and no error event."""

    number: int
    text: str = ""
    problem: str = ""


async def stream_once(client: httpx.AsyncClient, base: str, number: int) -> StreamResult:
    result = StreamResult(number)
    finish_reason, done = None, False
    try:
        request = client.stream("POST", f"{base}/v1/chat/completions", json=question(number), headers=HEADERS)
        async with request as response:
            if response.status_code != 200:
                result.problem = f"{response.status_code}: {(await response.aread()).decode()[:300]}"
                return result
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        result.problem = f"error event: {event['error']}"
                        continue
                    for choice in event["choices"]:
                        result.text += choice["delta"].get("content") or ""
                        finish_reason = choice["finish_reason"] or finish_reason
    except httpx.HTTPError as err:
        result.problem = repr(err)
    if not result.problem and (finish_reason is None or not done):
        result.problem = f"ended with finish_reason {finish_reason}, [DONE] {done}"
    return result


def ask(cluster: TestCluster, number: int, base: str | None = None) -> StreamResult:
    """Ask one question of the router at `base`, or of any ready one."""

    async def once() -> StreamResult:
        async with httpx.AsyncClient(timeout=120) as client:
            return await stream_once(client, base or cluster.endpoints("router")[0], number)

    return asyncio.run(once())


@dataclass
class StreamLoad:
    """`clients` clients that stream one answer after another; each takes a ready endpoint of the Service."""

    cluster: TestCluster
    clients: int = 4
    questions: int = 6
    routers: list[str] | None = None
    """Their addresses, where the API server cannot be asked; None: the Service's ready endpoints."""
    results: list[StreamResult] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> StreamLoad:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        assert self._thread is not None
        self._thread.join()

    async def _run(self) -> None:
        async def one(client_number: int) -> None:
            turn = client_number
            while not self._stopping.is_set():
                endpoints = self.routers or await asyncio.to_thread(self.cluster.endpoints, "router")
                if not endpoints:
                    self.results.append(StreamResult(-1, problem="the Service has no ready endpoint"))
                    await asyncio.sleep(0.5)
                    continue
                async with httpx.AsyncClient(timeout=120) as client:
                    base = endpoints[turn % len(endpoints)]
                    self.results.append(await stream_once(client, base, turn % self.questions))
                turn += 1

        await asyncio.gather(*(one(number) for number in range(self.clients)))

    @property
    def problems(self) -> list[str]:
        return [f"question {r.number}: {r.problem}" for r in self.results if r.problem]
