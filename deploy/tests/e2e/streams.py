"""Clients that stream chat answers through the router's Service and check that each answer is whole."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from deploy.tests.e2e.cluster import TestCluster

HEADERS = {"Authorization": "Bearer demo"}
MAX_TOKENS = 100
STREAM_SECS = 300
"""Longest silence of a stream: bounds a hanging test, and is far above what an overloaded machine takes."""
REFRESH_SECS = 0.5


def question(number: int) -> dict[str, object]:
    return {
        "model": "demo",
        "stream": True,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "messages": [
            {"role": "user", "content": f"Question {number}: how do KV pages get from P to D?"}
        ],
    }


@dataclass
class StreamResult:
    """Answer of one stream: `problem` is empty if it ended with a finish reason and [DONE] and no error event."""

    number: int
    text: str = ""
    problem: str = ""
    router: str = ""
    request_id: str = ""
    index: int = 0
    """Number of the stream among those that its load started."""


async def stream_once(
    client: httpx.AsyncClient, base: str, number: int, body: dict[str, object] | None = None
) -> StreamResult:
    result = StreamResult(number, router=base)
    finish_reason, done = None, False
    try:
        url = f"{base}/v1/chat/completions"
        request = client.stream("POST", url, json=body or question(number), headers=HEADERS)
        async with request as response:
            result.request_id = response.headers.get("x-request-id", "")
            if response.status_code != 200:
                result.problem = (
                    f"{response.status_code}: {(await response.aread()).decode()[:300]}"
                )
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
        async with httpx.AsyncClient(timeout=STREAM_SECS) as client:
            return await stream_once(client, base or cluster.endpoints("router")[0], number)

    return asyncio.run(once())


@dataclass
class StreamLoad:
    """`clients` clients that stream one answer after another; each takes a ready endpoint of the Service.

    On exit every stream that was started ends first: `results` has one entry for each.
    """

    cluster: TestCluster
    clients: int = 4
    questions: int = 6
    routers: list[str] | None = None
    """Their addresses, where the API server cannot be asked; None: the Service's ready endpoints."""
    body: Callable[[int], dict[str, object]] | None = None
    """Requests by the number of the stream; None: the questions, in turn."""
    results: list[StreamResult] = field(default_factory=list)
    started: int = 0
    most_at_once: int = 0
    _running: int = 0
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
        endpoints: list[str] = []

        async def refresh() -> None:
            """Follow the Service as kube-proxy does, with its delay."""
            while True:
                endpoints[:] = await asyncio.to_thread(self.cluster.endpoints, "router")
                await asyncio.sleep(REFRESH_SECS)

        async def one(client_number: int, client: httpx.AsyncClient) -> None:
            turn = client_number
            while not self._stopping.is_set():
                if not endpoints:
                    self.results.append(
                        StreamResult(-1, problem="the Service has no ready endpoint")
                    )
                    self.started += 1
                    await asyncio.sleep(REFRESH_SECS)
                    continue
                await self._one_stream(
                    client, endpoints[turn % len(endpoints)], turn % self.questions
                )
                turn += 1

        if self.routers is None:
            endpoints[:] = await asyncio.to_thread(self.cluster.endpoints, "router")
            refreshing = asyncio.create_task(refresh())
        else:
            endpoints = self.routers
            refreshing = None
        # No connection is kept: each stream is balanced by itself.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=STREAM_SECS, limits=limits) as client:
            await asyncio.gather(*(one(number, client) for number in range(self.clients)))
        if refreshing is not None:
            refreshing.cancel()

    async def _one_stream(self, client: httpx.AsyncClient, base: str, number: int) -> None:
        self.started += 1
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        index = self.started
        body = None if self.body is None else self.body(index)
        result = await stream_once(client, base, number, body)
        result.index = index
        self.results.append(result)
        self._running -= 1

    @property
    def problems(self) -> list[str]:
        return [f"question {r.number}: {r.problem}" for r in self.results if r.problem]
