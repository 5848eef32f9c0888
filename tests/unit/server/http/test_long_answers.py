"""Answers that are longer than one write."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from baton.server.http.http_utils import BODY_PIECE_BYTES, send_json_body


@pytest.mark.parametrize("size", [10, BODY_PIECE_BYTES, BODY_PIECE_BYTES + 1, 3_000_000])
def test_long_answer_is_written_in_pieces(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    pieces: list[int] = []
    write = web.StreamResponse.write

    async def record(self: web.StreamResponse, data: bytes | memoryview) -> None:
        pieces.append(len(data))
        await write(self, data)

    monkeypatch.setattr(web.StreamResponse, "write", record)
    body = b'"' + b"x" * (size - 2) + b'"'

    async def answer(request: web.Request) -> web.StreamResponse:
        return await send_json_body(request, body, {"x-name": "value"})

    async def ask() -> None:
        app = web.Application()
        app.router.add_get("/", answer)
        async with TestClient(TestServer(app)) as client:
            response = await client.get("/")
            assert await response.read() == body
            assert response.headers["content-type"] == "application/json"
            assert response.headers["content-length"] == str(size)
            assert response.headers["x-name"] == "value"

    asyncio.run(ask())
    if size <= BODY_PIECE_BYTES:
        assert pieces == []
        return
    assert sum(pieces) == size
    assert max(pieces) == BODY_PIECE_BYTES
