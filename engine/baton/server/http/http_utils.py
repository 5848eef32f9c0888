"""Small pieces of HTTP shared by the handlers: the body as an object, JSON answers, errors, request
ids.

All streams wait while the event loop works on a body, so generation requests are checked by size
before they are parsed: those above INLINE_BYTES in a thread, without the GIL.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from aiohttp import web

from baton.errors import EngineError, InvalidJson, PayloadTooLarge, UnsupportedMediaType
from baton.server.fields import decode_exact

encode_json = msgspec.json.Encoder().encode

MAX_BODY_BYTES = 32 * 2**20
"""A 128k-token prompt as JSON numbers is about 1 MiB; this leaves room for batches of them."""
MAX_BODY_COMMAS = 2**21
"""Bounds the values in a body before it is parsed: that many take 20 to 130 ms, and all requests
wait meanwhile.
"""

BODY_PIECE_BYTES = 2**18
"""Part of a long answer that is written at once: copied in 0.1 ms."""

INLINE_BYTES = 64 * 2**10
"""Size checks up to here take 0.1 ms, about as long as the way to a thread and back."""

Check = Callable[[str, bytes], None]
"""Raises EngineError for a request path and its body."""

_threads = ThreadPoolExecutor(1, thread_name_prefix="large-body")

REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)


def new_id() -> str:
    return uuid.uuid4().hex


def canonical_path(request: web.BaseRequest) -> str:
    """The path without one slash at its end, as routes accept it."""
    return request.path.removesuffix("/") or "/"


def with_trailing_slashes(*routes: web.RouteDef) -> list[web.RouteDef]:
    """The routes, and each with a slash at its end. Those come first: a parameter takes slashes
    too.
    """
    slashed = [
        web.route(route.method, route.path + "/", route.handler, **route.kwargs) for route in routes
    ]
    return [*slashed, *routes]


def error_response(err: EngineError, more: dict[str, Any] | None = None) -> web.Response:
    """The error object, with `more` fields beside it."""
    headers = {} if err.retry_after_secs is None else {"retry-after": str(err.retry_after_secs)}
    return json_response(err.body() | (more or {}), err.status, headers)


def json_response(
    value: Any, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    return json_body_response(encode_json(value), status, headers)


def json_body_response(
    body: bytes, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """`body`: JSON."""
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


async def send_json_body(
    request: web.Request, body: bytes, headers: dict[str, str]
) -> web.StreamResponse:
    """Answer with JSON. A long body is written piece by piece, between which other answers have
    their turn.

    Logprobs of a prompt of 128 k tokens have 180 MB: one write would copy them at once.
    """
    if len(body) <= BODY_PIECE_BYTES:
        return json_body_response(body, headers=headers)
    response = web.StreamResponse(headers=headers)
    response.content_type = "application/json"
    response.content_length = len(body)
    await response.prepare(request)
    whole = memoryview(body)
    for start in range(0, len(body), BODY_PIECE_BYTES):
        await response.write(whole[start : start + BODY_PIECE_BYTES])
        await asyncio.sleep(0)
    await response.write_eof()
    return response


async def read_object(request: web.Request, check: Check | None = None) -> dict[str, Any]:
    """The body as a JSON object. Raises InvalidJson, PayloadTooLarge, UnsupportedMediaType, and
    what `check` raises.
    """
    return decode_object(await read_body(request, check))


async def read_body(request: web.Request, check: Check | None = None) -> bytes:
    """The body. Raises PayloadTooLarge, UnsupportedMediaType, and what `check` raises."""
    coding = request.headers.get("content-encoding", "identity").lower()
    if coding not in ("", "identity"):
        raise UnsupportedMediaType(
            f"the body has content-encoding {coding[:50]}; send it as plain JSON"
        )
    if request.content_type.startswith("multipart/"):
        raise UnsupportedMediaType(
            f"the body is {request.content_type[:50]}; send application/json"
        )
    raw = await _read(request)
    if check is not None and len(raw) <= INLINE_BYTES:
        check(canonical_path(request), raw)
    elif check is not None:
        await asyncio.get_running_loop().run_in_executor(
            _threads, check, canonical_path(request), raw
        )
    return raw


def decode_object(raw: bytes) -> dict[str, Any]:
    """A JSON object. Raises InvalidJson."""
    try:
        value = decode_exact(raw)
    except UnicodeDecodeError as err:
        raise InvalidJson(f"the body is not UTF-8: {err.reason} at byte {err.start}") from err
    except (msgspec.DecodeError, RecursionError) as err:
        raise InvalidJson(f"the body ({len(raw)} bytes) is not JSON: {err}") from err
    if type(value) is not dict:
        raise InvalidJson("the body must be a JSON object")
    return value


async def _read(request: web.Request) -> bytes:
    """The body, piece by piece as it arrives: aiohttp's `Request.read` takes all of it in one turn
    of the event loop.
    """
    length = request.content_length or 0
    pieces: list[bytes] = []
    read = commas = 0
    while max(length, read) <= MAX_BODY_BYTES and commas <= MAX_BODY_COMMAS:
        piece = await request.content.readany()
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        read += len(piece)
        commas += piece.count(b",")
    if commas > MAX_BODY_COMMAS:
        raise PayloadTooLarge(f"the body has more than {MAX_BODY_COMMAS} commas; split the batch")
    raise PayloadTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes; split the batch")
