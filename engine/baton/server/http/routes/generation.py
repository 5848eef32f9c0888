"""Handlers of generation requests, and of tokens without an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from baton.errors import UnsupportedParameter
from baton.server.http.body_decoder import BodyDecoder
from baton.server.http.http_utils import json_response, read_body
from baton.server.http.request_handler import RequestHandler, Validate
from baton.server.http.translation import RequestTranslator
from baton.server.request.accepted import AcceptedRequest
from baton.server.request.validation import RequestValidator
from baton.server.text.answer_spec import Dialect
from baton.server.text.native import native_extension
from baton.server.text.tokenizer import Tokenizer


class GenerationContext:
    """Readers of bodies, and the handler that runs what they accept."""

    def __init__(
        self,
        answering: RequestHandler,
        validator: RequestValidator,
        tokenizer: Tokenizer,
        bodies: BodyDecoder,
    ) -> None:
        self.answering = answering
        self.validator = validator
        self.tokenizer = tokenizer
        self.bodies = bodies
        self.translator = RequestTranslator(validator, bodies)
        self.readers: dict[Dialect, Validate] = {
            Dialect.CHAT: self._of_object(validator.chat),
            Dialect.COMPLETIONS: self._of_object(validator.completion),
            Dialect.GENERATE: self._of_object(validator.generate),
            Dialect.RESPONSES: self.translator.responses,
            Dialect.MESSAGES: self.translator.messages,
        }

    def _of_object(
        self, validate: Callable[[dict[str, Any]], Awaitable[AcceptedRequest]]
    ) -> Validate:
        """Reads a body that is a JSON object for `validate`."""

        async def read(raw: bytes) -> AcceptedRequest:
            return await validate(await self.bodies.decode(raw))

        return read


GENERATION: web.AppKey[GenerationContext] = web.AppKey("generation", GenerationContext)


def answer_in(dialect: Dialect) -> Handler:
    """The handler of an API's requests."""

    async def answer(request: web.Request) -> web.StreamResponse:
        context = request.app[GENERATION]
        read = context.readers[dialect]
        return await context.answering.answer(request, dialect.value, read, dialect)

    return answer


async def refuse_stored_response(request: web.Request) -> web.StreamResponse:
    """Paths below /v1/responses that need a response on the server."""
    raise UnsupportedParameter(native_extension().NO_STORED_RESPONSES)


async def count_tokens(request: web.Request) -> web.Response:
    """Tokens of the prompt that the request would have."""
    context = request.app[GENERATION]
    raw = await read_body(request, context.validator.limits.refuse_oversized)
    return json_response({"input_tokens": await context.translator.count_tokens(raw)})


async def tokenize(request: web.Request) -> web.Response:
    context = request.app[GENERATION]
    body = await context.bodies.decode(await read_body(request))
    ids = await context.validator.tokenize(body)
    nested = bool(ids) and isinstance(ids[0], list)
    count = [len(row) for row in ids] if nested else len(ids)  # type: ignore[arg-type]
    answer: dict[str, Any] = {
        "tokens": ids,
        "count": count,
        "max_model_len": context.validator.limits.context_length,
    }
    if body.get("return_token_strs"):
        names_of = context.tokenizer.names_of
        answer["token_strs"] = list(map(names_of, ids)) if nested else names_of(ids)  # type: ignore[arg-type]
    return json_response(answer)


async def detokenize(request: web.Request) -> web.Response:
    context = request.app[GENERATION]
    body = await context.bodies.decode(await read_body(request))
    text = await context.validator.detokenize(body)
    # SGLang says `text`, vLLM says `prompt`; clients of both exist.
    return json_response({"text": text, "prompt": text})
