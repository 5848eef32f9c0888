"""Bodies of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from baton.errors import UnsupportedParameter
from baton.server import fields
from baton.server.request import unsupported_fields
from baton.server.request.accepted import AcceptedRequest
from baton.server.request.dialects.parts import ValidationParts
from baton.server.request.grammar.constraint import GrammarFields
from baton.server.request.item_maker import AnswerLimit, PromptRows, RequestDraft
from baton.server.request.prompt.forms import is_batch, prompt_list
from baton.server.request.sampling.logprobs import read_completion_logprobs
from baton.server.request.sampling.params import read_max_tokens
from baton.server.request.schema import CompletionRequest, SamplingFields

COMPLETION_FIELDS = (CompletionRequest, SamplingFields, GrammarFields)
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions."""


async def accept_completion(parts: ValidationParts, body: dict[str, Any]) -> AcceptedRequest:
    """Raises EngineError that names a field of the body."""
    request = fields.read(CompletionRequest, body)
    sampling = fields.read(SamplingFields, body)
    parts.check_model(request.model)
    ignored = parts.find_ignored(body, unsupported_fields.COMPLETION, *COMPLETION_FIELDS)
    if request.best_of not in (None, sampling.n or 1):
        raise UnsupportedParameter(
            "best_of other than n is not supported; leave it out", param="best_of"
        )
    logprobs = read_completion_logprobs(request, parts.items.vocabulary)
    shared = await parts.shared.read(request, sampling, logprobs, ignored)
    draft = RequestDraft(shared, grammar=await parts.grammars.read(body))
    # With echo, 0 asks for the prompt alone.
    max_tokens = read_max_tokens(
        0 if request.echo else 1,
        max_tokens=sampling.max_tokens,
        max_completion_tokens=request.max_completion_tokens,
    )
    raw = prompt_list("prompt", request.prompt)
    prompts = await _read_prompts(parts, request, raw)
    limit = AnswerLimit(max_tokens, COMPLETION_MAX_TOKENS)
    accepted = parts.items.accept(draft, PromptRows(prompts, "prompt"), limit)
    if not request.echo:
        return accepted
    texts = await _texts_of_prompts(parts, request, raw, accepted)
    accepted = msgspec.structs.replace(accepted, echo=tuple(texts))
    return accepted.with_options(is_empty=max_tokens == 0)


async def _read_prompts(
    parts: ValidationParts, request: CompletionRequest, raw: list[Any]
) -> Sequence[Sequence[int]]:
    """Ids of the prompts: those that a router sends, or those of the texts."""
    many = is_batch(request.prompt)
    forwarded = parts.prompts.read_forwarded_ids(request, len(raw), "prompt", many=many)
    special = fields.value_or(request.add_special_tokens, True)
    return forwarded or await parts.prompts.read_prompts(request, raw, "prompt", special)


async def _texts_of_prompts(
    parts: ValidationParts, request: CompletionRequest, raw: list[Any], accepted: AcceptedRequest
) -> list[str]:
    """The texts as the client wrote them, or those of the ids that are left of its prompts."""
    if isinstance(raw[0], str) and request.truncate_prompt_tokens is None:
        return raw
    items = (item for item in accepted.items if item.choice == 0)
    rows = [item.prompt[: item.asked_tokens] for item in items]
    return await parts.prompts.decode(rows, accepted.answer.skip_special_tokens)
