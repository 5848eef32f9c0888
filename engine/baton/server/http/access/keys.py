"""The key of an engine, as clients send it."""

from __future__ import annotations

import hmac

from aiohttp import web

from baton.errors import InvalidApiKey


def check_key(request: web.BaseRequest, key: str) -> None:
    """Raise InvalidApiKey for a request without the key."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme == "" and "x-api-key" in request.headers:  # clients of Anthropic's API
        scheme = "bearer"
        given = request.headers["x-api-key"]
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), key.encode()):
        raise InvalidApiKey("send the engine's --api-key as 'Authorization: Bearer KEY'")
