"""Error responses on the paths of Anthropic's API."""

from __future__ import annotations

import re

from aiohttp import web

from baton.errors import EngineError, PromptTooLong
from baton.server.http.http_utils import encode_json, json_body_response
from baton.server.text.native import native_extension

MESSAGES_PATH = "/v1/messages"
_LIMIT = re.compile(r"maximum context length is (\d+) tokens")
_SIZE = re.compile(r"the prompt has (?:\d+ characters, at least )?(\d+)(?: tokens|;| and)")


def is_anthropic_path(path: str) -> bool:
    """True for /v1/messages and all below it, paths that this server does not have included."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def anthropic_error_response(err: EngineError, request_id: str) -> web.Response:
    """The error in Anthropic's form, with our own code beside its type."""
    headers = {} if err.retry_after_secs is None else {"retry-after": str(err.retry_after_secs)}
    if isinstance(err, PromptTooLong):
        err = PromptTooLong(_prompt_sentence(err.message), param=err.param)
    body = native_extension().anthropic_error_body(encode_json(err.body()), request_id)
    return json_body_response(body, err.status, headers)


def _prompt_sentence(message: str) -> str:
    """The words by which Claude Code (2.1) knows that it has to compact the conversation."""
    limit = _LIMIT.search(message)
    if limit is None:
        return message
    most = int(limit[1])
    size = _SIZE.search(message)
    tokens = max(most + 1, int(size[1])) if size else most + 1
    return f"prompt is too long: {tokens} tokens > {most} maximum"
