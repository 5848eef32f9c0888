"""Requests of /v1/responses and /v1/messages: translated to chat requests, which validation.py
checks.

The translation is in `engine/text` (Rust, module `dialect::translate`). Refusals name the members
of the client's own body, those of validation.py too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from baton.errors import EngineError
from baton.server.http.body_decoder import BodyDecoder
from baton.server.request.accepted import AcceptedRequest
from baton.server.request.validation import RequestValidator
from baton.server.text.native import call_or_refuse, native_extension


@dataclass(frozen=True, slots=True)
class RequestTranslator:
    """Reads the requests of both APIs."""

    validator: RequestValidator
    bodies: BodyDecoder

    async def responses(self, raw: bytes) -> AcceptedRequest:
        return await self._accept("responses", raw)

    async def messages(self, raw: bytes) -> AcceptedRequest:
        return await self._accept("messages", raw)

    async def count_tokens(self, raw: bytes) -> int:
        """Tokens of the prompt of a request to /v1/messages/count_tokens."""
        return (await self._accept("count_tokens", raw)).prompt_tokens

    async def _accept(self, form: str, raw: bytes) -> AcceptedRequest:
        """Raises EngineError that names a member of the client's body."""
        translate = native_extension().translate_request
        translated = await self.bodies.translate(raw, lambda: call_or_refuse(translate, form, raw))
        try:
            chat = await self.bodies.decode(translated.chat)
            accepted = await self.validator.chat(chat, clamps_limit=True)
        except EngineError as err:
            raise _with_client_param(err, translated) from None
        accepted = accepted.with_options(facts=translated.facts)
        ignored = (*translated.ignored, *map(translated.client_param, accepted.ignored))
        return msgspec.structs.replace(accepted, ignored=tuple(dict.fromkeys(ignored)))


def _with_client_param(err: EngineError, translated: Any) -> EngineError:
    """The error with the client's name of the member, which its message begins with in most
    cases.
    """
    if err.param is None:
        return err
    param = translated.client_param(err.param)
    message = err.message
    if message.startswith(err.param):
        message = param + message.removeprefix(err.param)
    return type(err)(message, param=param, retry_after_secs=err.retry_after_secs)
