"""Small paths of two APIs: stored responses, which are refused, and models in Anthropic's form."""

from __future__ import annotations

from typing import Any, NoReturn

from aiohttp import web

from baton.errors import UnsupportedParameter
from baton.server.http.http_utils import encode_json, json_body_response
from baton.server.text.native import native_extension

STORED_RESPONSES = (
    ("POST", "/compact"),
    ("GET", "/{id}"),
    ("DELETE", "/{id}"),
    ("POST", "/{id}/cancel"),
    ("GET", "/{id}/input_items"),
)
"""Methods and paths below /v1/responses that need a response on the server."""
ANTHROPIC_VERSION_HEADER = "anthropic-version"
"""Clients of Anthropic's API send it."""


async def refuse_stored_response(request: web.Request) -> NoReturn:
    raise UnsupportedParameter(native_extension().NO_STORED_RESPONSES)


def models_response(request: web.Request, models: dict[str, Any]) -> web.Response:
    """`models`: a list in OpenAI's form, or one of it. The response has the form of the client's API."""
    body = encode_json(models)
    if ANTHROPIC_VERSION_HEADER in request.headers:
        body = native_extension().anthropic_models(body)
    return json_body_response(body)
