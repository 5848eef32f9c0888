"""HTTP proxy between a unix socket and a cluster that records what passes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

HOP_HEADERS = frozenset({"connection", "content-length", "host", "transfer-encoding"})
MAX_BODY_BYTES = 64 << 20


@dataclass
class Exchange:
    """A request and its answer."""

    method: str
    path: str
    request: bytes
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    answer: bytes = b""

    @property
    def body(self) -> Any:
        return json.loads(self.request)


class RecordingProxy:
    """Forwards what arrives at a unix socket to `target`, and keeps it."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.exchanges: list[Exchange] = []

    async def forward(self, request: web.Request) -> web.StreamResponse:
        exchange = Exchange(request.method, request.path, await request.read())
        self.exchanges.append(exchange)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_HEADERS}
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session,
            session.request(
                request.method,
                self.target + request.path_qs,
                data=exchange.request,
                headers=headers,
            ) as answer,
        ):
            exchange.status = answer.status
            exchange.headers = {k.lower(): v for k, v in answer.headers.items()}
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in HOP_HEADERS}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for part in answer.content.iter_any():
                exchange.answer += part
                await response.write(part)
        # A client may close its connection once it has read the end of a stream.
        with contextlib.suppress(ConnectionResetError):
            await response.write_eof()
        return response

    @contextlib.contextmanager
    def listening(self, socket_path: Path) -> Iterator[None]:
        """Serve from a thread of its own until the block ends."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()

        async def start() -> web.AppRunner:
            app = web.Application(client_max_size=MAX_BODY_BYTES)
            app.router.add_route("*", "/{path:.*}", self.forward)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.UnixSite(runner, str(socket_path)).start()
            return runner

        runner = asyncio.run_coroutine_threadsafe(start(), loop).result()
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
