"""Handlers of /openapi.json and /docs on an engine."""

from __future__ import annotations

from aiohttp import web

from baton.server.http.http_utils import json_response
from baton.server.http.openapi.document import openapi_document
from baton.server.http.openapi.operations import Server
from baton.server.http.openapi.page import CONTENT_SECURITY_POLICY, docs_page


async def answer_document(request: web.Request) -> web.Response:
    return json_response(openapi_document(Server.ENGINE))


async def answer_page(request: web.Request) -> web.Response:
    page = docs_page(openapi_document(Server.ENGINE), Server.ENGINE)
    headers = {"content-security-policy": CONTENT_SECURITY_POLICY}
    return web.Response(text=page, content_type="text/html", headers=headers)
