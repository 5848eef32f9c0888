"""Bodies of requests: bounded while they arrive, and checked by size beside the event loop before they are parsed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest
from aiohttp import web

from baton import _native
from baton.errors import BadRequest, EngineError, PayloadTooLarge
from baton.server.http import http_utils


class Pieces:
    """A request whose body arrives piece by piece."""

    content_type = "application/json"
    path = "/generate"

    def __init__(self, *pieces: bytes, length: int | None = None) -> None:
        self.pieces = list(pieces)
        self.headers: dict[str, str] = {}
        self.content_length = length
        self.content = self

    async def readany(self) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""


def read(request: Pieces, check: Callable[[str, bytes], None] | None = None) -> dict[str, Any]:
    return asyncio.run(http_utils.read_object(cast(web.Request, request), check))


def test_large_body_is_checked_in_a_thread_and_not_parsed_if_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(msgspec.json, "decode", None)
    threads = []

    def refuse(path: str, body: bytes) -> None:
        threads.append((path, len(body), threading.current_thread() is threading.main_thread()))
        raise BadRequest("no")

    for size in (http_utils.INLINE_BYTES, http_utils.INLINE_BYTES + 1):
        with pytest.raises(BadRequest, match=r"^no$"):
            read(Pieces(b"{", b" " * (size - 2), b"}"), refuse)
    assert threads == [
        ("/generate", http_utils.INLINE_BYTES, True),
        ("/generate", http_utils.INLINE_BYTES + 1, False),
    ]


def test_body_is_what_arrived() -> None:
    assert read(Pieces(b'{"a"', b": [1,", b" 2]}")) == {"a": [1, 2]}


def test_routers_know_the_longest_body_that_engines_read() -> None:
    assert http_utils.MAX_BODY_BYTES == _native.MAX_ENGINE_BODY_BYTES


@pytest.mark.parametrize(
    ("pieces", "length", "left"),
    [
        ([b"{}"], http_utils.MAX_BODY_BYTES + 1, 1),
        ([b"x" * http_utils.MAX_BODY_BYTES, b"x", b"never read"], None, 1),
        ([b"," * (http_utils.MAX_BODY_COMMAS + 1), b"never read"], None, 1),
    ],
    ids=["announced", "bytes", "values"],
)
def test_reading_ends_at_the_limit(pieces: list[bytes], length: int | None, left: int) -> None:
    request = Pieces(*pieces, length=length)
    with pytest.raises(EngineError) as caught:
        read(request)
    assert (type(caught.value), len(request.pieces)) == (PayloadTooLarge, left)
